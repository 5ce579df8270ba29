"""Triton kernels compiled ahead of time for devices that are not here, and what they take of one.

Private interfaces, tried on TRIED: ``triton.compiler.ASTSource`` and its ``attrs``,
``triton.backends.compiler.GPUTarget``, ``JITFunction.params``, and ``cuobjdump`` of the wheel, as
triton itself drops what ptxas says.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that one block may have, by compute capability (CUDA C++ Programming
Guide, table "Technical Specifications per Compute Capability")."""

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


@dataclass(frozen=True)
class Case:
    """A kernel and the arguments of a launch."""

    name: str
    kernel: Any
    args: dict[str, Any]
    """By parameter: a dtype for a tensor of it, numbers as they are, whatever a constant takes."""
    options: dict[str, int] = field(default_factory=dict)
    """num_warps and num_stages, where they are not triton's own."""


def source(case: Case) -> Any:
    """As the launch would specialize it: 1 is a constant, multiples of 16 are known to be such."""
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attrs: dict[tuple[int, ...], Any] = {}
    for i, p in enumerate(case.kernel.params):
        x = case.args[p.name]
        if p.is_constexpr or x is None or (x == 1 and type(x) is int):
            signature[p.name], constants[p.name] = "constexpr", x
        elif isinstance(x, torch.dtype):
            signature[p.name] = POINTERS[x]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(x, int):
            signature[p.name] = "i32" if -(2**31) <= x < 2**31 else "i64"
            if x % 16 == 0:
                attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[p.name] = "fp32"
    assert set(case.args) == set(signature), set(case.args) ^ set(signature)
    return ASTSource(case.kernel, signature, constants, attrs)


def usage(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes a thread of stack and local memory, which spills take."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        out = subprocess.run(
            [str(tool), "--dump-resource-usage", f.name], capture_output=True, text=True, check=True
        ).stdout
    found = {key: int(n) for key, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", out)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}


def compiled(case: Case, arch: int) -> dict[str, Any]:
    """What ``case`` takes of a device of compute capability ``arch``."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = triton.compile(
        source(case), target=GPUTarget("cuda", arch, 32), options=dict(case.options)
    )
    return {
        "kernel": case.name,
        "arch": arch,
        **usage(kernel.asm["cubin"]),
        "shared": kernel.metadata.shared,
    }
