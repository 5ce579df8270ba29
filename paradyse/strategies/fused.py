"""Blocks in a row as one compiled piece.

What a compiled region costs the host, with its node in autograd's graph, is as much as a block of a
short sequence computes. The variants of the blocks are put together as they are: one function calls
them one after the other, so layers that are alike share what is compiled, as blocks do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.graph.attention_call import ATTENTION, AttentionCall
from paradyse.graph.lower import Dims
from paradyse.kernels.selection import flash_of_short
from paradyse.strategies.base import (
    NUM_COMMON,
    Common,
    LoweredPiece,
    PieceVariant,
    Scope,
    StepContext,
    common_dims,
)
from paradyse.strategies.local import LocalPiece
from paradyse.torch_private import cpu_flash, flash_attention


@dataclass(frozen=True)
class Member:
    """One of the blocks."""

    variant: PieceVariant
    outputs: Sequence[fx.Node]
    """What it gives."""
    placed: bool
    """Whether it asks for its own info and seed (``StepContext.common``): where there are messages
    or dropout."""


class FusedPiece:
    """The blocks ``members`` as one compiled piece.

    Args:
        scope: what all variants of the capture share.
        members: in the order of computation.
        outputs: what is read of them afterwards.
        steps: the contexts of one call. ``get`` of a value that a member makes gives None.
    """

    def __init__(
        self,
        scope: Scope,
        members: Sequence[Member],
        outputs: Sequence[fx.Node],
        steps: Sequence[StepContext],
    ):
        self.members, self.outputs = members, outputs
        self._sources = [_sources(m, step) for m, step in zip(members, steps, strict=True)]
        """Per member and tensor of it the node that another member makes, or None."""
        made = {n: f"m{i}.{k}" for i, m in enumerate(members) for k, n in enumerate(m.outputs)}
        dims: list[Dims] = []
        lines = ["fused", " ".join(made[n] for n in outputs)]
        for member, sources in zip(members, self._sources, strict=True):
            dims += common_dims(member.variant.lowered.scope)[3:] if member.placed else []
            own = zip(member.variant.lowered.dims[NUM_COMMON:], sources, strict=True)
            dims += [d for d, source in own if source is None]
            wires = " ".join("-" if n is None else made[n] for n in sources)
            lines.append(f"{member.placed} {wires}\n{member.variant.lowered.key}")
        self.lowered = LoweredPiece(scope, "\n".join(lines), self.compute, dims)
        read = zip(members, self._sources, strict=True)
        self._read = [_read(m, sources) for m, sources in read] if scope.axis.size == 1 else []

    def compute(
        self, sizes: dict[str, Any], common: Sequence[Tensor], own: Iterator[Tensor]
    ) -> Sequence[Any]:
        """What ``outputs`` names.

        Args:
            sizes: by letter.
            common: of any of the steps.
            own: the tensors of the members, one after the other; where a member is ``placed``, its
                info and seed [] before them. Those that members make are left out.
        """
        made: dict[fx.Node, Any] = {}
        for member, sources in zip(self.members, self._sources, strict=True):
            at = (*common[:3], next(own), next(own)) if member.placed else common
            given = [next(own) if n is None else made[n] for n in sources]
            outputs = member.variant.compute(sizes, at, iter(given), attend)
            outputs = [o.contiguous() if isinstance(o, Tensor) else o for o in outputs]
            made.update(zip(member.outputs, outputs, strict=True))
        return [made[n] for n in self.outputs]

    def __call__(self, steps: Sequence[StepContext]) -> Any:
        own: list[Tensor] = []
        for member, step in zip(self.members, steps, strict=True):
            if member.placed:
                own += step.common[3:]
            own += [x for x in member.variant.tensors(step) if x is not None]
        return self.lowered(steps[0].sizes, steps[0].common, own)

    def on_values(
        self, values: Mapping[fx.Node, Any], steps: Sequence[Common], sizes: Mapping[str, int]
    ) -> Any:
        """The same on one rank, where tensors are values and whole weights as they are.

        Args:
            values: of the call.
            steps: ``StepContext.common`` of each.
            sizes: by letter.
        """
        own: list[Tensor] = []
        for member, read, common in zip(self.members, self._read, steps, strict=True):
            if member.placed:
                own += common[3:]
            own += [values[n] for n in read]
        return self.lowered(sizes, steps[0], own)


def _read(member: Member, sources: Sequence[fx.Node | None]) -> list[fx.Node]:
    """The tensors of ``member`` on one rank but those that others make (``sources``)."""
    assert isinstance(member.variant, LocalPiece), "one rank computes all by itself"
    pairs = zip(member.variant.order, sources, strict=True)
    return [n for n, source in pairs if source is None]


def _sources(member: Member, step: StepContext) -> list[fx.Node | None]:
    """Per tensor of ``member`` the value of another member that it is, None for all others."""
    inside: list[fx.Node] = []

    def get(node: fx.Node, layout: str) -> Any:
        value = step.get(node, layout)
        if value is None:
            inside.append(node)
        return value

    tensors, found = member.variant.tensors(replace(step, get=get)), iter(inside)
    sources = [next(found) if x is None else None for x in tensors]
    assert next(found, None) is None, "a tensor made of a value that another member makes"
    return sources


def attend(op: Any, *args: Any) -> Any:
    """The results of ``op``, an operator of attention, for ``args``: an ``Apply``. Where it is one
    call of PyTorch's flash attention, that stands in the graph by itself, as our own operators cost
    the host several times as much as the kernel of a short sequence."""
    if op is not ATTENTION:
        return op(*args)
    call = AttentionCall(*args)
    q, k, v = call.qkv
    # Whatever else the operator may be asked for, the kernel does not know.
    plain = AttentionCall(q, k, v, right=call.right, scale=call.scale)
    unread = replace(call, head_ids=None, info=None)  # by plain attention on one rank
    if unread != plain or call.right > 0 or q.shape[-1] != v.shape[-1]:
        return op(*args)
    causal = call.right == 0
    if q.device.type == "cuda" and flash_of_short(q.device, q.dtype, q.shape[-1]):
        q, k, v = map(_adjacent, (q, k, v))
        return flash_attention(q, k, v, 0.0, causal, False, scale=call.scale)[:2]
    if q.device.type != "cpu" or cpu_flash is None:
        return op(*args)
    group = q.shape[1] // k.shape[1]
    if group > 1 and k.shape[1] < torch.get_num_threads():  # it divides its work by key heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return cpu_flash(*map(_adjacent, (q, k, v)), 0.0, causal, scale=call.scale)


def _adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
