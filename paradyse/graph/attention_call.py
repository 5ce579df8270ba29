"""``paradyse::attention`` in a graph: its arguments by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import fx

import paradyse.kernels.attention_op  # noqa: F401  registers the operator
from paradyse.types import MaskSpec

ATTENTION = torch.ops.paradyse.attention.default

Apply = Callable[..., Any]
"""(an operator of attention, its arguments) -> its results."""


def apply_operator(op: Any, *args: Any) -> Any:
    """The results of ``op`` for ``args``: an ``Apply``."""
    return op(*args)


def _is_narrow(bias: Any) -> bool:
    """Whether ``bias`` has no number for each pair: by distance, or along one dim of tokens."""
    shape = (bias.meta["val"] if isinstance(bias, fx.Node) else bias).shape
    return len(shape) == 3 or 1 in shape[2:]


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention: nodes where it stands in a graph, tensors where it runs.

    The fields are the operator's arguments, in its order; shapes and dtypes are stated there.
    """

    q: Any
    k: Any
    v: Any
    key_padding: Any = None
    document_ids: Any = None
    bias: Any = None
    seed: Any = None
    left: int = -1
    right: int = -1
    chunk: int = -1
    scale: float = 1.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    head_ids: Any = None
    info: Any = None
    sinks: Any = None
    sequence_ids: Any = None

    @classmethod
    def of(cls, node: fx.Node) -> AttentionCall:
        """The call that ``node`` is.

        Raises:
            ValueError: ``node`` calls another operator.
        """
        if node.target is not ATTENTION:
            raise ValueError(f"{node.name} calls {node.target}, not {ATTENTION}")
        return cls(*node.args, **node.kwargs)

    @property
    def qkv(self) -> tuple[Any, Any, Any]:
        return self.q, self.k, self.v

    @property
    def is_cross(self) -> bool:
        """Whether its keys are of another sequence than its queries; of nodes in a graph."""
        q, k = (x.meta["val"].shape for x in (self.q, self.k))
        return bool(q[2] != k[2])

    @property
    def masks(self) -> tuple[Any, Any, Any]:
        """Key padding, document ids and bias; they stay whole when tokens are split."""
        return self.key_padding, self.document_ids, self.bias

    @property
    def mask_nodes(self) -> list[fx.Node]:
        """Those of ``masks`` that are there."""
        return [m for m in self.masks if isinstance(m, fx.Node)]

    @property
    def args(self) -> tuple[Any, ...]:
        """The operator's arguments, without those at the end that are not given."""
        given = [getattr(self, f.name) for f in fields(self)]
        while given[-1] is None:
            given.pop()
        return tuple(given)

    @property
    def rest(self) -> tuple[Any, ...]:
        """``args`` after q, k and v."""
        return self.args[3:]

    @property
    def mask_spec(self) -> MaskSpec | None:
        """What the mask means by position; None where it is a dense bias."""
        if self.bias is not None and not _is_narrow(self.bias):
            return None
        left, right, chunk = (None if n < 0 else n for n in (self.left, self.right, self.chunk))
        data = self.key_padding is not None, self.document_ids is not None
        return MaskSpec(left, right, chunk, *data, bias=self.bias is not None)

    def seeded(self, seed: Any, sequence_ids: Any = None) -> AttentionCall:
        """With ``seed`` (int64 []) and ``sequence_ids``, if the call has dropout."""
        given = (seed, sequence_ids) if self.dropout_p > 0 else (None, None)
        return replace(self, seed=given[0], sequence_ids=given[1])

    def run(self, apply: Apply = apply_operator) -> Any:
        """The operator's results for a whole sequence on one rank, out and lse; ``apply`` calls
        it.
        """
        return apply(ATTENTION, *self.args)
