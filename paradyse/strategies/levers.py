"""Levers of a block: less memory for more time.

Under ``selective`` and ``tiled`` a block runs without autograd. It keeps its inputs for backward,
and of attention the output and log-sum-exp. Its gradients are a compiled function of these, which
computes again what they depend on and nothing else: neither attention, nor the block's last linear
and the message behind it. ``tiled`` runs both over one tile of the tokens after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paradyse.graph.lower import Dims
from paradyse.kernels.attention_op import replayed
from paradyse.strategies.base import (
    NUM_COMMON,
    Common,
    LoweredGradients,
    LoweredPiece,
    PieceVariant,
    Scope,
    StepContext,
    Strategy,
)
from paradyse.strategies.chunked import ChunkedVariant, unchunkable
from paradyse.strategies.tiles import Tile, all_tokens, make_tiles, over_tiles, untileable
from paradyse.torch_private import tree_leaves


class LeveredVariant:
    """What computes a block that keeps little for backward.

    Args:
        variant: what computes the block otherwise.
        tiled: over one tile of the tokens after the other.
    """

    def __init__(self, variant: PieceVariant, tiled: bool):
        self.variant, self.tiled, self.uses = variant, tiled, variant.uses
        self.scope = variant.lowered.scope
        self.dims = [*variant.lowered.dims[NUM_COMMON:]]
        """Of the block's own tensors."""
        self.output_dims = variant.output_dims()
        self.kept_dims: list[Dims] = []
        """Of what attention gives, [B, tokens, H, D] and [B, H, tokens]."""
        self.forward = variant.lowered
        """Gives the outputs, and then what is kept of attention."""
        attended = variant.attended_dims()
        if attended is not None:
            b, h, s, d = attended
            self.kept_dims = [(b, s, h, d), (b, h, s)]
            key = f"keeping attention\n{variant.lowered.key}"
            self.forward = LoweredPiece(self.scope, key, self._keep_attention, self.dims)
        dims = [*self.dims, *self.kept_dims, *self.output_dims]
        again = self._compute_again
        self.gradients_for = LoweredGradients(self.scope, variant.lowered.key, again, dims)

    def __call__(self, step: StepContext) -> Any:
        tensors = self.variant.tensors(step)
        needs = tuple(torch.is_grad_enabled() and t.requires_grad for t in tensors)
        return _Levered.apply(self, step.sizes, step.common, needs, *tensors)

    def _keep_attention(
        self, sizes: dict[str, Any], common: Sequence[Tensor], own: Iterator[Tensor]
    ) -> Sequence[Any]:
        kept: list[Tensor] = []

        def noted(op: Any, *args: Any) -> Any:
            results = op(*args)
            out, lse = tree_leaves(results)
            kept.extend([out.transpose(1, 2), lse])
            return results

        return [*self.variant.compute(sizes, common, own, noted), *kept]

    def _compute_again(
        self, sizes: dict[str, Any], common: Sequence[Tensor], own: list[Tensor], rest: list[Tensor]
    ) -> tuple[Any, ...]:
        """The outputs, with attention's from what was kept of it, and the gradients of outputs."""
        num_kept = len(self.kept_dims)

        def known(op: Any, *args: Any) -> Any:
            out, lse = rest[:num_kept]
            return replayed(op, (out.transpose(1, 2), lse), *args)

        return self.variant.compute(sizes, common, iter(own), known), rest[num_kept:]

    def run_forward(
        self,
        sizes: Mapping[str, int],
        common: Common,
        tensors: Sequence[Tensor],
        needs: tuple[bool, ...],
    ) -> list[Tensor]:
        """The outputs, and then what is kept of attention.

        Args:
            sizes, common: of the step.
            tensors: the block's own.
            needs: which of them need gradients.
        """
        given = list(zip(tensors, self.dims, strict=True))
        made = [*self.output_dims, *self.kept_dims]
        tiles, num_outputs = self._tiles(sizes, common), len(self.output_dims)
        results = over_tiles(tiles, self.forward, given, made)
        if any(needs):  # compiled here: autograd may run backward in a thread of its own
            like = [*common, *tensors, *results[num_outputs:], *results[:num_outputs]]
            self.gradients_for(needs).function_for(tiles[0].sizes, like)
        return results

    def run_backward(
        self,
        sizes: Mapping[str, int],
        common: Common,
        saved: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        needs: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """Gradients of the block's own tensors.

        Args:
            sizes, common: of the step.
            saved: the block's own tensors, and what was kept of attention.
            cotangents: gradients of the outputs.
            needs: which of the tensors need gradients.
        """
        dims = [*self.dims, *self.kept_dims, *self.output_dims]
        given = list(zip([*saved, *cotangents], dims, strict=True))
        made = [d for d, need in zip(self.dims, needs, strict=True) if need]
        piece = self.gradients_for(needs)
        found = iter(over_tiles(self._tiles(sizes, common), piece, given, made))
        return [next(found) if need else None for need in needs]

    def _tiles(self, sizes: Mapping[str, int], common: Common) -> list[Tile]:
        """What is computed at once, one after the other."""
        if self.tiled:
            return make_tiles(self.scope.axis, sizes, common)
        return all_tokens(sizes, common)


class _Levered(torch.autograd.Function):
    """A block without autograd inside."""

    @staticmethod
    def forward(
        ctx: Any,
        block: LeveredVariant,
        sizes: Mapping[str, int],
        common: Common,
        needs: tuple[bool, ...],
        *tensors: Tensor,
    ) -> Any:
        results = block.run_forward(sizes, common, tensors, needs)
        num_outputs = len(block.output_dims)
        ctx.of = block, sizes, common, needs
        ctx.save_for_backward(*tensors, *results[num_outputs:])
        return tuple(results[:num_outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        block, sizes, common, needs = ctx.of
        with torch.autocast(cotangents[0].device.type, enabled=False):  # casts are in the graph
            grads = block.run_backward(sizes, common, ctx.saved_tensors, cotangents, needs)
        return None, None, None, None, *grads


def with_levers(variant: Any, levers: Collection[str]) -> Any:
    """``variant`` under those of ``levers`` that change what is kept of its inside."""
    if "chunked" in levers:
        return ChunkedVariant(variant)
    if not {"selective", "tiled"} & set(levers):
        return variant
    return LeveredVariant(variant, "tiled" in levers)


def lever_reasons(scope: Scope, block: Any, strategies: Mapping[str, Strategy]) -> dict[str, str]:
    """Lever, or point of a strategy and a lever -> why ``block`` cannot be computed so.

    Args:
        scope: of the block's capture.
        strategies: name that plans use -> the strategy that computes such blocks.
    """
    reasons = {
        f"{name}+{lever}": why for name, s in strategies.items() for lever, why in s.without.items()
    }
    whole = {"tiled": untileable(scope, block), "chunked": unchunkable(scope, block)}
    return reasons | {lever: why for lever, why in whole.items() if why}
