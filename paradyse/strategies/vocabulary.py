"""The head by rows of the vocabulary: each rank multiplies the rows of the weight that it holds.

Vocabulary parallel (Megatron-LM, arXiv 1909.08053, section 3). With x the tokens of all ranks, or
of a tile of each, and W_r the rows of rank r:

    y_r = x W_r^T;  g_r = f'(y_r);  dx = sum_r g_r W_r;  dW_r = g_r^T x

so x is gathered and dx scattered, and neither W nor its gradient ever moves. What the loss f needs
of all words crosses ranks as a few numbers for each token (``split_losses``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.distributed.axis import Axis
from paradyse.graph.factors import Factor
from paradyse.graph.lower import Dims
from paradyse.graph.rules import argument
from paradyse.graph.subgraph import Piece, is_tensor, make_piece, run
from paradyse.strategies.base import SPLIT, WHOLE, Common, Scope, bind_factors
from paradyse.strategies.groups.analyse import factors_of
from paradyse.strategies.groups.evaluate import local_shape, on_tokens
from paradyse.strategies.groups.model import Unsplittable
from paradyse.strategies.head import TiledHead
from paradyse.strategies.loss import loss_sums
from paradyse.strategies.split_losses import SPLIT_OPERATORS, Columns, Stretch
from paradyse.weights.layout import even_layout
from paradyse.weights.slices import Form, Rows

ops = torch.ops.paradyse


@dataclass(frozen=True)
class TokenMoves:
    """Moves between the rank's tokens and those of all ranks, in a step or a tile of one."""

    scope: Scope
    sizes: Mapping[str, Any]
    common: Sequence[Tensor]

    def gather(self, node: fx.Node, x: Tensor) -> Tensor:
        """All tokens of ``x``, which has the rank's own and otherwise the dims of ``node``."""
        return self._moved(ops.gather_tokens, SPLIT, node, x)

    def scatter(self, node: fx.Node, x: Tensor, is_gradient: bool = False) -> Tensor:
        """The rank's tokens of the sum over ranks of ``x``, which has the dims of ``node``; rows
        past the end of what ``is_gradient`` are 0."""
        return self._moved(ops.reduce_scatter_tokens, WHOLE, node, x, is_gradient)

    def exchange(self, node: fx.Node, x: Tensor) -> Tensor:
        """The rank's tokens [.., s, .., p] of every rank's ``x``, with the dims of ``node``."""
        return self._moved(ops.exchange_tokens, WHOLE, node, x)

    def _moved(self, op: Any, layout: str, node: fx.Node, x: Tensor, *more: bool) -> Tensor:
        whole, local, _, info, _ = self.common
        name, factors = self.scope.axis.name, bind_factors(self.scope, layout, self.sizes)

        def move(x: Tensor, dim: int) -> Tensor:
            moved: Tensor = op(x, local, whole, info, dim, name, *more)
            return moved

        return on_tokens(self.scope, node, x, factors, move)


def stretch_of(axis: Axis, num_words: int) -> Stretch:
    """The words of the rank of ``axis`` where there are ``num_words``: those whose rows
    ``paradyse.shard`` leaves with it."""
    ((start, size),) = even_layout(axis, num_words).runs[axis.rank]
    return Stretch(start, size, num_words)


def rows_at_rest(axis: Axis, num_words: int, dim: int = 0) -> Rows:
    """The form of a table with ``num_words`` along ``dim`` that takes those of ``stretch_of`` for
    each rank of ``axis``."""
    runs = even_layout(axis, num_words, dim).runs
    return Rows(dim, tuple(tuple(range(start, start + n)) for ((start, n),) in runs))


def vocabulary_of(scope: Scope, head: Any, piece: Piece) -> Factor:
    """The words among the dims of the logits of ``head``.

    Args:
        scope: what all variants of the capture share.
        piece: of the head, without logits among its outputs.
    Raises:
        Unsplittable: what is computed of the logits needs all words of a token in one place.
    """
    dims = {scope.names.of(n)[-1] for n in head.linears}
    words = dims.pop()
    if scope.axis.size == 1:
        raise Unsplittable("there is one rank, which holds the whole vocabulary")
    if dims or len(words) != 1:
        raise Unsplittable("the words of its logits are not one dim")
    (factor,) = words
    if factor.size < scope.axis.size:
        raise Unsplittable(f"its {factor.size} words are fewer than the {scope.axis.size} ranks")
    for node in piece.inputs:
        if {factor, scope.seq} <= factors_of(scope, node):
            raise Unsplittable(f"it reads {node}, which has a value for every token and word")
    for node in piece.nodes:
        if not _computes_apart(scope, factor, head, node):
            raise Unsplittable(f"{node} needs all words of a token at once")
    for node in piece.outputs:
        if factor in factors_of(scope, node):
            raise Unsplittable(f"it gives {node}, which has a value for every word")
    return factor


def _computes_apart(scope: Scope, factor: Factor, head: Any, node: fx.Node) -> bool:
    """Whether ranks can compute ``node`` that have other words each; ``factor`` are all words."""
    inputs = node.all_input_nodes
    if not all(_has_words_apart(scope, factor, n) for n in (node, *inputs)):
        return False
    having = [n for n in inputs if factor in factors_of(scope, n)]
    if node in head.linears:
        return inputs[0] not in having
    if node.target not in SPLIT_OPERATORS or node.args[0] not in having:
        return factor not in scope.names.mixed(node)
    dims = scope.names.of(node.args[0])
    over = None if node.target is loss_sums else argument(node, "dim")
    over = [-1] if over is None else [over] if isinstance(over, int) else over
    last = dims[-1] == (factor,) and all(d % len(dims) == len(dims) - 1 for d in over)
    tokens = any(scope.seq in d for d in dims)
    weights = all(n.meta["val"].ndim == 1 for n in having[1:])
    return last and tokens and weights


def _has_words_apart(scope: Scope, factor: Factor, node: fx.Node) -> bool:
    """Whether words, if ``node`` has any, are all of them in one dim of their own."""
    if not is_tensor(node):
        return factor not in factors_of(scope, node)
    dims = [d for d in scope.names.of(node) if any(f.origin()[0] is factor for f in d)]
    return dims in ([], [(factor,)])


class VocabularyHead(TiledHead):
    """A head by rows of the vocabulary.

    Args:
        scope, head, piece: as of ``TiledHead``.
        tiled: over tiles of tokens; else over all tokens at once.
    Raises:
        Unsplittable: ``head`` needs all words in one place.
    """

    def __init__(self, scope: Scope, head: Any, piece: Piece, tiled: bool):
        self.factor = vocabulary_of(scope, head, piece)
        self.words = stretch_of(scope.axis, self.factor.size)
        self.parts, self.part = {self.factor: self.words.size}, str(self.words)
        self.tiled = tiled
        super().__init__(scope, head, piece)
        self.operators = [make_piece("operator", [n], [n]) for n in self.loss.nodes]
        self.wide = {n for n in piece.nodes if self.factor in factors_of(scope, n)}
        """Values that each rank has for its words and all tokens."""

    def dims_of(self, node: fx.Node) -> Dims:
        """See ``TiledHead``, of ``node``."""
        layout = WHOLE if node in self.linears else self.layout
        return local_shape(self.scope, node, self.parts, layout)

    def form(self, node: fx.Node) -> Form:
        """See ``TiledHead``, of ``node``."""
        dims = self.scope.names.of(node)
        at = next((i for i, dim in enumerate(dims) if self.factor in dim), None)
        return None if at is None else rows_at_rest(self.scope.axis, self.words.total, at)

    def own_part(self, node: fx.Node, value: Tensor) -> Tensor:
        """See ``TiledHead``, of ``node`` and ``value``."""
        form = self.form(node)
        return value if form is None else form.take(value, self.scope.axis.rank)

    def most_tokens(self, sizes: Mapping[str, int]) -> int:
        """See ``TiledHead``, of ``sizes``."""
        return super().most_tokens(sizes) if self.tiled else sizes[SPLIT]

    def read(
        self, sizes: Mapping[str, int], common: Common, values: Mapping[fx.Node, Tensor]
    ) -> Mapping[fx.Node, Tensor]:
        """See ``TiledHead``, of ``sizes``, ``common`` and ``values``: tokens of all ranks."""
        moves = TokenMoves(self.scope, sizes, common)
        tokens = dict.fromkeys(n.all_input_nodes[0] for n in self.linears)
        return {**values, **{x: moves.gather(x, values[x]) for x in tokens}}

    def give_back(
        self, sizes: Mapping[str, int], common: Common, grads: Mapping[fx.Node, Tensor]
    ) -> Mapping[fx.Node, Tensor]:
        """See ``TiledHead``, of ``sizes``, ``common`` and ``grads``: summed over ranks."""
        moves = TokenMoves(self.scope, sizes, common)
        return {x: moves.scatter(x, grad, True) for x, grad in grads.items()}

    def run_loss(
        self, sizes: Mapping[str, Any], common: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        """See ``TiledHead``, of ``sizes``, ``common`` and ``values``: values that are ``wide`` have
        all tokens, others the rank's."""
        moves = TokenMoves(self.scope, sizes, common)
        whole, own = (bind_factors(self.scope, at, sizes) for at in (WHOLE, SPLIT))
        env: dict[fx.Node, Any] = dict(zip(self.loss.inputs, values, strict=True))
        for piece, last_read in zip(self.operators, self.loss.last_reads, strict=True):
            (node,), names = piece.nodes, self.scope.names
            if node.target in SPLIT_OPERATORS and node.args[0] in self.wide:
                env[node] = self._split(moves, node, env)
            elif node in self.wide:
                read = [self._for_all(moves, n, env[n]) for n in piece.inputs]
                (env[node],) = run(piece, read, names, {**whole, **self.parts})
            else:
                (env[node],) = run(piece, [env[n] for n in piece.inputs], names, own)
            for n in last_read:
                del env[n]
        return tuple(env[n] for n in self.loss.outputs)

    def _for_all(self, moves: TokenMoves, node: fx.Node, value: Tensor) -> Tensor:
        alone = node in self.wide or self.scope.seq not in factors_of(self.scope, node)
        return value if alone else moves.gather(node, value)

    def _split(self, moves: TokenMoves, node: fx.Node, env: Mapping[fx.Node, Any]) -> Tensor:
        logits = node.all_input_nodes[0]
        columns = Columns(
            self.words, partial(moves.gather, logits), partial(moves.exchange, logits)
        )
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        return SPLIT_OPERATORS[node.target](columns, *args, **kwargs)
