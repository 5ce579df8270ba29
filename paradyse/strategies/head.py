"""The head over tiles of tokens: the logits of a tile exist only while it is computed.

Where its results have one loss to differentiate, a tile's gradients are computed with its forward,
up to the factor that backward brings, so no logits are computed twice (Liger Kernel, arXiv
2410.10989; ALST, arXiv 2506.13996). With x_c the tokens of tile c, W the head's weight and f the
loss of logits:

    y_c = x_c W^T;  loss = sum_c f(y_c);  g_c = f'(y_c);  dx_c = g_c W;  dW = sum_c g_c^T x_c

Where several results have gradients of their own, backward computes the logits again, by tiles.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from paradyse.graph.factors import Factor
from paradyse.graph.lower import Dims
from paradyse.graph.subgraph import Piece, has_gradient, live_nodes, make_piece, run
from paradyse.strategies.base import (
    EAGER_NODES,
    SPLIT,
    WHOLE,
    Common,
    LoweredGradients,
    LoweredPiece,
    Scope,
    StepContext,
    Uses,
    bind_factors,
    piece_key,
    spec_dims,
    split_inputs,
)
from paradyse.strategies.groups.analyse import factors_of
from paradyse.strategies.local import LocalPiece
from paradyse.strategies.loss import loss_sums
from paradyse.strategies.tiles import Tile, make_tiles, over_tiles
from paradyse.strategies.weight_stream import sum_dtype
from paradyse.torch_private import keeps_graph
from paradyse.weights.slices import Form

TILE_TOKENS = 1024
"""Tokens of all sequences of a batch in one tile: fewer leave the matmuls too small."""

Values = dict[fx.Node, Tensor]


def head_tile_tokens(batch: int) -> int:
    """Most tokens of one sequence in a tile of a head, of ``batch`` sequences."""
    return max(1, TILE_TOKENS // batch)


class TiledHead:
    """A head by tiles of the rank's tokens, with all words of the vocabulary.

    Args:
        scope: what all variants of the capture share.
        head: of the capture.
        piece: its nodes; logits are not among the outputs.
    """

    parts: Mapping[Factor, int] = {}
    """Sizes of dims other than tokens of which the rank has a part."""
    part = ""
    """Which part, as text."""

    def __init__(self, scope: Scope, head: Any, piece: Piece):
        self.scope, self.piece = scope, piece
        self.layout = SPLIT if scope.axis.size > 1 else WHOLE
        core, linears = set(head.core), set(head.linears)
        self.linears = [n for n in piece.nodes if n in linears]
        inside = [n for n in piece.nodes if n in core]
        read = dict.fromkeys(a for n in inside for a in n.all_input_nodes)
        self.given = [n for n in read if n not in core]
        """What tiles are computed from."""
        self.loss = make_piece("loss", [n for n in inside if n not in linears], piece.outputs)
        """From logits to results."""
        self.dims = [self.dims_of(n) for n in self.given]
        self.output_dims = [spec_dims(scope, n, self.layout) for n in piece.outputs]
        self.differentiable = [i for i, n in enumerate(piece.outputs) if has_gradient(n)]
        """Results that have gradients."""
        self.at_once = self._has_one_loss()
        """Whether gradients are computed with the forward."""
        self.inputs, self.weights = split_inputs(piece)
        self.uses: Uses = [(n, self.form(n)) for n in self.weights]
        outside = [n for n in piece.nodes if n not in core]
        self.made = [n for n in outside if n in read]
        """Of ``given``, what is computed before the tiles."""
        before = make_piece("before the head", live_nodes(outside, self.made), self.made)
        eager = len(outside) <= EAGER_NODES
        self.before = LocalPiece(
            scope, before, self.layout, "head", within=piece, eager=eager, parts=self.parts
        )
        self.unread = set(self.given).difference(self.before.weight_nodes if self.at_once else read)
        """Weights that backward does not read."""
        at = [piece.nodes.index(n) for n in self.linears]
        self._key = piece_key(scope, piece, self.layout, f"tiled head {at} {self.part}")
        self._loss_dims = [self.dims_of(n) for n in self.loss.inputs]
        self._results = LoweredPiece(
            scope,
            self._key,
            lambda sizes, common, own: self.run_loss(sizes, common, list(own)),
            self._loss_dims,
        )
        cotangents = [] if self.at_once else [self.output_dims[i] for i in self.differentiable]
        dims = [*self._loss_dims, *cotangents]
        self._gradients_for = LoweredGradients(scope, self._key, self._loss_again, dims)
        """Of inputs of ``loss``; ``at_once`` behind the results."""

    def _has_one_loss(self) -> bool:
        if len(self.differentiable) != 1:
            return False
        node = self.piece.outputs[self.differentiable[0]]
        one = node.target is loss_sums or node.meta["val"].numel() == 1
        return one and self.scope.seq not in factors_of(self.scope, node)

    def __call__(self, step: StepContext) -> Any:
        env = {n: self.own_part(n, step.get(n, self.layout)) for n in self.inputs}
        env.update(zip(self.weights, step.weights(self.uses), strict=True))
        if self.made:
            own = [env[n] for n in self.before.order]
            env.update(zip(self.made, self.before.lowered(step.sizes, step.common, own)))
        tensors = [env[n] for n in self.given]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return _Tiled.apply(self, step.sizes, step.common, *tensors)
        return self.run_forward(step.sizes, step.common, tensors)

    def run_forward(
        self, sizes: Mapping[str, int], common: Common, tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """The results.

        Args:
            sizes, common: of the step.
            tensors: those of ``given``.
        """

        def compute(sizes: Any, common: Common, own: Sequence[Tensor]) -> Sequence[Tensor]:
            values = dict(zip(self.given, own, strict=True))
            values |= self._logits(self.read(sizes, common, values))
            results: Sequence[Tensor] = self._results(
                sizes, common, [values[n] for n in self.loss.inputs]
            )
            return results

        given = list(zip(tensors, self.dims, strict=True))
        return over_tiles(self._tiles(sizes, common), compute, given, self.output_dims)

    def run_gradients(
        self,
        sizes: Mapping[str, int],
        common: Common,
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
        cotangents: Sequence[Tensor] = (),
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The results and, for each of ``tensors``, its gradient; of weights in 32 bits at least.

        Args:
            sizes, common, tensors: as of ``run_forward``.
            needs: which of the tensors need gradients.
            cotangents: gradients of ``differentiable`` results, and no results are given then; none
                where ``at_once``: that of the loss is 1.
        """
        needed = {n for n, need in zip(self.given, needs, strict=True) if need}
        asked = [n for n in self.given if n in needed]
        outputs = self.output_dims if self.at_once else []
        sums: Values = {}

        def compute(sizes: Any, common: Common, own: Sequence[Tensor]) -> Sequence[Tensor | None]:
            values = dict(zip(self.given, own, strict=False))
            read = self.read(sizes, common, values)
            logits = self._logits(read)
            inputs = [logits.pop(n) if n in logits else values[n] for n in self.loss.inputs]
            inputs += own[len(self.given) :]
            found = self._gradients_for(self._needs(needed))(sizes, common, inputs)
            del inputs
            results, parts = found[: len(outputs)], self._parts(found[len(outputs) :], needed)
            through: Values = {}
            for linear in self.linears:
                if (grad := parts.pop(linear, None)) is not None:
                    _differentiate_linear(linear, grad, read, needed, through, sums)
            for node, own_grad in self.give_back(sizes, common, through).items():
                parts[node] = parts[node] + own_grad if node in parts else own_grad
            return [*results, *map(parts.get, asked)]

        dims = [*self.dims, *(self.output_dims[i] for i in self.differentiable)]
        given = list(zip([*tensors, *cotangents], dims, strict=False))
        made = [*outputs, *(d for n, d in zip(self.given, self.dims) if n in needed)]
        found = over_tiles(self._tiles(sizes, common), compute, given, made)
        grads = dict(zip(asked, found[len(outputs) :], strict=True))
        for node, total in sums.items():
            grads[node] = total if grads[node] is None else total.add_(grads[node])
        return found[: len(outputs)], [grads.get(n) for n in self.given]

    def _tiles(self, sizes: Mapping[str, int], common: Common) -> list[Tile]:
        return make_tiles(self.scope.axis, sizes, common, self.most_tokens(sizes))

    def _logits(self, read: Mapping[fx.Node, Tensor]) -> Values:
        return {n: F.linear(*(read[a] for a in n.all_input_nodes)) for n in self.linears}

    def _needs(self, needed: Collection[fx.Node]) -> tuple[bool, ...]:
        """Which inputs of ``loss`` need gradients if those of ``given`` do that are ``needed``."""
        through = {n for n in self.linears if any(a in needed for a in n.all_input_nodes)}
        return tuple(n in needed or n in through for n in self.loss.inputs)

    def _parts(
        self, grads: Sequence[Tensor | None], needed: Collection[fx.Node]
    ) -> dict[fx.Node, Tensor]:
        """Gradients of those inputs of ``loss`` that need them and have them."""
        pairs = zip(self.loss.inputs, self._needs(needed), strict=True)
        asked = [n for n, need in pairs if need]
        return {n: g for n, g in zip(asked, grads, strict=True) if g is not None}

    def _loss_again(
        self, sizes: dict[str, Any], common: Sequence[Tensor], own: list[Tensor], rest: list[Tensor]
    ) -> tuple[Any, ...]:
        """``differentiable`` results and their gradients; ``at_once`` all results follow."""
        results = self.run_loss(sizes, common, own)
        losses = [results[i] for i in self.differentiable]
        if not self.at_once:
            return losses, rest
        loss = losses[0].reshape(-1)[0]
        return [loss], [torch.ones_like(loss)], *results

    # ---- what a part of the vocabulary changes

    def dims_of(self, node: fx.Node) -> Dims:
        """Dims of ``node``, of what a tile is computed from or its logits."""
        return spec_dims(self.scope, node, self.layout)

    def form(self, node: fx.Node) -> Form:
        """How the weight ``node`` is taken."""
        return None

    def own_part(self, node: fx.Node, value: Tensor) -> Tensor:
        """What the rank computes with of ``value``, that of ``node``, which is no weight."""
        return value

    def most_tokens(self, sizes: Mapping[str, int]) -> int:
        """Most tokens of a sequence in a tile of a step with these ``sizes``."""
        return head_tile_tokens(sizes.get("B", 1))

    def read(
        self, sizes: Mapping[str, int], common: Common, values: Mapping[fx.Node, Tensor]
    ) -> Mapping[fx.Node, Tensor]:
        """What the linears read.

        Args:
            sizes, common: of the tile.
            values: those of ``given`` for its tokens.
        """
        return values

    def give_back(
        self, sizes: Mapping[str, int], common: Common, grads: Mapping[fx.Node, Tensor]
    ) -> Mapping[fx.Node, Tensor]:
        """Gradients of ``values``, where ``grads`` are those of tokens that ``read`` gave.

        Args:
            sizes, common: of the tile.
        """
        return grads

    def run_loss(
        self, sizes: Mapping[str, Any], common: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        """The results of a tile.

        Args:
            sizes, common: of the tile.
            values: of the inputs of ``loss``.
        """
        factors = bind_factors(self.scope, self.layout, sizes)
        return run(self.loss, values, self.scope.names, factors)


def _differentiate_linear(
    linear: fx.Node,
    grad: Tensor,
    values: Mapping[fx.Node, Tensor],
    needed: Collection[fx.Node],
    parts: Values,
    sums: Values,
) -> None:
    """Add what ``grad``, the gradient of ``linear`` in a tile, gives to the gradients of what is
    ``needed``: of tokens to ``parts``, of the weight and the bias to ``sums``."""
    x, weight, *bias = linear.all_input_nodes
    if x in needed:
        own = grad @ values[weight]
        parts[x] = parts[x] + own if x in parts else own
    rows, flat = values[x].flatten(0, -2), grad.flatten(0, -2)
    if weight in needed:
        sums[weight] = _add_product(sums.get(weight), flat.t(), rows)
    for b in bias:
        if b in needed:
            own = flat.sum(0, dtype=sum_dtype(flat))
            sums[b] = sums[b] + own if b in sums else own


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``total`` + ``a`` @ ``b``, in place, in 32 bits at least."""
    if total is None:
        return (a @ b).to(sum_dtype(a))
    return total.addmm_(a, b) if total.dtype == a.dtype else total.add_(a @ b)


class _Tiled(torch.autograd.Function):
    """A head by tiles, without autograd inside."""

    @staticmethod
    def forward(
        ctx: Any,
        head: TiledHead,
        sizes: Mapping[str, int],
        common: Common,
        *tensors: Tensor,
    ) -> Any:
        ctx.of, ctx.dtypes = (head, sizes, common), [t.dtype for t in tensors]
        saved: Sequence[Tensor | None] = tensors
        if head.at_once:
            needs = ctx.needs_input_grad[3:]
            outputs, saved = head.run_gradients(sizes, common, tensors, needs)
        else:
            outputs = head.run_forward(sizes, common, tensors)
        ctx.save_for_backward(*saved)
        constant = [y for i, y in enumerate(outputs) if i not in head.differentiable]
        ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        head, sizes, common = ctx.of
        given = [cotangents[i] for i in head.differentiable]
        if head.at_once:
            grads = [_scaled(g, given[0].reshape(-1)[0]) for g in ctx.saved_tensors]
        else:
            needs = ctx.needs_input_grad[3:]
            with torch.autocast(given[0].device.type, enabled=False):  # casts are in the graph
                _, grads = head.run_gradients(sizes, common, ctx.saved_tensors, needs, given)
        pairs = zip(grads, ctx.dtypes, strict=True)
        return None, None, None, *(g if g is None else g.to(dtype) for g, dtype in pairs)


def _scaled(grad: Tensor | None, factor: Tensor) -> Tensor | None:
    """``grad`` times ``factor`` []; in place where no other backward will ask for it."""
    if grad is None:
        return None
    return grad * factor if keeps_graph() else grad.mul_(factor)
