"""Place tokens: which values are split along the sequence, and the loss over split tokens."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from paradyse.distributed.replicas import SUM_OVER_REPLICAS
from paradyse.graph.attention_call import ATTENTION, AttentionCall
from paradyse.graph.expert_rules import ROUTE_ROWS
from paradyse.graph.factors import Factor, Names, times
from paradyse.graph.rules import argument
from paradyse.graph.subgraph import is_tensor, is_weight
from paradyse.passes.expert_regions import expert_region
from paradyse.passes.mixing_regions import mixing_regions
from paradyse.strategies.loss import MEAN, SUM, loss_sums
from paradyse.strategies.weight_stream import sum_dtype

aten = torch.ops.aten

_PRODUCTS = {aten.linear.default, aten.matmul.default, aten.bmm.default}
"""Operators with so much work that to share it is worth messages."""

UNJOINED = (
    "a mean cross entropy of what is not split along the sequence is averaged over replicas with "
    "equal weights, not by their tokens"
)


def place_tokens(gm: fx.GraphModule, ctx: Any) -> int:
    """Decide for every value whether it is replicated or split along a sequence, and which.

    before: x = embedding(w, ids); ..; loss = cross_entropy_loss(logits, labels)
    after:  ctx.split = {x: S, ..}; sums = loss_sums(logits, labels); loss = div(sums[0], sums[1])
            where ctx.partial = {sums} is to be summed over ranks; with a data-parallel axis
            sums = sum_over_replicas(sums) before a mean
    Where attention would see replicated tokens (patches of images, features that were put between
    the embeddings), they are split as soon as they have the sequence. What is computed of gathered
    tokens is split again where nothing behind it mixes tokens (``_behind_gathered``).
    Rows in the order of experts are split where nothing sees that order: each rank sorts its own.
    What mixes tokens by heads or channels is computed by these (``mixing_regions``): ctx.mixing.
    Refuses to split what mixes tokens without a rule: ctx.gathered lists it, and it runs on
            gathered tensors; also what reads tokens of another sequence, which are gathered.
    """
    ctx.mixing, ctx.mixed = [], {}
    _begin(ctx)
    if ctx.seq is None:
        return 0
    _read_tables_by_position(gm, ctx)
    _place_all(gm, ctx, frozenset())
    late = _before_replicated_attention(gm, ctx)
    if late:
        _begin(ctx)
        _place_all(gm, ctx, late)
    while ctx.axis.size > 1:  # what lies behind a region is split, so that others begin there
        more = mixing_regions(gm, ctx, lambda n: _alone(n, ctx))
        if not more:
            break
        ctx.mixing += more
        _begin(ctx)
        ctx.mixed = {n: region.seq for region in ctx.mixing for n in region.nodes}
        _place_all(gm, ctx, late)
    again = _behind_gathered(gm, ctx)
    if again:
        _begin(ctx)
        _place_all(gm, ctx, late | again)
    return len(ctx.split)


def _begin(ctx: Any) -> None:
    ctx.split, ctx.partial, ctx.gathered, ctx.own_experts = {}, set(), [], {}
    ctx.whole_experts = set()


def _place_all(gm: fx.GraphModule, ctx: Any, starts: Collection[fx.Node]) -> None:
    """Place every value; of ``starts`` also those of which no input is split."""
    for node in list(gm.graph.nodes):
        if node.op == "placeholder":
            if (along := _token_input(node, ctx)) is not None:
                ctx.split[node] = along
        elif node.op == "call_function":
            if node.target == aten.cross_entropy_loss.default:
                node = _rewrite_loss(gm, node, ctx)
            along = _may_start(node, ctx) if node in starts else None
            if along is not None:
                _split(node, along, ctx)
            else:
                _place(node, ctx)


def _read_tables_by_position(gm: fx.GraphModule, ctx: Any) -> None:
    """Have weights with a row for each token, such as position embeddings, read by an operator of
    their own: what it gives is a value like others, which can be split."""
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    for node in list(gm.graph.nodes):
        if not is_weight(node) or not is_tensor(node) or not _sequences(node, ctx):
            continue
        if all(u.target is aten.alias.default for u in node.users):
            continue
        with gm.graph.inserting_before(first if node.op == "placeholder" else node.next):
            table = gm.graph.call_function(aten.alias.default, (node,))
        node.replace_all_uses_with(table, delete_user_cb=lambda user, t=table: user is not t)
        table.meta = {k: v for k, v in node.meta.items() if k != "weight"}
        ctx.names.dims[table] = ctx.names.dims[node]


def _before_replicated_attention(gm: fx.GraphModule, ctx: Any) -> set[fx.Node]:
    """What the queries, keys and values are computed from of attention over a sequence that
    sees replicated tokens."""
    found: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.target is ATTENTION and node not in ctx.whole_attention:
            qkv = AttentionCall.of(node).qkv
            found.update(x for x in qkv if x not in ctx.split and _sequences(x, ctx))
        if node in found:
            found.update(node.all_input_nodes)
    return found


def _behind_gathered(gm: fx.GraphModule, ctx: Any) -> set[fx.Node]:
    """What is computed of gathered tokens, token by token, and read by nothing else than what is
    split: each rank can compute its own rows of it.

    What adds up several gathered values, in place of which its result can be cut, stays whole: the
    gradient of each value that is cut is a message.
    """
    fixed = {*ctx.split, *ctx.whole_attention, *ctx.whole_experts}
    behind: dict[fx.Node, None] = {}
    for node in gm.graph.nodes:
        if any(a in ctx.split or a in behind for a in node.all_input_nodes) and node not in fixed:
            behind[node] = None
    found: dict[fx.Node, Factor] = {}
    for node in reversed(behind):
        along = _may_start(node, ctx)
        users = [u for u in node.users if u.op != "output"]
        if along is not None and users:
            if all(found.get(u, ctx.split.get(u)) is along for u in users):
                found[node] = along
    for node in [n for n in behind if n in found and n.target not in _PRODUCTS]:
        values = [a for a in node.all_input_nodes if a in behind or a in ctx.split]
        cut = [a for a in values if a in behind and a not in found]
        if len(cut) > 1 and cut == values:
            del found[node]
    return set(found)


def _alone(node: fx.Node, ctx: Any) -> bool:
    """Whether ranks could compute ``node`` for their own tokens, were its inputs split."""
    reads = any(_sequences(a, ctx) for a in filter(is_tensor, node.all_input_nodes))
    reads |= node.target is operator.getitem
    return reads and _along(node, ctx.seqs, ctx) is not None


def _may_start(node: fx.Node, ctx: Any) -> Factor | None:
    """The sequence of which each rank can compute its rows of ``node`` from rows of replicated
    values."""
    if not is_tensor(node) or not node.meta["val"].is_floating_point():
        return None
    inputs = [a for a in node.all_input_nodes if is_tensor(a) and not is_weight(a)]
    sliced = {f for a in inputs for f in _sequences(a, ctx)}
    return _along(node, [f for f in ctx.seqs if f in sliced], ctx)


def _place(node: fx.Node, ctx: Any) -> None:
    split = [a for a in node.all_input_nodes if a in ctx.split]
    if node.target is loss_sums or node.target is operator.getitem:
        if (source := node.args[0]) in ctx.split:
            ctx.split[node] = ctx.split[source]
            ctx.partial |= {node} if node.target is loss_sums else set()
    elif node.target is ROUTE_ROWS:
        _place_rows(node, ctx)
    elif node in ctx.mixed:
        ctx.split[node] = ctx.mixed[node]
    elif node in ctx.own_experts:
        ctx.split[node] = ctx.own_experts[node]
    elif node in ctx.whole_experts:
        return
    elif node.target == aten.embedding.default or split:
        if any(a in ctx.partial for a in split):
            return
        looks_up = node.target == aten.embedding.default
        found = dict.fromkeys(ctx.split[a] for a in split) or (ctx.seqs if looks_up else ())
        along = None if node in ctx.whole_attention else _along(node, found, ctx)
        if along is not None:
            _split(node, along, ctx)
        elif not looks_up:
            ctx.gathered.append((node, ctx.names.unnamed.get(node, f"{node.target} mixes tokens")))


def _split(node: fx.Node, along: Factor, ctx: Any) -> None:
    """Split ``node`` along a sequence; what it reads of another one is gathered."""
    ctx.split[node] = along
    values = (a for a in node.all_input_nodes if ctx.split.get(a, along) is not along)
    other = next(values, None)
    if other is not None and node.target is not ATTENTION:
        ctx.gathered.append((node, f"it reads {other}, which is of another sequence"))


def _place_rows(route: fx.Node, ctx: Any) -> None:
    """Split the rows that ``route`` sorts, or none of what is computed from them."""
    along = ctx.split.get(route.args[0])
    region = expert_region(route, ctx.names, along or ctx.seq)
    if along is not None and not region.seen:
        ctx.own_experts.update(dict.fromkeys(region.nodes, along))
        ctx.split[route] = along
        return
    ctx.whole_experts.update(region.nodes)
    if any(a in ctx.split for n in region.nodes for a in n.all_input_nodes):
        ctx.gathered.append((route, region.seen or "the experts' ids are computed on all tokens"))


def _along(node: fx.Node, seqs: Iterable[Factor], ctx: Any) -> Factor | None:
    """The first of ``seqs`` that ``node`` can be split along: none of a look-up whose gradient is
    divided by how often an id occurs, which all tokens tell."""
    if node.target == aten.embedding.default and argument(node, "scale_grad_by_freq"):
        return None
    return next((f for f in seqs if can_split(ctx.names, node, f, ctx.split)), None)


def _token_input(node: fx.Node, ctx: Any) -> Factor | None:
    """The sequence of a floating-point input [B, S, ..], such as inputs_embeds."""
    if not is_tensor(node) or is_weight(node) or not node.meta["val"].is_floating_point():
        return None
    return next(iter(_sequences(node, ctx)), None) if node.meta["val"].ndim >= 3 else None


def _sequences(node: fx.Node, ctx: Any) -> list[Factor]:
    """Those of ``ctx.seqs`` that ``node`` has once."""
    return [f for f in ctx.seqs if times(ctx.names.of(node), f) == 1]


def each_query_alone(call: AttentionCall) -> bool:
    """Whether a rank can compute ``call`` for some of the queries as if there were no others, given
    all keys: those of another sequence, whose masks are of keys alone."""
    return call.is_cross and call.dropout_p == 0


def can_split(names: Names, node: fx.Node, seq: Factor, split: Mapping[fx.Node, Factor]) -> bool:
    """Whether each rank can compute its rows of ``node``, along ``seq``, from its rows of the
    inputs: not where one that has ``seq`` is ``split`` along another sequence, and arrives with all
    of both. Of attention, whether its queries are split along it, and its keys and values as well,
    unless each query is by itself; attention over another dim of the same tokens has ``seq`` in its
    batch.
    """
    if node.target is ATTENTION:
        call = AttentionCall.of(node)
        keys = (split.get(call.k), split.get(call.v))
        if any(seq in names.of(x)[0] for x in call.qkv):  # each rank has all that its tokens see
            apart = all(seq in names.of(x)[0] for x in call.qkv)
            return apart and split.get(call.q) is seq and keys == (seq, seq)
        tokens = [tuple(names.of(x)[2]) for x in call.qkv]
        # Nor tokens of which it is one of several dims.
        if seq not in tokens[0] or any(seq in dim and dim != (seq,) for dim in tokens):
            return False
        own = (seq, seq) if not call.is_cross else (*names.of(call.k)[2], *names.of(call.v)[2])
        return split.get(call.q) is seq and (keys == own or each_query_alone(call))
    if seq in names.mixed(node):
        return False
    if {times(dims, seq) for dims in names.of_each(node)} != {1}:
        return False
    inputs = [(a, times(names.of(a), seq)) for a in filter(is_tensor, node.all_input_nodes)]
    return all(n <= 1 and not (n and split.get(a, seq) is not seq) for a, n in inputs)


def _rewrite_loss(gm: fx.GraphModule, node: fx.Node, ctx: Any) -> fx.Node:
    """The first node of the loss as sums and counts; ``node`` itself where its rows are not summed
    or do not lie split along the sequence.
    """
    args = [*node.args, *(None, MEAN, -100, 0.0)[len(node.args) - 2 :]]
    logits, labels, weight, reduction, ignore_index, smoothing = args
    if reduction not in (MEAN, SUM):
        return node
    dense = labels.meta["val"].is_floating_point()
    dims = ctx.names.of(logits)
    split = logits in ctx.split and len(dims) == 2 and ctx.split[logits] in dims[0]
    split = split and ctx.names.of(labels)[0] == dims[0]  # else a rank has rows of other tokens
    if not split or (labels in ctx.split and not dense):
        if reduction == MEAN and ctx.replicas.size > 1:
            ctx.note(UNJOINED)
        return node
    names, val = ctx.names, node.meta["val"]
    with gm.graph.inserting_before(node):
        rows = _ones(gm, logits, ctx) if dense else None
        if not dense and len(labels.users) > 1:  # others may want something else past the end
            labels = _own(gm, labels, ctx)
        given = logits, labels, ignore_index, smoothing, weight, rows
        sums = gm.graph.call_function(loss_sums, given)
        new = [sums]
        if reduction == MEAN and ctx.replicas.size > 1:
            name = ctx.replicas.name
            new.append(gm.graph.call_function(SUM_OVER_REPLICAS, (sums, name)))
        pair = new[-1]
        loss = total = gm.graph.call_function(aten.select.int, (pair, 0, 0))
        new.append(total)
        if reduction == MEAN:
            count = gm.graph.call_function(aten.select.int, (pair, 0, 1))
            loss = gm.graph.call_function(aten.div.Tensor, (total, count))
            new += [count, loss]
        wide = val.new_empty([], dtype=sum_dtype(logits.meta["val"]))
        if val.dtype != wide.dtype:
            loss = gm.graph.call_function(aten.to.dtype, (loss, val.dtype))
            new.append(loss)
    for n in new:
        one = wide if n is not loss else val
        n.meta = {**node.meta, "val": wide.new_empty(2) if n in (sums, pair) else one}
        names.dims[n] = names.fresh(n.meta["val"].shape)
    node.replace_all_uses_with(loss)
    gm.graph.erase_node(node)
    if not dense:
        ctx.fills[labels] = ignore_index
    for n in new[1:]:
        _place(n, ctx)
    return sums


def _own(gm: fx.GraphModule, node: fx.Node, ctx: Any) -> fx.Node:
    """``node``, for one reader."""
    own = gm.graph.call_function(aten.alias.default, (node,))
    own.meta = {k: v for k, v in node.meta.items() if k != "weight"}
    ctx.names.dims[own] = ctx.names.of(node)
    return own


def _ones(gm: fx.GraphModule, logits: fx.Node, ctx: Any) -> fx.Node:
    """[rows] ones, whole, of which those past the end are 0 where they are split."""
    like = logits.meta["val"]
    how = {"dtype": sum_dtype(like), "device": like.device}
    node = gm.graph.call_function(aten.ones.default, ([like.shape[0]],), how)
    node.meta["val"] = like.new_ones(like.shape[:1], dtype=how["dtype"])
    ctx.names.dims[node] = ctx.names.of(logits)[:1]
    ctx.fills[node] = 0
    return node
