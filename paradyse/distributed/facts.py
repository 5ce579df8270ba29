"""What ranks compare, what errors call it, and what to do where it differs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

DOING = "what they do"
WEIGHTS = "the weights (checksum)"
PROFILE = "the profile (checksum)"
FILES = "the files (checksum)"
RANDOM_STATE = "the random state"
GRADIENTS = "whether gradients are enabled"
PLAN = "the plan"
INPUTS = "the inputs given"
OPTIMIZERS = "how many of the model's optimizers have stepped"
PROGRAM = "the program (checksum)"
TRAINED = "which weights are trained (checksum)"
JOINED = "where gradients come together (checksum)"
REDUCE_DTYPE = "reduce_dtype"
NO_SYNC = "what becomes of gradients"
GATHERS = "the order in which weights are gathered (checksum)"
"""What errors call the facts."""

WAYS_OUT = {
    DOING: "every rank must run the same lines: call the model, run backward and read its outputs "
    "on all ranks or on none, and skip a batch on all ranks or on none",
    GRADIENTS: "enter torch.no_grad() and model.eval() on every rank alike",
    RANDOM_STATE: "call torch.manual_seed with the same seed on every rank of the group "
    "(dropout draws from it)",
    WEIGHTS: "call torch.manual_seed with the same seed on every rank before the "
    "model is built, or load the same checkpoint on all",
    FILES: "give every rank the same files, or a copy of them",
    PROFILE: "give option 'cost_model' a copy of one file on every rank",
    OPTIMIZERS: "call optimizer.step() on every rank or on none",
    PROGRAM: "the model must be in the same state on every rank: training or evaluation, autocast, "
    "gradient checkpointing, what is trained; where its code goes through a set (as Gemma 4's "
    "does), start all ranks with one PYTHONHASHSEED, such as 0",
    TRAINED: "requires_grad of each weight must be the same on every rank: where what is trained "
    "is drawn by chance, seed that on every rank alike",
    JOINED: "replicas must train the same weights by the same program: give all of them batches of "
    "one kind, such as with images or without, and train the same weights on all",
    REDUCE_DTYPE: "give paradyse.shard one reduce_dtype on every rank",
    NO_SYNC: "enter paradyse.no_sync, and clear gradients, on every rank alike",
    GATHERS: "groups of ranks side by side must gather the same weights in the same order: give "
    "groups of every size a model in the same state, and calls with the same arguments",
    PLAN: "a function given as option 'plan' must give equal answers on all ranks",
}
SAME_BATCH = (
    "every rank of a sequence-parallel group must be given the same global batch; split data only "
    "across data-parallel replicas"
)


def difference(told: Sequence[tuple[int, Any, Mapping[str, Any], Any]], ranks: list[int]) -> str:
    """What to raise for the first fact that differs, over all ranks or within those of one axis.

    Args:
        told: by each rank: the first rank of its axis, the facts that all ranks share, those and
            the facts that the ranks of the axis share, and anything.
        ranks: in the world.
    """
    everyone = range(len(told))
    axes = [[i for i in everyone if told[i][0] == a] for a in sorted({t[0] for t in told})]
    for of, names in ((everyone, told[0][1]), *((axis, told[axis[0]][2]) for axis in axes)):
        for name in names:
            held = [told[i][2].get(name, "nothing") for i in of]
            if len(set(held)) > 1:
                who = ", ".join(f"rank {ranks[i]}: {v}" for i, v in zip(of, held, strict=True))
                way_out = WAYS_OUT.get(
                    WEIGHTS if name.startswith("the weight ") else name, SAME_BATCH
                )
                return f"ranks of one group disagree on {name}: {who}. {way_out}."
    return f"ranks of one group disagree: {told}"


def digest(x: Any) -> int:
    """64 bits that stand for ``x``, text, numbers and mappings of them; equal in every process."""
    hashed = hashlib.blake2b(repr(x).encode(), digest_size=8)
    return int.from_bytes(hashed.digest(), "little", signed=True)
