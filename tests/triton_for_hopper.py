"""Compiles every Triton kernel for an H100 or H200 without having one, as the engine would launch it.

Run as a process of its own, since Triton must not be in its interpreter. Prints a JSON line for each: kernel, type,
instructions of its matrix products, bytes of spilled registers, whether TF32 occurs.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from engine.triton_attention import paged_attention
from engine.triton_linear import SHAPES, linear
from engine.triton_rows import rms_norm, rotate_and_store, silu_gate

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32"}
seen: set[str] = set()


def compile_instead(kernel, *args, grid, warmup, **options):
    """Stands in for a launch: compile for the arguments given."""
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: options.pop(name) for name in kernel.arg_names if name in options}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        aligned = [["tt.divisibility", 16]]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[(index,)] = "*" + TYPES[value.dtype], aligned
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = aligned
    source = ASTSource(kernel, signature, constants, attributes)
    if source.hash() + str(options) in seen:
        return
    seen.add(source.hash() + str(options))
    built = triton.compile(source, target=HOPPER, options=options)
    ptx = built.asm["ptx"]
    print(
        json.dumps(
            {
                "kernel": kernel.__name__,
                "type": TYPES[args[0].dtype],
                "products": sorted(set(re.findall(r"\b(wgmma\.mma_async|mma\.sync)\S*\.m\d+n\d+(k\d+)", ptx))),
                "spilled_bytes": spilled_bytes(built.asm["cubin"]),
                "tf32": "tf32" in ptx,
            }
        ),
        flush=True,
    )


def spilled_bytes(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", said.stdout)
    assert found, said.stdout
    return int(found.group(1))


def main() -> None:
    JITFunction.run = compile_instead
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES[dtype]:
            linear(torch.empty(3, 4096, dtype=dtype), torch.empty(512, 4096, dtype=dtype), (shape,))
        tables, tiles = torch.zeros(3, 64, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32)
        for head_dim in (64, 128) if dtype == torch.bfloat16 else (128,):
            pool = torch.empty(8, 1024, head_dim, dtype=dtype)
            paged_attention(torch.empty(3, 32, head_dim, dtype=dtype), pool, pool, tables, tiles, 16, split=True)
    x = torch.empty(3, 2048, dtype=torch.bfloat16)
    linear(x, x, SHAPES[x.dtype], bias=x[0], residual=torch.empty(3, 3, dtype=x.dtype))
    rms_norm(x, x[0], 1e-5)
    silu_gate(x)
    numbers, angles = tables[:, 0].contiguous(), torch.empty(64, 32)
    pool = torch.empty(4, 1024, 64, dtype=x.dtype)
    rotate_and_store(x, numbers, numbers, angles, angles, pool, pool, 24, (x[0], x[0]), 1e-6)


if __name__ == "__main__":
    main()
