"""Outline blocks: find each attention and each MLP with its norm and residual, by dataflow
alone.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import torch
from torch import fx

from paradyse.graph.attention_call import ATTENTION, AttentionCall
from paradyse.graph.expert_rules import GROUPED_MM
from paradyse.graph.factors import Factor
from paradyse.graph.subgraph import read_by_none_but
from paradyse.graph.switches import find_switch
from paradyse.passes.expert_regions import ExpertRegion, expert_regions
from paradyse.passes.place_tokens import each_query_alone, place_tokens
from paradyse.types import EXPERTS

aten = torch.ops.aten

_HEAVY = {aten.linear.default, aten.matmul.default, ATTENTION, GROUPED_MM}
"""Operators that no tail of a cache has, and no norm."""

_PASSED = {aten.dropout.default, aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default}
"""Operators that may stand between a value and one of several linears that read it."""

_ROOT = re.compile(r"\w+(\[[^]]*\])*")
"""What a module's path starts with: where the program found the model, as in ``L['args'][0]``."""

MOST_BETWEEN = 16
"""Nodes that ways apart may have before they come together: a norm has up to ten."""


@dataclass(eq=False)
class Block:
    """One switchable block: nodes in graph order, from the residual stream to the residual
    stream.
    """

    kind: str
    layer: int
    up: list[fx.Node]
    """The linears that heads (or columns) are made by: QKV, or the MLP's first ones. The second
    one of a low-rank adapter is among them; its first one belongs to ``pre``. Of experts the first
    matmuls."""
    region: list[fx.Node]
    """Between ``up`` and ``downs``: rotary embedding, attention, activation, gating."""
    downs: list[fx.Node]
    """The linears that heads (or columns) go into, the widest first: the one that writes the
    block's contribution, and the first one of an adapter of it. Of experts the last matmul."""
    attention: fx.Node | None = None
    experts: ExpertRegion | None = None
    """Where rows are in the order of experts; ``region`` has all of it that is no matmul at its
    start or end, the way back with it."""
    pre: list[fx.Node] = field(default_factory=list)
    post: list[fx.Node] = field(default_factory=list)
    label: str = ""
    seq: Factor | None = None
    """The sequence of its tokens: of an attention, of the queries."""
    keys: Factor | None = None
    """That of the keys, where it is another one."""
    apart: bool = False
    """Whether ``seq`` is a dim of the attention's batch: each rank has all that its tokens see."""
    over: Factor | None = None
    """The dim that its attention is over in this case; None where that has one token."""
    switch: Factor | None = None
    """A dim of its tokens that it does not mix: it can be computed split along this in place of
    ``seq``, which attention mixes."""
    no_switch: str = ""
    """Why there is no ``switch``."""

    @property
    def down(self) -> fx.Node:
        return self.downs[0]

    @property
    def gives(self) -> list[fx.Node]:
        """What others read of the core: ``downs``, or the rows that experts put back."""
        return self.downs if self.experts is None else self.experts.ways_back

    @property
    def core(self) -> list[fx.Node]:
        return [*self.up, *self.region, *self.downs]

    @property
    def nodes(self) -> list[fx.Node]:
        return [*self.pre, *self.core, *self.post]

    @property
    def output(self) -> fx.Node:
        return self.post[-1] if self.post else self.gives[0]


def outline_blocks(gm: fx.GraphModule, ctx: Any) -> int:
    """Group nodes into blocks; the graph itself is unchanged.

    before: h = norm(x); q, k, v = linear(h, ..); o = attention(..); y = linear(o, ..); z = add(x,
            y)
    after:  ctx.blocks = [Block(pre=[norm], up=[linear x3], region=[.., attention, ..], down,
            post=[add]), ..]
    Experts are a block from the sort of their ids to the way back, with a router that nothing else
    reads. Refuses attention whose core is read from elsewhere (shared keys and values), with a
    note.
    """
    while True:
        ctx.tails = set()
        ctx.blocks = _Finder(gm.graph, ctx).find()
        inside = {n for b in ctx.blocks for n in b.nodes}
        attentions = [n for n in gm.graph.nodes if n.target is ATTENTION]
        free = [n for n in attentions if n in ctx.split and n not in inside]
        loose = {n for n in free if not each_query_alone(AttentionCall.of(n))}
        if not loose:
            why = "its keys are of another sequence, and no block has it"
            ctx.gathered += [(n, why) for n in free]
            known = {*ctx.unsplit, *ctx.seqs, *ctx.seqs.values(), None}
            others = dict.fromkeys(b.switch for b in ctx.blocks if b.switch not in known)
            ctx.unsplit = (*ctx.unsplit, *others)
            return len(ctx.blocks)
        ctx.whole_attention |= loose  # no strategy computes them: they run on gathered tensors
        place_tokens(gm, ctx)


class _Finder:
    def __init__(self, graph: fx.Graph, ctx: Any):
        self.ctx = ctx
        self.nodes = list(graph.nodes)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.attentions = [n for n in self.nodes if n.target is ATTENTION]
        self.split = {n: f for n, f in ctx.split.items() if n not in ctx.mixed}
        self.taken: dict[fx.Node, Block] = {}
        self.flow = nx.DiGraph()
        """Split values in no core yet, and what reads them; nothing flows into a linear, nor, but
        by attention, from one sequence to another: a core reads its own tokens."""
        self.flow.add_nodes_from(n for n in self.nodes if n in self.split)
        for node in self.split:
            if node.target != aten.linear.default:
                along = None if node.target is ATTENTION else self.split[node]
                values = (a for a in node.all_input_nodes if a in self.split)
                mine = (a for a in values if along in (None, self.split[a]))
                self.flow.add_edges_from((a, node) for a in mine)

    def find(self) -> list[Block]:
        blocks = [self._attention(n) for n in self.attentions if n in self.split]
        if self.ctx.seq is not None:
            regions = expert_regions(self.nodes[0].graph, self.ctx.names, self.ctx.seq, self.split)
            blocks += [self._experts(region) for region in regions]
        blocks += [
            self._mlp(n)
            for n in self.nodes
            if n.target == aten.linear.default and n not in self.taken
        ]
        found = sorted((b for b in blocks if b), key=lambda b: self.order[b.down])
        for block in found:
            block.seq = self.split[block.down]
            block.pre = self._pre(block)
        found = self._grow_posts(found)
        for block in found:
            self._look_for_switch(block)
        counts = dict.fromkeys(("attention", "mlp", EXPERTS), 0)
        for block in found:
            block.layer = counts[block.kind]
            counts[block.kind] += 1
            parts = re.split(r"[].[]", _ROOT.sub("", block.down.meta.get("module", "")))
            layer = next(filter(str.isdigit, parts), block.layer)
            kind = block.kind if block.keys is None else f"cross_{block.kind}"
            others = list(self.ctx.seqs).index(block.seq)
            block.label = f"sequence{others}." * (others > 0) + f"layers.{layer}.{kind}"
        return found

    def _look_for_switch(self, block: Block) -> None:
        """Set ``apart``, ``over``, ``switch`` and ``no_switch`` of ``block``."""
        block.no_switch = "it has no attention, so that nothing of it mixes tokens"
        if block.attention is None or block.seq is None:
            return
        ctx, call = self.ctx, AttentionCall.of(block.attention)
        if block.seq in ctx.names.of(call.q)[0]:
            block.apart, block.over = True, next(iter(ctx.names.of(call.q)[2]), None)
            block.no_switch = "its attention does not mix the dim that is split"
            return
        block.switch, block.no_switch = find_switch(ctx.names, block, ctx.unsplit)

    def _sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(set(nodes), key=self.order.__getitem__)

    def _back_to_linears(self, starts: Iterable[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Linears that feed ``starts``, and the split nodes between that depend on one of them."""
        starts = [n for n in starts if n in self.flow]
        reached = set(starts).union(*(nx.ancestors(self.flow, n) for n in starts))
        linears = {n for n in reached if n.target == aten.linear.default}
        after = set().union(*(nx.descendants(self.flow, n) for n in linears))
        return self._sorted(linears), self._sorted(after & reached)

    def _ways_to(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """The split ones of ``nodes``, with all that they are computed from."""
        found = {n for n in nodes if n in self.flow}
        return found.union(*(nx.ancestors(self.flow, n) for n in found))

    def _claim(self, block: Block) -> Block | None:
        """The block, unless something outside reads its inside; graph outputs may read what is not
        behind attention, as it is computed for them from a rank's tokens."""
        inside, mixed = set(block.core), set[fx.Node]()
        if block.attention is not None and self.ctx.axis.size > 1:
            mixed = {block.attention, *nx.descendants(self.flow, block.attention)}
        for node in (n for n in block.core if n not in block.gives):
            outside = [u for u in node.users if u not in inside]
            strangers = [u for u in outside if node in mixed or not self._is_tail(u)]
            if strangers:
                self.ctx.note(
                    f"{block.kind} around {block.down} is not switchable: {node} is also read by "
                    f"{strangers[0]}"
                )
                return None
        self.taken.update(dict.fromkeys(inside, block))
        self.flow.remove_nodes_from(inside)
        return block

    def _is_tail(self, node: fx.Node) -> bool:
        """Whether nothing but outputs of the graph comes of ``node``: a cache being filled."""
        if node.op == "output" or node in self.ctx.tails:
            return True
        tail: list[fx.Node] = []
        stack = [node]
        while stack:
            n = stack.pop()
            if n.op == "output" or n in tail:
                continue
            if n.target in _HEAVY or len(tail) > 8:
                return False
            tail.append(n)
            stack += n.users
        self.ctx.tails.update(tail)
        return True

    def _fan_out(self, node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """The linears that read ``node``, the widest first, and what some read it through; none
        where anything else reads it."""
        passed: list[fx.Node] = []
        linears: list[fx.Node] = []
        for user in node.users:
            ways = [user]
            if user.target in _PASSED and user in self.split:
                passed.append(user)
                ways = list(user.users)
            if any(
                w.target != aten.linear.default or w not in self.split or w in self.taken
                for w in ways
            ):
                return [], []
            linears += ways
        linears.sort(key=lambda n: (-n.meta["val"].shape[-1], self.order[n]))
        return passed, linears

    def _joined(self, users: Sequence[fx.Node]) -> tuple[list[fx.Node], fx.Node | None]:
        """The first node that all ways from ``users`` come to, as the ways through a norm do, and
        what lies on them before it; None where they do not come together on a few tokens' work."""
        passed: list[fx.Node] = []
        ahead = set(users)
        while len(ahead) > 1:
            first = min(ahead, key=self.order.__getitem__)
            if first not in self.split or first.target in _HEAVY or len(passed) == MOST_BETWEEN:
                return [], None
            passed.append(first)
            ahead = (ahead - {first}) | set(first.users)
        return passed, next(iter(ahead), None)

    def _without_latents(
        self, node: fx.Node, up: list[fx.Node], before: list[fx.Node]
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """``up`` and ``before`` of the attention ``node`` without what has no heads yet.

        Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) makes of one linear a latent,
        which other linears make heads of, and a rotary key that all heads share. Such a linear is
        work for local tokens, ahead of the projections, and so is what follows up to the heads.
        """
        behind = {n: nx.descendants(self.flow, n) for n in up}
        latent = {n for n in up if any(m.args[0] in behind[n] for m in up if m is not n)}
        if not latent:
            return up, before
        up = [n for n in up if n not in latent]
        made = set(up).union(*(behind[n] for n in up))
        call = AttentionCall.of(node)
        heads = {f for x in (call.q, call.k) for f in self.ctx.names.of(x)[1]}
        return up, [n for n in before if n in made or heads & self.ctx.names.factors(n)]

    def _attention(self, node: fx.Node) -> Block | None:
        up, reached = self._back_to_linears(AttentionCall.of(node).qkv)
        up, before = self._without_latents(node, up, reached)
        after: list[fx.Node] = []
        downs: list[fx.Node] = []
        masks = AttentionCall.of(node).mask_nodes  # made of hidden states they are ahead of it
        results = {u.args[1]: u for u in node.users if u.target is operator.getitem}
        keys = self.split.get(AttentionCall.of(node).k)
        frontier = results.get(0) if keys is not None else None
        while frontier is not None and not downs:
            after.append(frontier)
            passed, downs = self._fan_out(frontier)
            after += passed
            users = [u for u in frontier.users if u.op != "output"]
            if downs:
                break
            passed, end = self._joined(users)
            after += passed
            if end is None or end not in self.split:
                frontier = None
            elif end.target == aten.linear.default:
                downs = [end]
            else:
                frontier = end
                known = {*after, *reached, frontier, node, *self._ways_to(masks)}
                after += [n for n in self._back_to_linears([frontier])[1] if n not in known]
        if frontier is None or not up:
            self.ctx.note(f"attention {node} has no projections around it: it is not switchable")
            return None
        others = [n for n in (*before, *after) if n.target is ATTENTION]
        if others:
            self.ctx.note(f"attention {node} is not switchable: {others[0]} has projections of it")
            return None
        dropped = (n for n in before if n.target == aten.dropout.default)
        if any(self.split[n] is not self.split[node] for n in dropped):
            self.ctx.note(f"attention {node} is not switchable: keys are dropped out inside")
            return None
        region = self._sorted([*before, node, *after])
        keys = None if keys is self.split[node] else keys
        block = Block("attention", 0, up, region, downs, attention=node, keys=keys)
        return self._claim(block)

    def _mlp(self, down: fx.Node) -> Block | None:
        x = down.args[0]
        if down not in self.split or down in self.taken or not isinstance(x, fx.Node):
            return None
        up, region = self._back_to_linears([x])
        if not up or not region:
            return None
        columns = set(self.ctx.names.of(down.args[1])[1])
        for node in region:
            if node.target is ATTENTION or columns & self.ctx.names.mixed(node):
                return None
            if any(
                a in self.split and a not in up and a not in region for a in node.all_input_nodes
            ):
                return None
        if self.order[up[0]] > self.order[down]:
            return None
        passed, downs = self._fan_out(x.args[0] if x.target in _PASSED else x)
        if down not in downs:
            passed, downs = [], [down]
        return self._claim(Block("mlp", 0, up, self._sorted([*region, *passed]), downs))

    def _experts(self, region: ExpertRegion) -> Block | None:
        """The block around ``region``: at least two matmuls, one after the other."""
        if region.route not in self.split or not region.ways_back:
            return None
        ahead: dict[fx.Node, set[fx.Node]] = {}
        for node in region.inside:
            before = [a for a in node.all_input_nodes if a in ahead]
            ahead[node] = set().union(*(ahead[a] for a in before))
            ahead[node] |= {a for a in before if a.target is GROUPED_MM}
        matmuls = region.matmuls
        up = [n for n in matmuls if not ahead[n]]
        downs = [n for n in matmuls if not any(n in ahead[m] for m in matmuls)]
        if len(downs) != 1 or downs[0] in up:
            self.ctx.note(
                f"experts around {region.route} are not switchable: {len(matmuls)} matmuls, of "
                f"which {len(downs)} are the last of their row"
            )
            return None
        ends = {*up, *downs}
        rest = [n for n in region.nodes if n not in ends]
        return self._claim(Block(EXPERTS, 0, up, self._sorted(rest), downs, experts=region))

    def _pre(self, block: Block) -> list[fx.Node]:
        """What nothing but the block reads, so that it may be computed inside."""
        free = {n for n, f in self.split.items() if f is block.seq} - self.taken.keys()
        free -= {*self.attentions}  # of what no linear made: none but a block's own has a strategy
        if block.attention is not None:
            call = AttentionCall.of(block.attention)
            if block.seq not in self.ctx.names.of(call.q)[0]:
                free -= {*call.mask_nodes}  # they have all keys, also if made of hidden states
        pre = read_by_none_but(block.core, self.nodes, free)
        self.taken.update(dict.fromkeys(pre, block))
        return pre

    def _grow_posts(self, blocks: list[Block]) -> list[Block]:
        """Give each block what follows it up to the residual stream, alike for blocks alike in
        their core; drop those of which several values are left.
        """
        growths = {b: self._growth(b) for b in blocks}
        groups = defaultdict[str, list[Block]](list)
        for block in blocks:
            groups[self._shape_key(block)].append(block)
        for group in groups.values():
            cut = self._common_cut(group, [growths[b] for b in group])
            for block in group:
                nodes, cuts = growths[block]
                several = len(block.gives) > 1
                if several and not cuts:
                    self._drop(block)
                    continue
                at = max(cut, 0) if several else cut
                block.post = nodes[: cuts[at]] if at >= 0 else []
                self.taken.update(dict.fromkeys(block.post, block))
        return [b for b in blocks if self.taken.get(b.down) is b]

    def _drop(self, block: Block) -> None:
        others = ", ".join(map(str, block.gives[1:]))
        self.ctx.note(
            f"{block.kind} around {block.down} is not switchable: {others} read the same values, "
            "and what they give is not added up"
        )
        for node in block.nodes:
            del self.taken[node]

    def _shape_key(self, block: Block) -> str:
        nodes = [*block.pre, *block.core]
        return "|".join(f"{n.target} {getattr(n.meta['val'], 'shape', '')}" for n in nodes)

    def _growth(self, block: Block) -> tuple[list[fx.Node], list[int]]:
        """Nodes that may follow ``block``, and the lengths at which a single value leaves them."""
        available = set(block.nodes)
        start = min(self.order[n] for n in block.core)
        absorbed: list[fx.Node] = []
        cuts: list[int] = []
        active = [*block.gives]
        while True:
            users = self._sorted(
                u for a in active for u in a.users if u not in available and u not in self.ctx.tails
            )
            if not users or any(u.op == "output" for u in users):
                return absorbed, cuts
            node = users[0]
            along = self.split.get(node) is block.seq and node not in self.attentions
            if node.op != "call_function" or not along or node in self.taken:
                return absorbed, cuts
            for arg in node.all_input_nodes:
                outside = arg not in available and arg in self.split
                if outside and (self.order[arg] > start and not self._done_before(arg, block)):
                    return absorbed, cuts
            available.add(node)
            absorbed.append(node)
            active = [
                a
                for a in [*active, node]
                if any(u not in available for u in a.users) or not a.users
            ]
            if active == [node]:
                cuts.append(len(absorbed))

    def _done_before(self, node: fx.Node, block: Block) -> bool:
        owner = self.taken.get(node)
        return (
            owner is not None
            and owner is not block
            and self.order[owner.down] < self.order[block.down]
            and node in owner.downs
        )

    def _common_cut(
        self, group: list[Block], growths: list[tuple[list[fx.Node], list[int]]]
    ) -> int:
        """Index of the longest cut at which all growths look alike; -1 for none."""
        best = -1
        for i in range(min(len(cuts) for _, cuts in growths)):
            texts = {self._text(nodes[: cuts[i]]) for nodes, cuts in growths}
            if len(texts) != 1:
                break
            best = i
        if len(growths) == 1 and best >= 0:  # nothing to compare with: stop at the residual
            nodes, cuts = growths[0]
            for i, cut in enumerate(cuts):
                last = nodes[cut - 1]
                mine = {*group[0].nodes, *nodes[:cut]}
                others = [a for a in last.all_input_nodes if a in self.split and a not in mine]
                if last.target == aten.add.Tensor and others:
                    return i
            return -1
        return best

    def _text(self, nodes: list[fx.Node]) -> str:
        index = {n: i for i, n in enumerate(nodes)}

        def text(n: fx.Node) -> str:
            args = fx.map_arg((n.args, n.kwargs), lambda a: f"%{index[a]}" if a in index else "%")
            return f"{n.target} {args!r}"

        return "\n".join(map(text, nodes))
