"""This project's own engine behind the seam."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

import torch

from batchbench.adapters.engine import (
    REPORTS,
    EngineAdapter,
    schedule_config,
    swap_preference,
    translated,
    with_choices,
)
from batchbench.environment import memory_bytes
from batchbench.errors import UsageError
from batchbench.paths import FilePath
from batchbench.protocol import EngineDescription
from batchbench.scenario import EngineSettings
from batchbench.units import show_bytes
from engine.batch import Decoder
from engine.core import Engine
from engine.decoders import choose_decoder
from engine.errors import CheckpointError
from engine.gguf_file import load_gguf, open_gguf
from engine.gguf_tokenizer import gguf_tokenizer
from engine.hf_folder import load_folder, weight_files
from engine.model import Model
from engine.runner import ModelRunner
from engine.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from engine.weights import tiny_model


class OwnEngineFactory:
    """Loads the model once, proves the machine's numerics once, then builds an engine per pool.

    Sets torch's thread count for the whole process: bits are kept for one count, not across counts.
    """

    def __init__(self, settings: EngineSettings, *, audit: bool = False) -> None:
        self.settings, self.audit = settings, audit
        device = resolve_device(settings.device)
        # Small products gain nothing from threads and lose much when another process runs beside them.
        torch.set_num_threads(settings.threads)
        self.model = load_decoder(settings, device)
        self.model_hash = model_hash(settings)

    def __call__(self, pool_blocks: int, /, **choices: Any) -> OwnEngine:
        settings = with_choices(self.settings, choices)
        return OwnEngine(settings, self.model, pool_blocks, audit=self.audit, model_hash=self.model_hash)


class OwnEngine(EngineAdapter):
    """One engine with one pool."""

    def __init__(
        self,
        settings: EngineSettings,
        model: Decoder,
        pool_blocks: int,
        *,
        audit: bool = False,
        model_hash: str | None = None,
    ) -> None:
        config = schedule_config(settings, pool_blocks)
        self._settings, self._model, self._model_hash = settings, model, model_hash
        size = (pool_blocks + config.swap_blocks) * config.block_size * kv_bytes_per_token(model)
        try:
            if model.device.type == "cpu" and size > (memory_bytes() or size):
                raise MemoryError  # the system may promise more than there is, and end the process later
            runner = ModelRunner(model, config, track_writes=audit)
        except (RuntimeError, MemoryError):
            raise UsageError(
                f"pool of {pool_blocks} blocks of {config.block_size}: {show_bytes(size)} of K/V could not be "
                f"allocated on {model.device}"
            ) from None
        preference = swap_preference(settings, str(model.device))
        with translated():
            model.prepare(runner.store, config.slots, config.block_size)
            super().__init__(Engine(config, runner, with_audit=audit, prefers_swap=preference))

    def describe(self) -> EngineDescription:
        model = self._model
        return EngineDescription(
            engine="batchbench",
            model=self._settings.model.written,
            dtype=self._settings.dtype,
            device=str(model.device),
            model_hash=self._model_hash,
            kv_bytes_per_token=kv_bytes_per_token(model),
            weight_bytes=model.weight_bytes,
            iteration_weight_bytes=model.matrix_bytes,
            numerics=self._settings.numerics,
            numerics_detail=model.numerics,
            threads=self._settings.threads,
            reports=REPORTS,
            versions={"torch": torch.__version__, "python": platform.python_version()},
            **self.schedule(),
        )


def load_model(settings: EngineSettings, device: torch.device) -> Model:
    """`tiny`, or a Hugging Face folder or GGUF file at that path."""
    dtype, path = getattr(torch, settings.dtype), _model_path(settings)
    with translated():
        if path is None:
            return tiny_model(settings.seed, dtype, device)
        try:
            return (load_folder if path.is_dir() else load_gguf)(path, dtype, device)
        except CheckpointError as error:
            raise CheckpointError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def load_decoder(settings: EngineSettings, device: torch.device) -> Decoder:
    """The model, with what computes it chosen and checked."""
    model = load_model(settings, device)
    with translated():
        return choose_decoder(model, kernels=settings.kernels, numerics=settings.numerics, threads=settings.threads)


def model_hash(settings: EngineSettings) -> str:
    """SHA-256 of config.json and the weights, or of a GGUF file, byte by byte.

    What a tokenizer makes of texts is in the workload's hash.
    """
    path = _model_path(settings)
    if path is None:
        return hashlib.sha256(f"tiny, seed {settings.seed}".encode()).hexdigest()
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else [path / "config.json", *weight_files(path)]:
        with open(file, "rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def own_tokenizer(settings: EngineSettings) -> Tokenizer:
    """Bytes for `tiny`, a folder's tokenizer.json, or what a GGUF file carries. Raises UsageError."""
    path = _model_path(settings)
    with translated():
        if path is None:
            return byte_tokenizer()
        return load_tokenizer(path) if path.is_dir() else Tokenizer(gguf_tokenizer(open_gguf(path)))


def _model_path(settings: EngineSettings) -> Path | None:
    """None for `tiny`, else a folder or file that is there. Raises UsageError."""
    if settings.model.written == "tiny":
        return None
    path = Path(settings.model)
    if path.is_file():
        return path
    if path.is_dir():
        _require_inside(settings.model, path)
        return path
    raise UsageError(f"unknown model {str(path)!r}: not tiny, and no checkpoint folder or GGUF file of that path")


def _require_inside(written: FilePath, folder: Path) -> None:
    """Raise UsageError if a file of the model is a link that leads where the scenario may not."""
    for file in sorted(folder.iterdir()):
        try:
            inside = written.may_read(file)
        except (OSError, RuntimeError):  # links in a circle
            inside = False
        if not inside:
            raise UsageError(
                f"model {folder}: {file.name} leads out of the scenario's folder; write the model's absolute path "
                f"if it should"
            )


def kv_bytes_per_token(model: Decoder) -> int:
    return model.config.kv_elements_per_token * model.dtype.itemsize


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {name!r}; known: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return device
