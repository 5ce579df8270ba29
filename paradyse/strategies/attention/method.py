"""What a way to compute attention across ranks is given, and what it has to say of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from paradyse.distributed.axis import Axis, TokenLayout
from paradyse.kernels.attention_core import empty_lse
from paradyse.kernels.attention_mask import AttentionSpec


@dataclass(frozen=True)
class Context:
    """One call, besides its tensors."""

    spec: AttentionSpec
    """Of the whole sequence: masks and bias are whole, and equal on all ranks."""
    axis: Axis
    block_id: int
    """The block whose traffic the messages are."""
    num_kv_heads: int
    key_width: int
    """D; values may have another width."""
    across: bool = False
    """Keys are of another sequence than queries."""

    @property
    def layouts(self) -> tuple[TokenLayout, TokenLayout]:
        """Where queries and where keys lie."""
        return self.axis.layout(self.spec.num_queries), self.axis.layout(self.spec.seq_len)


@dataclass(frozen=True)
class Method:
    """Forward and backward of one way. Tokens are local: s of them on each of the p ranks, in the
    order of ``TokenLayout.runs``; rows of padding tokens are 0. Keys may be of another sequence,
    which lies alike: then a rank holds another number of them.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Context], tuple[Tensor, list[Tensor]]]
    """(q [B, H, s, D], k [B, Hk, s, D], v [B, Hk, s, Dv], context) -> (out [B, H, s, Dv] in q's
    dtype, contiguous tensors that backward needs)."""
    backward: Callable[
        [Tensor, Sequence[Tensor], Context, bool],
        tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    ]
    """(gradient of out, saved tensors, context, whether the bias needs a gradient) -> (dq, dk, dv,
    this rank's shares of the gradients of bias and sinks; None for no share)."""
    keeps_inputs: bool = True
    """Backward's saved tensors are q, k, v, out and what forward says; else the latter alone."""
    fake_kept: Callable[[Tensor, Tensor, Tensor, Axis, bool], list[Tensor]] = lambda q, *_: [
        empty_lse(q)
    ]
    """(q, k, v, axis, whether keys are of another sequence) -> empty tensors like those that
    ``forward`` gives for backward."""
    steps_alike: bool = False
    """It takes p steps that are alike, of which a dry run needs only a few."""
