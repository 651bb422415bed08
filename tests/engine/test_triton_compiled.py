"""What the interpreter cannot show: that the kernels compile for Hopper, on tensor cores, without spilling."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.triton_interpreter import MISSING

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_as_meant(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.triton_for_hopper"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    built = [json.loads(line) for line in ran.stdout.splitlines()]
    kernels = {"_attend", "_merge", "_linear", "_add_slices", "_rms_norm", "_rotate_and_store", "_silu_gate"}
    assert {kernel["kernel"] for kernel in built} == kernels
    for kernel in built:
        assert kernel["spilled_bytes"] <= 128, kernel  # the assembler may park a few; a tile too large spills thousands
        assert not kernel["tf32"], kernel
        # One instruction family and one inner size for all bfloat16 products: what several tile shapes rely on.
        on_tensor_cores = kernel["kernel"] in ("_attend", "_linear") and kernel["type"] == "bf16"
        assert kernel["products"] == ([["wgmma.mma_async", "k16"]] if on_tensor_cores else []), kernel
