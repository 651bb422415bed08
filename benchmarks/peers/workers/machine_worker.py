"""Worker: what the machine itself can do, with torch: bytes read per second and matrix products."""

from __future__ import annotations

import loop

WEIGHTS, DTYPE, THREADS, POOL_TOKENS = loop.start()

import time  # noqa: E402
from collections.abc import Callable  # noqa: E402

import torch  # noqa: E402

REPEATS, SIDE = 7, 2048


class Machine:
    """The ceilings that no engine passes."""

    def __init__(self) -> None:
        torch.set_num_threads(THREADS)
        self.settings = f"best of {REPEATS}: sum of an array of the weights' size; {SIDE}-cubed product"
        self.versions = {"torch": torch.__version__}
        self.array = torch.ones((WEIGHTS / f"hf-{DTYPE}" / "model.safetensors").stat().st_size // 4)
        self.square = torch.randn(SIDE, SIDE).to(getattr(torch, DTYPE))

    def ceilings(self) -> dict[str, float]:
        """Bytes and floating-point operations per second."""
        read_s = min(_seconds(lambda: self.array.sum()) for _ in range(REPEATS))
        product_s = min(_seconds(lambda: self.square @ self.square) for _ in range(REPEATS))
        return {"read_bytes_s": self.array.nbytes / read_s, "gemm_flop_s": 2 * SIDE**3 / product_s}


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


loop.serve(Machine())
