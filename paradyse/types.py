"""Frozen values that the parts of ParaDySe hand each other; nothing here needs a device."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

DSP = "dsp"
"""The strategy that switches the split to another dim of the tokens and back."""

ALONG_SEQUENCE = ("megatron_ts", "megatron_cz", "ulysses_z", "colossal_z", "metp")
"""Strategies that need no other dim of the tokens than their sequence, not even a batch."""

ATTENTION_STRATEGIES = (*ALONG_SEQUENCE, DSP)
"""Names a plan may use. For an MLP block the three ``*_z`` names and ``dsp`` mean the same
variant."""

WHOLE_WEIGHTS = ("megatron_cz", "ulysses_z", "colossal_z")
"""Those that compute with whole weights and split the tokens along their sequence alone."""

REPLICATED = "replicated"
"""Every rank computes all tokens, with whole weights, and nothing crosses ranks but gradients. So
do blocks on one rank, and on several either all of them and the head or none (``Plan.alone``)."""

BATCH = "batch"
"""``Plan.split`` where each rank computes its own sequences, with all tokens of them."""


def other_dim(number: int) -> str:
    """``Plan.split`` along another dim of the tokens than the sequence, the ``number``-th, from 1
    on, in the order of ``Workload.others``."""
    return f"dim{number}"


SPLITS = (BATCH, *map(other_dim, range(1, 4)))
"""What ``Plan.split`` may say besides ""."""

VOCABULARY = "vocabulary"
"""The lever of the head under which ranks share the words."""

LEVERS = ("recompute", "selective", "tiled", "chunked", VOCABULARY, "offload")
"""Ways to trade time for memory, in the order in which a point lists them.

``recompute`` keeps a block's input alone and computes the block again in backward; ``selective``
also keeps what attention made; ``tiled`` computes chunks of tokens one after the other, each again
in its backward; ``chunked`` does so around an attention whose queries, keys, values and output lie
on the host, and which fetches them by chunks; ``vocabulary``: each rank multiplies the rows of the
head that it holds, and looks up those of the embedding; ``offload``: what a block keeps under its
other levers lies on the host until its backward."""

GROUP_LEVERS = tuple(v for v in LEVERS if v != VOCABULARY)
"""Of groups with sharded weights: tables are shared by words over the whole axis, not over a group.
"""

NO_BACKWARD = ("tiled", "chunked", VOCABULARY)
"""Levers that save memory also where there is no backward."""

ON_HOST = ("chunked", "offload")
"""Levers under which something lies on the host until the block's backward."""

EXPERTS = "experts"
"""Kind of the blocks of which each token is computed by a few of many MLPs."""

HEAD = "head"
"""Kind of the last linear with the loss, beside the kinds of blocks."""

LEVER_SETS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "attention": (
        (),
        ("recompute",),
        ("selective",),
        ("chunked",),
        ("offload",),
        ("recompute", "offload"),
        ("selective", "offload"),
        ("recompute", "chunked"),
        ("chunked", "offload"),
        ("recompute", "chunked", "offload"),
    ),
    "mlp": (
        (),
        ("recompute",),
        ("selective",),
        ("tiled",),
        ("offload",),
        ("recompute", "offload"),
        ("selective", "offload"),
        ("tiled", "offload"),
    ),
    EXPERTS: ((), ("recompute",), ("offload",), ("recompute", "offload")),
    HEAD: ((), ("tiled",), (VOCABULARY,), ("tiled", VOCABULARY)),
}
"""Kind -> the levers that may be used together there. Those of blocks exclude each other, as each
says anew what is kept for backward, but for ``offload``, which says where, and for ``recompute``
with ``chunked``: what that keeps on the host is there while the block runs, and made again."""


KEEPING_INPUT = (("selective",), ("tiled",))
"""Levers of an MLP under which it keeps its input and nothing else."""


@dataclass(frozen=True)
class MaskSpec:
    """Which keys a query may see, by position, without a dense mask.

    The query at position i sees the key at position j when all of these hold: ``j >= i - left``,
    ``j <= i + right``, ``i // chunk == j // chunk``, ``key_padding[b, j]``,
    ``document_ids[b, i] == document_ids[b, j]``; a condition whose field is unset is dropped.
    A query that sees no key gives output 0 and gradient 0.
    """

    left: int | None = None
    """Keys behind the query that are visible; a sliding window of w tokens has left = w - 1."""
    right: int | None = None
    """Keys ahead of the query that are visible; causal is right = 0."""
    chunk: int | None = None
    """Attention stays within chunks of this many positions."""
    key_padding: bool = False
    """A bool tensor [B, S] travels with the block: True where a key may be seen."""
    documents: bool = False
    """An int tensor [B, S] travels with the block: tokens see only their own document."""
    bias: bool = False
    """Numbers are added to scores, by distance or by key alone: no more than 2 S for a head."""

    @property
    def causal(self) -> bool:
        return self.right == 0

    def __str__(self) -> str:
        parts = [
            "causal" if self.causal else "full" if self.right is None else f"right {self.right}",
            f"left {self.left}" if self.left is not None else "",
            f"chunk {self.chunk}" if self.chunk is not None else "",
            "key padding" if self.key_padding else "",
            "documents" if self.documents else "",
            "bias" if self.bias else "",
        ]
        return ", ".join(p for p in parts if p)


@dataclass(frozen=True)
class Point:
    """One way to compute a block: a strategy and its levers. Plans and tables have it as text."""

    strategy: str
    levers: tuple[str, ...] = ()
    """In the order of ``LEVERS``."""

    @staticmethod
    @cache
    def parse(text: str) -> Point:
        """The point whose text is ``text``, such as ``megatron_cz+recompute``."""
        strategy, *levers = text.split("+")
        return Point(strategy, tuple(levers))

    def __str__(self) -> str:
        return "+".join((self.strategy, *self.levers))

    @property
    def recomputes(self) -> bool:
        """Whether the block runs again in backward as a whole."""
        return "recompute" in self.levers

    def makes_input_of(self, after: Point) -> bool:
        """Whether the block right behind, under ``after``, does not keep its input: this one runs
        again before its own backward, and then gives it."""
        return self.recomputes and after.levers in KEEPING_INPUT

    @property
    def offloads(self) -> bool:
        """Whether what the block keeps lies on the host until its backward."""
        return "offload" in self.levers

    @property
    def uses_host(self) -> bool:
        """Whether something of the block lies on the host until its backward."""
        return any(v in ON_HOST for v in self.levers)

    @property
    def variant(self) -> str:
        """The text of what computes the block, in forward and where it runs again."""
        return str(self._without("recompute", "offload"))

    @property
    def on_device(self) -> str:
        """The text of the point that keeps the same on the device."""
        return str(self._without("offload"))

    def _without(self, *levers: str) -> Point:
        return replace(self, levers=tuple(v for v in self.levers if v not in levers))

    def on_demand(self) -> Point:
        """The point where the user demands that nothing inside is kept for backward: tiles and
        chunks keep the block's input alone on the device; all others are computed again."""
        if "tiled" in self.levers or "chunked" in self.levers:
            return self
        return replace(self, levers=("recompute", *(v for v in self.levers if v == "offload")))


@dataclass(frozen=True)
class BlockSpec:
    """One switchable block of a captured model, as the planner and the reports see it."""

    name: str
    """A label for people: ``layers.3.attention``."""
    kind: str
    """``attention``, ``mlp`` or ``experts``."""
    layer: int
    """Index among the blocks of its kind, in the order of computation."""
    structure: str
    """Blocks of equal structure cost the same, and in one graph share their compiled variants. A
    batch of one, which Dynamo makes a graph of its own for, does not tell them apart, nor whether a
    number is a constant or an input (``dynamic=True``); what it was when captured does."""
    infeasible: Mapping[str, str] = field(default_factory=dict)
    """Strategy -> why it cannot compute this block."""
    hidden: int = 0
    """Width h of the residual stream."""
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate: int = 0
    """MLP width I, of experts that of each; 0 for attention."""
    num_experts: int = 0
    experts_per_token: int = 0
    """By how many of them each token is computed."""
    num_weight_elements: int = 0
    """Elements of all weights of the block."""
    num_split_weight_elements: int = 0
    """Of these, elements a head- or column-parallel strategy splits over the ranks."""
    num_shared_weight_elements: int = 0
    """Of these in turn, elements that several ranks take, such as those of a KV head that is one of
    fewer than there are ranks: at rest they lie like elements that are not split."""
    shares_vectors: bool = False
    """Whatever is not split of its weights, or shared, is a vector, such as a norm's weights. Where
    the rest lies as it is used, such vectors come with those of other blocks, in one message."""
    mask: MaskSpec | None = None
    """None for attention under a dense mask that was not recovered, and for other blocks."""
    refused_levers: Mapping[str, str] = field(default_factory=dict)
    """Lever, or point -> why the block cannot have it."""
    recompute: bool = False
    """The user demands that nothing inside is kept for backward (activation checkpointing)."""
    follows: bool = False
    """It is an MLP, and its input is what the attention right before it gives."""
    sequence: int = 0
    """Which sequence of the graph its tokens are of: 0 for that of ``Workload.seq_len``, else one
    more than the place in ``Workload.others``."""
    keys: int | None = None
    """The same of its keys, where these are of another sequence (cross-attention)."""
    over: int | None = None
    """Which dim of its tokens attention is over, counted as ``sequence``, where that is not the one
    that is split; -1 for one of a single token."""
    switch: int | None = None
    """Which dim of its tokens ``dsp`` switches the split to, counted as ``sequence``; -1 for the
    batch; None where there is none."""

    @property
    def widths(self) -> tuple[int, ...]:
        """What says how wide the values inside are."""
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return self.hidden, *heads, self.intermediate, self.num_experts, self.experts_per_token

    @property
    def priced_by(self) -> Hashable:
        """What its cost depends on, beside what was measured of its structure."""
        split = self.num_split_weight_elements, self.num_shared_weight_elements, self.shares_vectors
        tokens = self.sequence, self.keys, self.over, self.switch
        return self.kind, self.widths, self.num_weight_elements, *split, self.mask, *tokens

    def feasible(self) -> tuple[str, ...]:
        """The strategies that can compute it."""
        return tuple(s for s in ATTENTION_STRATEGIES if s not in self.infeasible)

    def points(self, strategies: Sequence[str] = ATTENTION_STRATEGIES) -> tuple[str, ...]:
        """Those of ``strategies`` with every set of levers that can compute it, none first."""
        texts = (str(Point(s, v)) for v in LEVER_SETS[self.kind] for s in strategies)
        return tuple(t for t in texts if not self.why_not(t))

    def why_not(self, point: str) -> str:
        """Why ``point`` cannot compute the block; "" where it can."""
        strategy, levers = Point.parse(point).strategy, Point.parse(point).levers
        if strategy in self.infeasible:
            return self.infeasible[strategy]
        for name in (point, *levers, *(f"{strategy}+{v}" for v in levers)):
            if name in self.refused_levers:
                return self.refused_levers[name]
        if levers in LEVER_SETS[self.kind]:
            return ""
        legal = ", ".join("+".join(v) for v in LEVER_SETS[self.kind] if v)
        return f"levers of such blocks are {legal}, not {'+'.join(levers)}"


@dataclass(frozen=True)
class HeadSpec:
    """The last linear, from hidden states to logits, with the loss behind it."""

    hidden: int
    """Width h of its input."""
    vocabulary: int
    """Width V of the logits."""
    infeasible: Mapping[str, str] = field(default_factory=dict)
    """Lever -> why the head cannot be computed with it."""
    num_looked_up: int = 0
    """Elements of the embeddings whose rows ranks share under ``vocabulary``."""
    returned: bool = False
    """Whether the logits are among the outputs of the graph: under levers they are made late."""

    def points(self) -> tuple[str, ...]:
        """The levers that can be used together, as ``Plan.head`` has them; none first."""
        sets = (v for v in LEVER_SETS[HEAD] if not self.infeasible.keys() & set(v))
        return tuple("+".join(v) for v in sets)


@dataclass(frozen=True)
class Workload:
    """What a plan is chosen for: equal on all ranks by construction.

    A call has ``batch`` sequences of ``seq_len`` tokens, over all ranks of a sequence group. The
    option ``plan`` may be a function of it. Making one checks nothing, and so never raises.

    Example:

        def plan(workload: paradyse.Workload) -> paradyse.Plan:
            strategy = "metp" if workload.seq_len > 8192 else "megatron_ts"
            return paradyse.Plan((strategy,) * 2)  # a block of attention and one of an MLP

        compiled = torch.compile(model, backend="paradyse", options={"plan": plan})
        compiled(**batch).loss.backward()
    """

    batch: int
    seq_len: int
    dtype: torch.dtype
    """That blocks compute in: of their linears, which under autocast is not that of weights."""
    training: bool
    num_ranks: int
    mask: str = ""
    """The kinds of masks in the graph, as text."""
    reduce_dtype: torch.dtype | None = None
    """In which gradients of sharded weights are added up over ranks; None: as weights."""
    keeps_gradients: bool = False
    """Gradients of whole weights lie here, of this call or earlier ones (``paradyse.no_sync``)."""
    others: tuple[tuple[int, int], ...] = ()
    """(batch, tokens) of the other sequences of the graph, such as that of an encoder, and then of
    other dims of the same tokens, such as space beside time; empty: they are as ``batch`` and
    ``seq_len``, if there are any."""
    key_len: int | None = None
    """Of one block (``of``): tokens of the sequence that its keys are of; None: its own."""
    over_len: int | None = None
    """Of one block: length of the dim that its attention is over, where another one is split."""
    switch_len: int | None = None
    """Of one block: length of the dim that its split may be switched to; None: the batch."""
    weight_dtype: torch.dtype | None = None
    """Of weights and of their gradients; None: ``dtype``."""

    @property
    def weight_itemsize(self) -> int:
        """Bytes of an element of weights and of their gradients."""
        return (self.weight_dtype or self.dtype).itemsize

    @property
    def lengths(self) -> str:
        """Tokens of each sequence, for people: ``2048``, or ``2048 and 128``."""
        return " and ".join(map(str, (self.seq_len, *(n for _, n in self.others))))

    def of(self, block: BlockSpec) -> Workload:
        """What ``block`` alone works on: the batch and the tokens of its own sequence."""
        plain = not block.sequence and block.keys is None and block.over is None
        if plain and (block.switch is None or block.switch < 0):
            return self
        each = ((self.batch, self.seq_len), *self.others)

        def lengths(sequence: int) -> tuple[int, int]:
            return each[sequence] if self.others else each[0]

        batch, seq_len = lengths(block.sequence)
        key_len = None if block.keys is None else lengths(block.keys)[1]
        over_len = None if block.over is None else 1 if block.over < 0 else lengths(block.over)[1]
        switches = block.switch is not None and block.switch >= 0
        return replace(
            self,
            batch=batch,
            seq_len=seq_len,
            others=(),
            key_len=key_len,
            over_len=over_len,
            switch_len=lengths(block.switch or 0)[1] if switches else None,
        )


@dataclass(frozen=True)
class Plan:
    """A point for every block, and one for the head.

    Making one never raises: names and levers are checked where it is given as the option ``plan``,
    how many there are when the model is captured; both raise ``ValueError``.

    Example:

        plan = paradyse.Plan(("megatron_ts+recompute", "metp"), head="tiled")
        assert paradyse.Plan.of_key(plan.key) == plan
        compiled = torch.compile(model, backend="paradyse", options={"plan": plan})
        compiled(**batch).loss.backward()
    """

    strategies: tuple[str, ...]
    """Per block, in the order of computation, a strategy and its levers as ``Point`` has them."""
    head: str = ""
    """The levers of the head, joined by "+"; "": whole logits; ``REPLICATED`` where ranks do not
    share the work at all."""
    split: str = ""
    """Which dim tokens lie split along between blocks. "": the sequence, of several dims of tokens
    that of ``Workload.seq_len``. ``BATCH``: each rank has some of the sequences. Or ``other_dim``
    of one more than the place in ``Workload.others``."""

    @property
    def alone(self) -> bool:
        """Whether every one of several ranks computes the whole."""
        return self.head == REPLICATED

    @property
    def key(self) -> str:
        """The plan as text: equal for equal plans alone."""
        parts = ",".join(self.strategies), self.head, self.split
        return ";".join(parts).rstrip(";")

    @staticmethod
    def of_key(key: str) -> Plan:
        """The plan whose ``key`` this is."""
        blocks, head, split, *_ = (*key.split(";"), "", "")
        return Plan(tuple(blocks.split(",")) if blocks else (), head, split)
