"""What every strategy is made of: values in the layout asked for, and pieces compiled on first
use.

Throughout, ``scope`` is what all variants of a capture share, ``node`` a value of the graph,
``layout`` ``SPLIT`` or ``WHOLE``, ``sizes`` a size per letter ("B", "S", "s"), ``piece`` a part of
the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, fx

from paradyse.distributed.axis import Axis
from paradyse.distributed.session import Recent
from paradyse.graph.attention_call import Apply, apply_operator
from paradyse.graph.dropouts import dropout_places
from paradyse.graph.factors import Factor, Names
from paradyse.graph.lower import LONG, Compiled, Dims, Size, Spec, compile_function
from paradyse.graph.subgraph import Labels, Piece, is_weight, structure
from paradyse.strategies.weight_stream import Streams
from paradyse.strategies.work import Work
from paradyse.torch_private import disable_current_modes
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.slices import Form

log = logging.getLogger(__name__)

SPLIT, WHOLE = "s", "S"
"""Labels of the sequence factor: the rank's tokens, or all of them. Of another sequence, whose
tokens are keys, the labels are those of ``Scope.keys_at``."""


Uses = Sequence[tuple[fx.Node, Form]]
"""Weights of a variant, and the form in which each is taken."""

Common = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""All positions [S], the rank's positions [s], a marker of the other sizes [B, ..], info int64
[2] = (S, block id) or, with keys of another sequence, [3] = (S, block id, number of the keys), the
block's seed []."""


@dataclass(frozen=True)
class StepContext:
    """What a variant or a piece may know and ask of the step that it computes.

    A variant is called with it and returns the step's outputs. ``uses`` of the variant lists its
    weights, each with the form in which it asks for it.
    """

    position: int
    """Position among the steps."""
    block_id: int
    """Block id that its messages are booked to."""
    sizes: Mapping[str, int]
    """Sizes of the call: "B", "S" and "s"."""
    common: Common
    get: Callable[[fx.Node, str], Any]
    """An input, on the rank's tokens ("s") or whole ("S")."""
    raw: Callable[[fx.Node], Tensor]
    """A weight as it is given to the graph: whole, or sharded."""
    weights: Callable[[Uses], tuple[Tensor, ...]]
    """Weights, each whole or as the rows of the rank's group."""
    sync: GradientSync
    """Whether backward sends the gradients of weights."""
    streams: Streams
    """Weights that come group by group."""


FEW = 2
"""Lengths for which a piece is compiled apart before a warning says so."""


@dataclass
class VariantCache:
    """Compiled functions by structure, shared by all captures on an axis: a second one finds what
    the first compiled."""

    compiled: Recent[Any, list[Compiled]] = field(default_factory=Recent)
    num_compiled: int = 0

    def get(
        self,
        key: Any,
        fn: Callable[..., tuple[Any, ...]],
        specs: Sequence[Spec],
        inner: str,
        sizes: Mapping[str, int],
        differentiates: bool = False,
    ) -> Compiled:
        """The function for ``key`` that holds for ``sizes``, compiled now if there is none.

        Args:
            fn: what to compile.
            specs: of its tensors, sizes as letters.
            inner: the compiler's name.
            differentiates: ``fn`` asks autograd for gradients.
        Raises:
            AssertionError: what was compiled at ``sizes`` does not hold there.
        """
        known = self.compiled.get(key)
        if known is None:
            known = self.compiled[key] = []
        for compiled in known:
            if compiled.holds_for(sizes):
                return compiled
        constants = sum(c.has_constants for c in known)
        if constants == FEW:
            log.warning(
                "%s takes lengths for constants in a piece of this model, which is compiled anew "
                'for each of them; options={"inner": "aot_eager"} compiles it once',
                inner,
            )
        for hints in [dict(sizes)] if constants else self._hints(sizes, inner):
            try:
                with disable_current_modes():  # they watch what runs, not what is compiled
                    compiled = compile_function(fn, specs, inner, hints, differentiates)
            except RuntimeError:
                if hints == sizes:
                    raise
                continue  # a table of positions may be shorter than the long sizes
            if compiled.holds_for(sizes):
                known.append(compiled)
                self.num_compiled += 1
                return compiled
        raise AssertionError(f"compiled at {sizes}, yet it does not hold there")

    @staticmethod
    def _hints(sizes: Mapping[str, int], inner: str) -> list[dict[str, int]]:
        """Sizes to trace at, in order: long ones for a compiler that tunes, then these."""
        if inner != "inductor":
            return [dict(sizes)]
        tokens = LONG // sizes.get("B", 1)
        least = {WHOLE: tokens, SPLIT: tokens // 2}
        long = {k: 1 if n == 1 else max(n, least.get(k, n)) for k, n in sizes.items()}
        return [long, dict(sizes)]


@dataclass(frozen=True)
class Scope:
    """What all variants of one capture share whose tokens are of one sequence."""

    names: Names
    seq: Factor
    batch: Factor | None
    axis: Axis
    inner: str
    cache: VariantCache
    others: tuple[Factor, ...] = ()
    """Sizes of inputs that vary besides: of another sequence, the number of choices."""
    keys: Factor | None = None
    """The sequence, one of ``others``, that attention takes keys from where these are not tokens of
    ``seq``."""

    def labels(self, layout: str) -> Labels:
        keys = {self.keys: self.keys_at[layout]} if self.keys is not None else {}
        whole = {f: letter for letter, f in self.beside.items()}
        entire = {f.entire: letter for f, letter in (whole | {self.seq: WHOLE}).items()}
        return Labels(entire | whole | {self.seq: layout} | keys)

    @cached_property
    def keys_at(self) -> dict[str, str]:
        """Layout -> the label of ``keys`` in it; "n0" is what a rank holds of "N0"."""
        letter = next(x for x, f in self.beside.items() if f is self.keys)
        return {WHOLE: letter, SPLIT: letter.lower()}

    @property
    def tokens(self) -> tuple[Factor, ...]:
        """The sequences whose tokens are split: ``seq``, and that of the keys."""
        return (self.seq,) if self.keys is None else (self.seq, self.keys)

    @property
    def marked(self) -> tuple[str, ...]:
        """Letters of the sizes that a marker in ``Common`` shows."""
        own = (self.keys_at[SPLIT],) if self.keys is not None and self.axis.size > 1 else ()
        return *self.beside, *own

    def sequence_of(self, node: fx.Node) -> Factor:
        """Which of ``tokens`` is a dim of ``node``."""
        dims = self.names.of(node)
        return next(f for f in self.tokens if any(f in d for d in dims))

    @cached_property
    def beside(self) -> dict[str, Factor]:
        """Letter -> factor, of what varies beside the sequence: "B", and "N0", "N1", .. for
        ``others``."""
        batch = {} if self.batch is None else {"B": self.batch}
        return batch | {f"N{i}": f for i, f in enumerate(self.others)}


@dataclass(frozen=True)
class Strategy:
    """How one block is computed in parallel: an entry of ``paradyse.strategies.STRATEGIES``."""

    name: str
    """The name that plans use."""
    build: Callable[[Scope, Any, Piece], Any]
    """Scope, block and its piece -> a callable of ``StepContext`` that computes the block."""
    count: Callable[[Work], None]
    """Counts what a block does on one rank, besides ``Work.surround`` and its weights' messages."""
    weights: Literal["whole", "split", "streamed"] = "whole"
    """What a rank computes with: all weights of the block, those of its own heads or columns, or
    those of one group of heads or columns after the other."""
    same_as: Mapping[str, str] = field(default_factory=dict)
    """Kind of block -> the strategy whose variant computes it, where that is another's."""
    refuses: Callable[[Any], str] = lambda block: ""
    """Block -> why it cannot be computed, besides heads or columns that it mixes; "" if it can."""
    without: Mapping[str, str] = field(default_factory=dict)
    """Lever -> why no block can have it."""


NUM_COMMON = 5

EAGER_NODES = 4
"""Pieces of at most this many operators are not worth a compiled region (0.2 ms a step each)."""


@dataclass
class LoweredPiece:
    """A function of tensors, compiled for each combination of grad mode and gradients asked for.
    Under the inner compiler "eager" it is called as it is, unless it ``differentiates``: of a trace
    only that is computed which gradients depend on."""

    scope: Scope
    key: str
    """Equal for functions that compute the same."""
    fn: Callable[[dict[str, Any], Sequence[Tensor], Iterator[Tensor]], Sequence[Any]]
    """Sizes by letter, ``StepContext.common`` and the piece's own tensors -> its outputs."""
    dims: Sequence[Dims]
    """Dims of the piece's own tensors."""
    eager: bool = False
    """Whether to run it operator by operator, as a compiled region is not worth it."""
    differentiates: bool = False
    """Whether ``fn`` asks autograd for gradients."""
    _modes: dict[Any, Compiled] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dims = [*common_dims(self.scope), *self.dims]

    def _run(self, *tensors: Tensor) -> tuple[Any, ...]:
        common, own = tensors[:NUM_COMMON], iter(tensors[NUM_COMMON:])
        out = self.fn(bind_sizes(self.dims, tensors), common, own)
        if self.eager or self.differentiates:
            return tuple(out)
        # a compiled region gives what the next one expects
        return tuple(o.contiguous() if isinstance(o, Tensor) else o for o in out)

    def __call__(
        self, sizes: Mapping[str, int], common: Sequence[Tensor], own: Sequence[Tensor]
    ) -> Any:
        if not self._as_it_is:
            own = [t if _is_dense(t) else t.contiguous() for t in own]
        return self.function_for(sizes, [*common, *own])(*common, *own)

    @property
    def _as_it_is(self) -> bool:
        """Whether nothing compiles it, so that its tensors may lie in memory in any way."""
        return self.eager or self.scope.inner == "eager" and not self.differentiates

    def function_for(
        self, sizes: Mapping[str, int], tensors: Sequence[Tensor]
    ) -> Callable[..., Any]:
        """What computes the piece on ``tensors`` like these, the common ones first, at ``sizes``;
        compiled now if it is to be and is not.
        """
        if self._as_it_is:
            return self._run
        grad = torch.is_grad_enabled()
        mode = grad, *((t.dtype, grad and t.requires_grad, t.is_contiguous()) for t in tensors)
        compiled = self._modes.get(mode)
        if compiled is None or not compiled.holds_for(sizes):
            specs = [
                Spec(
                    *(dims, t.dtype, t.device, grad and t.requires_grad),
                    alike=t.ndim > 0 and not any(t.stride()),
                )
                for dims, t in zip(self.dims, tensors, strict=True)
            ]
            key = (self.key, self.scope.axis.name, self.scope.inner, mode, tuple(specs))
            how = (self.scope.inner, sizes, self.differentiates)
            compiled = self.scope.cache.get(key, self._run, specs, *how)
            self._modes[mode] = compiled
        return compiled.fn


def _is_dense(x: Tensor) -> bool:
    """Whether ``x`` lies in memory as a ``Spec`` says; heads cut from a table do not."""
    return x.is_contiguous() or not any(x.stride())


class PieceVariant:
    """What computes a block, or a part of one, as one piece on the rank's tokens."""

    uses: Uses
    """Weights, and the form in which it takes each."""
    lowered: LoweredPiece
    """Of ``compute``."""
    begins_with_message: bool = False
    """Whether its first message, in forward and in backward, is waited for before most of its work,
    and then starts those that were held back (``distributed/held.py``)."""

    def tensors(self, step: StepContext) -> list[Tensor]:
        """The piece's own tensors in ``step``."""
        raise NotImplementedError

    def compute(
        self,
        sizes: dict[str, Any],
        common: Sequence[Tensor],
        own: Iterator[Tensor],
        apply: Apply = apply_operator,
    ) -> Sequence[Any]:
        """The outputs of the piece.

        Args:
            sizes: by letter.
            common: of the step.
            own: what ``tensors`` gives.
            apply: calls the operator of attention.
        """
        raise NotImplementedError

    def output_dims(self) -> list[Dims]:
        """Dims of each output."""
        raise NotImplementedError

    def attended_dims(self) -> Dims | None:
        """Dims of attention's output, [B, H, tokens, D]; None where there is none."""
        raise NotImplementedError

    def __call__(self, step: StepContext) -> Any:
        return self.lowered(step.sizes, step.common, self.tensors(step))


def attended_by(attention: fx.Node) -> fx.Node:
    """The value that holds the output of the node ``attention``."""
    return next(user for user in attention.users if user.args[1] == 0)


def gradients(
    outputs: Sequence[Any], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Any]:
    """Gradients of ``inputs``, where ``cotangents`` are those of ``outputs``; None for inputs that
    these do not depend on.
    """
    pairs = [
        (y, g) for y, g in zip(outputs, cotangents, strict=True) if getattr(y, "requires_grad", 0)
    ]
    if not pairs:
        return [None] * len(inputs)
    ys, grads = zip(*pairs, strict=True)
    return list(torch.autograd.grad(ys, inputs, grads, allow_unused=True))


@dataclass
class LoweredGradients:
    """Gradients of a function of tensors: a ``LoweredPiece`` for each choice of those that need
    them."""

    scope: Scope
    key: str
    """Equal for functions that compute the same."""
    fn: Callable[[dict[str, Any], Sequence[Tensor], list[Tensor], list[Tensor]], tuple[Any, ...]]
    """Sizes by letter, ``StepContext.common``, tensors that may need gradients and others -> what
    is differentiated, the gradients of that, and whatever is given before those asked for."""
    dims: Sequence[Dims]
    """Dims of all these tensors."""
    _pieces: dict[tuple[bool, ...], LoweredPiece] = field(default_factory=dict)

    def __call__(self, needs: tuple[bool, ...]) -> LoweredPiece:
        """What computes gradients of those of the first tensors that ``needs`` names."""

        def fn(sizes: dict[str, Any], common: Sequence[Tensor], given: Iterator[Tensor]) -> Any:
            own = [next(given).detach().requires_grad_(need) for need in needs]
            with torch.enable_grad():
                outputs, cotangents, *results = self.fn(sizes, common, own, list(given))
            found = gradients(outputs, cotangents, [x for x in own if x.requires_grad])
            return [*(y.detach() for y in results), *found]

        if needs not in self._pieces:
            key = f"gradients {''.join(str(int(need)) for need in needs)}\n{self.key}"
            piece = LoweredPiece(self.scope, key, fn, self.dims, differentiates=True)
            self._pieces[needs] = piece
        return self._pieces[needs]


def common_dims(scope: Scope) -> tuple[Dims, ...]:
    """Dims of ``StepContext.common``; on one rank the two positions are the same."""
    split = SPLIT if scope.axis.size > 1 else WHOLE
    beside: Dims = tuple((letter,) for letter in scope.marked) or ((1,),)
    return (((WHOLE,),), ((split,),), beside, ((2 if scope.keys is None else 3,),), ())


def spec_dims(scope: Scope, node: fx.Node, layout: str) -> Dims:
    """Dims of an input of a piece, with the sizes that vary as letters."""
    labels = scope.labels(layout).of

    def size(f: Factor) -> Size:
        if f in labels:  # also where it is another one and some more
            return labels[f]
        base, k = f.origin()
        letter = labels.get(base)
        return f.size if letter is None else (letter, k) if k else letter

    return tuple(tuple(size(f) for f in dim) for dim in scope.names.of(node))


def bind_sizes(dims: Sequence[Dims], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Letter -> size, read off ``tensors`` of these ``dims`` (symbolic while tracing)."""
    found: dict[str, Any] = {}
    for spec, tensor in zip(dims, tensors, strict=True):
        for i, dim in enumerate(spec):
            if len(dim) == 1 and isinstance(dim[0], str):
                found.setdefault(dim[0], tensor.shape[i])
    return found


def bind_factors(scope: Scope, layout: str, sizes: Mapping[str, Any]) -> dict[Factor, Any]:
    return {f: sizes[letter] for f, letter in scope.labels(layout).of.items() if letter in sizes}


def piece_key(scope: Scope, piece: Piece, layout: str, extra: str) -> str:
    """Text that is equal for pieces that compute the same; ``extra`` tells apart what runs them."""
    places = [*dropout_places(piece.nodes).values()]
    extra += "" if places == [*range(len(places))] else f" dropouts at {places}"
    return f"{extra} {layout}\n{structure(piece, scope.names, scope.labels(layout))}"


def split_inputs(piece: Piece) -> tuple[list[fx.Node], list[fx.Node]]:
    """A piece's inputs that are not weights, and its weights."""
    return [n for n in piece.inputs if not is_weight(n)], [n for n in piece.inputs if is_weight(n)]
