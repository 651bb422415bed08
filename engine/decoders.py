"""Chooses what computes a model, and checks at start-up that it keeps its promise."""

from __future__ import annotations

import warnings

from engine.batch import Decoder
from engine.cpu_model import CpuModel
from engine.errors import ConfigError, KernelsUnavailable
from engine.model import Model
from engine.numerics import FAST
from engine.selftest import check_decoder, choose_tiles

KERNELS = ("auto", "native", "torch")
NUMERICS = ("exact", "fast")


def choose_decoder(model: Model, *, kernels: str = "auto", numerics: str = "exact", threads: int = 1) -> Decoder:
    """The decoder that runs `model`, whose weights it takes over.

    kernels: `native` (C++ on the processor), `torch`, or `auto`: native where it can be built, with a warning
    where it cannot. numerics: `exact` (a request's bits do not depend on its company; NumericsError if that
    cannot be had here), or `fast`: torch in the shapes that a batch happens to have, with no promise.
    threads: of the native kernels; torch's count is the caller's.
    Raises ConfigError for an unknown or contradictory choice, KernelsUnavailable if native was asked for in vain.
    """
    if kernels not in KERNELS or numerics not in NUMERICS:
        raise ConfigError(
            f"kernels {kernels!r}, numerics {numerics!r}: known are {', '.join(KERNELS)} and {', '.join(NUMERICS)}"
        )
    if kernels == "native" and numerics == "fast":
        raise ConfigError("numerics fast leaves the shapes to torch; the native kernels are exact and no slower for it")
    if numerics == "fast":
        return Model(model.config, model.weights, FAST)
    if kernels != "torch" and model.device.type == "cpu":
        try:
            native = CpuModel(model.config, model.weights, threads)
        except KernelsUnavailable as error:
            if kernels == "native":
                raise
            warnings.warn(f"native kernels are not available, torch is several times slower: {error}", stacklevel=2)
        else:
            check_decoder(native)
            return native
    if kernels == "native":
        raise KernelsUnavailable(f"the native kernels run on the processor, not on {model.device}")
    return Model(model.config, model.weights, choose_tiles(model))
