"""Uniform registers that a kernel may read before it has written them, found in its machine code.

The addresses of tiles that wgmma multiplies lie in uniform registers. The ptxas of Triton 3.6
computes some of them from a register that was not written on the way there; the code runs, and
multiplies whatever lies at the address. The analysis is that of definite assignment, over the flow
of the code as ``nvdisasm`` of Triton's wheel prints it (tried on those of triton 3.6 and 3.9). A
register that the code writes nowhere is none of its own: functions of the runtime have such.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_WRITES_UNIFORM = ("U", "R2UR", "S2UR", "LDCU", "REDUX", "VOTEU", "CREDUX")
_WIDE = {".64": 2, ".WIDE": 2, ".128": 4}
"""Suffix of an operator -> registers that it writes."""


@dataclass(frozen=True)
class Instruction:
    """One line of the code."""

    text: str
    reads: frozenset[int]
    writes: frozenset[int]
    """Numbers of uniform registers."""
    goes_on: bool
    """The next one may follow."""
    target: str
    """Of a jump or call, else empty."""


def _parsed(text: str) -> Instruction:
    body = _PREDICATE.sub("", text)
    name, _, rest = body.partition(" ")
    operands = [x.strip() for x in re.split(r",(?![^\[]*\])", rest)] if rest else []
    writes = set[int]()
    if name.startswith(_WRITES_UNIFORM) and operands and (m := _UNIFORM.fullmatch(operands[0])):
        count = max((n for suffix, n in _WIDE.items() if suffix in name), default=1)
        writes |= {int(m[1]) + i for i in range(count)}
        operands = operands[1:]
    reads = set[int]()
    for operand in operands:
        for m in _UNIFORM.finditer(operand):
            first, some = int(m[1]), range(1)
            if "gdesc[" in operand:  # of both tiles, or behind them of the second alone
                in_registers = re.fullmatch(r"R\d+(\.reuse)?", operands[1]) is not None
                some = range(2, 4) if in_registers else range(4)
            elif "desc[" in operand:
                some = range(2)
            reads |= {first + i for i in some}
    goes_there = name.startswith(("BRA", "JMP", "CALL"))  # BSSY names where ways come together
    jump = _TARGET.search(text) if goes_there else None
    ends = name.startswith(("BRA", "JMP", "EXIT", "RET")) and "UP" not in rest
    conditional = text.startswith("@") or name == "BRA.DIV"
    return Instruction(
        text, frozenset(reads), frozenset(writes), not ends or conditional, jump[1] if jump else ""
    )


def disassembled(cubin: bytes) -> str:
    """The code of the kernel in ``cubin``."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        done = subprocess.run([str(tool), "-c", f.name], capture_output=True, text=True, check=True)
    return done.stdout


def _read(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of code, and where its labels are."""
    code, labels = list[Instruction](), dict[str, int]()
    for line in text.splitlines():
        text = re.sub(r"/\*.*?\*/", "", line).strip()
        if m := _LABEL.match(text):
            labels[m[1]] = len(code)
        elif text.endswith(";") and not text.startswith((".", "//")):
            code.append(_parsed(text[:-1].strip()))
    return code, labels


def unwritten(code_text: str) -> list[str]:
    """Instructions of ``disassembled`` code that read a uniform register which, on some way to
    them, was not written."""
    code, labels = _read(code_text)
    own = frozenset[int]().union(*(x.writes for x in code))
    written = {0: frozenset[int]()}  # before an instruction, on every way to it
    todo = [0]
    while todo:
        at = todo.pop()
        after = written[at] | code[at].writes
        following = [labels[code[at].target]] if code[at].target in labels else []
        following += [at + 1] * (code[at].goes_on and at + 1 < len(code))
        for other in following:
            known = written.get(other)
            common = after if known is None else known & after
            if common != known:
                written[other] = common
                todo.append(other)
    return [code[i].text for i in sorted(written) if (code[i].reads - written[i]) & own]
