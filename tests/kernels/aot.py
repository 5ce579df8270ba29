"""Triton kernels compiled ahead of time for devices that are not here, and what they take of one.

The launches are those of the code itself: it runs with a launch put in the place of Triton's that
notes arguments and does nothing. Private interfaces, tried on triton 3.6 and 3.9:
``JITFunction.run`` and ``params``, ``triton.compiler.ASTSource`` and its ``attrs``, ``GPUTarget``,
and ``cuobjdump`` of the wheel, as triton itself drops what ptxas says.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from unwritten import disassembled, unwritten

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one block may have, by compute capability (CUDA C++ Programming
Guide, table "Technical Specifications per Compute Capability")."""

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


Place = tuple[int, ...]
"""The index of a parameter, then those inside tuples."""


@dataclass(frozen=True)
class Launch:
    """A kernel, and the arguments of one launch as Triton would specialize them."""

    kernel: Any
    signature: dict[str, Any]
    """Types by parameter; of a tuple a tuple of them."""
    constants: dict[Place, Any]
    aligned: tuple[Place, ...]
    """Parameters that are multiples of 16."""
    options: dict[str, Any]
    """num_warps and the like."""

    @property
    def tile(self) -> str:
        """The constants that are sizes, for people."""
        sizes: dict[str, Any] = {}
        for i, p in enumerate(self.kernel.params):
            if p.is_constexpr:
                x = self.constants[i,]
                sizes |= x._asdict() if isinstance(x, tuple) else {p.name: x}
        shown = [k for k, x in sizes.items() if type(x) is int and not k.startswith("STRIDE")]
        return ", ".join(f"{k} {sizes[k]}" for k in shown)

    @property
    def key(self) -> str:
        return str((self.kernel.__name__, *list(vars(self).values())[1:]))


def _specialized(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    names = [p.name for p in kernel.params]
    given = {**dict(zip(names, args)), **{k: v for k, v in kwargs.items() if k in names}}
    options = {k: v for k, v in kwargs.items() if k not in names}
    constants: dict[Place, Any] = {}
    aligned: list[Place] = []

    def specialize(x: Any, path: Place, free: bool) -> Any:
        """The type of an argument; ``free``: whatever its value."""
        if isinstance(x, tuple):  # whose elements Triton specializes in any case
            return type(x)(*(specialize(y, (*path, i), False) for i, y in enumerate(x)))
        if x is None or (type(x) is int and x == 1 and not free):
            constants[path] = x
            return "constexpr"
        if isinstance(x, torch.Tensor):
            if x.data_ptr() % 16 == 0:
                aligned.append(path)
            return _POINTERS[x.dtype]
        if isinstance(x, int):
            if x % 16 == 0 and not free:
                aligned.append(path)
            return "i32" if -(2**31) <= x < 2**31 else "i64"
        return "fp32"

    signature: dict[str, Any] = {}
    for i, p in enumerate(kernel.params):
        if p.is_constexpr:
            signature[p.name], constants[i,] = "constexpr", given[p.name]
        else:
            signature[p.name] = specialize(given[p.name], (i,), p.do_not_specialize)
    return Launch(kernel, signature, constants, tuple(aligned), options)


@contextmanager
def noted(note: Callable[[Any, Any, Any, Any], object]) -> Iterator[None]:
    """Inside no kernel runs; ``note(kernel, grid, args, kwargs)`` is told of each launch."""
    from triton.runtime.jit import JITFunction

    def told(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        note(kernel, grid, args, kwargs)

    with mock.patch.object(JITFunction, "run", told):
        yield


def launches(run: Callable[[], Any]) -> list[Launch]:
    """What ``run`` launches, each once, in its order. No kernel runs."""
    found: dict[str, Launch] = {}

    def note(kernel: Any, grid: Any, args: Any, kwargs: Any) -> None:
        launch = _specialized(kernel, args, kwargs)
        found.setdefault(launch.key, launch)

    with noted(note):
        run()
    return list(found.values())


def grids(run: Callable[[], Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Kernel and grid of all that ``run`` launches. No kernel runs."""
    found: list[tuple[str, tuple[int, ...]]] = []
    with noted(lambda kernel, grid, *_: found.append((kernel.__name__, tuple(grid)))):
        run()
    return found


def _usage(cubin: bytes) -> dict[str, int]:
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


TENSOR_CORES = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
"""Products of tiles in PTX: of sm_80, of sm_90 by groups of warps, of sm_100."""


def kernel_of(launch: Launch, arch: int) -> Any:
    """``launch`` compiled for compute capability ``arch``, as Triton has it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    attrs = {path: [["tt.divisibility", 16]] for path in launch.aligned}
    source = ASTSource(launch.kernel, launch.signature, launch.constants, attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(launch.options))


def compiled(launch: Launch, arch: int) -> dict[str, Any]:
    """What ``launch`` takes of a device of compute capability ``arch``: registers, bytes spilled
    and bytes of shared memory; how often each of ``TENSOR_CORES`` is in its code; and instructions
    that read what was not written.
    """
    kernel = kernel_of(launch, arch)
    counts = {name: kernel.asm["ptx"].count(name) for name in TENSOR_CORES}
    used = {name: n for name, n in counts.items() if n}
    cubin = kernel.asm["cubin"]
    found = {
        "shared": kernel.metadata.shared,
        "products": used,
        "unwritten": unwritten(disassembled(cubin)),
    }
    return _usage(cubin) | found
