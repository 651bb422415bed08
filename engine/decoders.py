"""Chooses what computes a model, and checks at start-up that it keeps its promise."""

from __future__ import annotations

import warnings

from engine.batch import Decoder
from engine.cpu_model import CpuModel
from engine.errors import ConfigError, KernelsUnavailable
from engine.model import Model
from engine.numerics import FAST
from engine.selftest import check_decoder, choose_tiles

KERNELS = ("auto", "native", "triton", "torch")
NUMERICS = ("exact", "fast")


def choose_decoder(model: Model, *, kernels: str = "auto", numerics: str = "exact", threads: int = 1) -> Decoder:
    """The decoder that runs `model`, whose weights it takes over.

    kernels: `native` (C++ on the processor), `triton` (on a CUDA device), `torch`, or `auto`: the one made for the
    device, and torch with a warning where that cannot be had. numerics: `exact` (a request's bits do not depend on
    its company; NumericsError if that cannot be had here), or `fast`: torch in the shapes that a batch happens to
    have, with no promise. threads: of the native kernels; torch's count is the caller's.
    Raises ConfigError for an unknown or contradictory choice, KernelsUnavailable if kernels were asked for in vain.
    """
    if kernels not in KERNELS or numerics not in NUMERICS:
        raise ConfigError(
            f"kernels {kernels!r}, numerics {numerics!r}: known are {', '.join(KERNELS)} and {', '.join(NUMERICS)}"
        )
    if kernels in ("native", "triton") and numerics == "fast":
        raise ConfigError(f"numerics fast leaves the shapes to torch; kernels {kernels!r} are exact alone")
    if numerics == "fast":
        return Model(model.config, model.weights, FAST)
    made_for_device = "native" if model.device.type == "cpu" else "triton"
    wanted = made_for_device if kernels == "auto" else kernels
    if wanted != "torch":
        try:
            decoder = _native(model, threads) if wanted == "native" else _triton(model)
        except KernelsUnavailable as error:
            if kernels != "auto":
                raise
            warnings.warn(f"{wanted} kernels are not available, torch computes instead: {error}", stacklevel=2)
        else:
            check_decoder(decoder)
            return decoder
    decoder = Model(model.config, model.weights, choose_tiles(model))
    check_decoder(decoder)
    return decoder


def _native(model: Model, threads: int) -> Decoder:
    if model.device.type != "cpu":
        raise KernelsUnavailable(f"the native kernels run on the processor, not on {model.device}")
    return CpuModel(model.config, model.weights, threads)


def _triton(model: Model) -> Decoder:
    try:
        from engine.triton_model import TritonModel  # machines without Triton never need it
    except ImportError as error:
        raise KernelsUnavailable(f"Triton cannot be imported ({error}); pip install triton") from None
    return TritonModel(model)
