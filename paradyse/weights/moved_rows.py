"""Weights whose rows move to other ranks, once, when a model is captured."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from paradyse.weights.layout import ShardLayout
from paradyse.weights.sharded_tensor import ShardedTensor, relayout


def relayout_weights(layouts: Sequence[tuple[ShardedTensor, ShardLayout]]) -> None:
    """``relayout`` of weights, and of all that shares memory with them, as ``.data`` and what
    ``state_dict()`` gave do; call it on every rank.

    Args:
        layouts: of each weight.
    """
    moved = [x for x, layout in layouts if x.placement != layout]
    known = [o for o in gc.get_objects() if type(o) is ShardedTensor] if moved else []
    known = [o for o in known if hasattr(o, "local")]  # fakes have none
    pairs = [(o, x) for x in moved for o in known if o.local.is_set_to(x.local)]
    for x, layout in layouts:
        relayout(x, layout)
    for alias, x in pairs:
        alias.local, alias.placement = x.local, x.placement
