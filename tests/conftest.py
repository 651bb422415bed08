"""Settings of the whole suite."""

from __future__ import annotations

import pytest
import torch

from tests import triton_interpreter

triton_interpreter.enable()  # before any test module imports Triton, which some libraries do


@pytest.fixture(autouse=True)
def one_thread():
    """Small products gain nothing from threads, and lose much when the machine is shared.

    Tests about thread counts set their own.
    """
    torch.set_num_threads(1)
