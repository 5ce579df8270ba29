"""Costs from a profile: one curve for each block structure, strategy and quantity.

Time, bytes saved for backward and bytes of workspace are predicted by curves (``curves``)
where a strategy was measured, by the analytic prior (``prior_cost``) where it was not. The
prior always gives what a rank sends, which it counts exactly, and the time of bringing together the
gradients of whole weights, which a strategy causes but the rest of the step is measured with.

Two measurements of a strategy or fewer make no curve, and noise would choose between curves and
what has none. So where strategies were measured at different lengths, as in a profile of so many
seconds, times are the prior's, as far off as this and other strategies of the block were
where they were measured (``time_ratios``). On simulated machines choices by such a profile then
lose 1.1 % of the time, and 1.9 % by curves where there are any.

Profiles measure cross-attention with as many keys as queries. Where there are more, or fewer, it
needs as much more, or less, as the prior says.

Stated conversions: a forward without gradients that was not measured is taken from the forward of
training, and may need all the memory that training needs, as nothing smaller is known.

A new workload of a model with two block structures, with all levers, takes 5 to 15 ms to predict on
one CPU core, once. The curves are fitted when they are first asked for, all in about a second.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial

import numpy as np

from paradyse.distributed.axis import SINGLE
from paradyse.distributed.session import Recent
from paradyse.planning.corrections import along, scale_of
from paradyse.planning.costs import NOTHING, BlockCost, without
from paradyse.planning.curves import DEGREES, MIN_POINTS, At, Curve, GrowthFactor
from paradyse.planning.prior import gradient_sum_s, head_cost, head_sum_s, prior_cost
from paradyse.planning.profile_file import (
    MEASURED,
    REST,
    Header,
    Measurement,
    Profile,
    read_profile,
)
from paradyse.planning.profile_machine import recorded_machine
from paradyse.planning.time_ratios import OF_PRIOR_IN_PROFILE, KindRatios, TimeRatios
from paradyse.planning.unmeasured import (
    QUANTITIES,
    Samples,
    in_proportion,
    on_a_line,
    scaled_bytes,
    with_levers,
)
from paradyse.strategies import canonical_strategy
from paradyse.types import HEAD, BlockSpec, HeadSpec, Point, Workload

log = logging.getLogger(__name__)

_Key = tuple[str, str, bool]
"""Structure, variant, training."""

_Measurable = Callable[[str, At], BlockCost]
"""What the prior says would be measured of a variant at a point."""


class CostModel:
    """Predicts from one profile. Equal profiles give equal numbers, on every rank.

    Args:
        profile: what was measured.
        notes: what people should know of the profile, for ``explain``.
    Raises:
        ValueError: the machine in the profile is none.
    """

    margin = 0.015
    """Share by which a step may need more than curves say of it, beyond weights and gradients. By
    ``Steps.memory``, on two ranks: up to 0.9 % between measured lengths (hidden 32, two layers);
    0.2 % at a length that ranks cannot share evenly (a Llama, hidden 256, 1,625 tokens)."""

    def __init__(self, profile: Profile, notes: Sequence[str] = ()) -> None:
        self.profile, self.notes = profile, tuple(notes)
        self.machine = recorded_machine(profile)
        self.structures = frozenset(m.structure for m in profile.measurements if m.kind != REST)
        self._measured: dict[_Key, dict[At, Measurement]] = {}
        self._over: dict[_Key, list[At]] = {}
        self._fitted: dict[_Key, list[Curve]] = {}
        self._plain: Recent[Hashable, tuple[BlockCost, BlockCost]] = Recent()
        self._is_whole = cache(self._find_whole)
        self._known_ratios: dict[tuple[str, bool], KindRatios] = {}
        latest = {(_key(m), m.batch, m.seq_len): m for m in profile.measurements}
        for (key, batch, seq_len), m in latest.items():
            if m.outcome == MEASURED:
                self._measured.setdefault(key, {})[batch, seq_len] = m
            else:
                self._over.setdefault(key, []).append((batch, seq_len))

    def cost(self, block: BlockSpec, point: str, workload: Workload) -> BlockCost:
        """Predicted cost of ``block`` under ``point`` for ``workload``, with its source.

        Raises:
            ValueError: the strategy is unknown.
        """
        variant = canonical_strategy(block.kind, point)
        key, base = self._key(block, variant, workload), Point.parse(variant).strategy
        if base == variant or self._samples(key):
            return self._over_limit(self._predicted(block, variant, workload), key, workload)
        measured, plain = self._known_plain(block, base, workload)
        cost = with_levers(measured, plain, self._prior(block, variant, workload))
        return self._over_limit(cost, key, workload)

    def _known_plain(
        self, block: BlockSpec, strategy: str, workload: Workload
    ) -> tuple[BlockCost, BlockCost]:
        """What is predicted of a strategy without levers, and the prior's; many points ask."""
        key = block.structure, block.priced_by, strategy, workload
        if key not in self._plain:
            predicted = self._predicted(block, strategy, workload)
            self._plain[key] = predicted, self._prior(block, strategy, workload)
        return self._plain[key]

    def _key(self, block: BlockSpec, variant: str, workload: Workload) -> _Key:
        return block.structure, variant, workload.training

    def _prior(self, block: BlockSpec, point: str, workload: Workload) -> BlockCost:
        return prior_cost(block, point, workload, self.machine, self.profile.header.sharded)

    def _predicted(self, block: BlockSpec, variant: str, workload: Workload) -> BlockCost:
        """By what was measured of the ``variant`` itself, else by the prior."""
        key, measurable = self._key(block, variant, workload), self._measurable(block, workload)
        cost = self._read(key, workload, measurable)
        if workload.key_len not in (None, workload.seq_len):
            said = measurable(variant, (workload.batch, workload.seq_len))
            cost = in_proportion(cost, said, self.measurable(block, variant, workload))
        return replace(cost, time_s=cost.time_s + self._outside(block, variant, workload))

    def _read(self, key: _Key, workload: Workload, measurable: _Measurable) -> BlockCost:
        """What measurements of ``key`` would be for ``workload``: off curves, or the prior's, off
        as others were."""
        _, variant, _ = key
        prior = measurable(variant, (workload.batch, workload.seq_len))
        if curves := self._curves(key, partial(measurable, variant)):
            cost = _read(curves, workload, prior)
        else:
            cost = scaled_bytes(prior, self._samples(key), partial(measurable, variant))
        if not curves or not self._is_whole(key[0], key[2]):
            ratio = self._ratios(key, measurable).ratio(variant, scale_of(workload), prior.parts)
            cost = replace(cost, time_s=prior.time_s * ratio, source=prior.source)
        return replace(cost, ahead_bytes=self._ahead(key, prior))

    def _find_whole(self, structure: str, training: bool) -> bool:
        """Whether all strategies of a structure that were measured were at the same points, but
        for those that are too large for a strategy."""
        names = {v for of, v, _ in (*self._measured, *self._over) if of == structure}
        keys = [(structure, v, training) for v in names if not Point.parse(v).levers]
        points = {p for k in keys for p in self._samples(k)}

        def is_there(key: _Key, point: At) -> bool:
            over = self._over.get(key, [])
            too_large = any(b <= point[0] and s <= point[1] for b, s in over)
            return too_large or point in self._samples(key)

        return all(is_there(k, p) for k in keys for p in points)

    def _ratios(self, key: _Key, measurable: _Measurable) -> KindRatios:
        """How far off the prior is of all variants of what has ``key``, by those measured."""
        structure, _, training = key
        if (structure, training) not in self._known_ratios:
            times = TimeRatios(OF_PRIOR_IN_PROFILE)
            known = [k for k in self._measured if k[0] == structure and k[2] >= training]
            for variant in dict.fromkeys(variant for _, variant, _ in known):
                for at, (time_s, *_) in self._samples((structure, variant, training)).items():
                    said, tokens = measurable(variant, at), at[0] * at[1]
                    if time_s > 0 and said.time_s > 0:
                        of = structure, variant
                        times.add(of, tokens.bit_length(), time_s / said.time_s, said.parts)
            self._known_ratios[structure, training] = times.kind(structure)
        return self._known_ratios[structure, training]

    def estimate(
        self, block: BlockSpec, variants: Collection[str], workload: Workload
    ) -> tuple[dict[str, float], np.ndarray]:
        """Times of ``variants`` of ``block`` for ``workload``, by the prior and how far off it was,
        without curves.

        Returns:
            Their seconds, and [number of variants, the same]: standard deviations of what is not
            known of the logarithm of one's time over another's.
        """
        measurable = self._measurable(block, workload)
        scale = scale_of(workload)
        ratios = self._ratios(self._key(block, "", workload), measurable)
        said = {v: self.measurable(block, v, workload) for v in variants}
        times = {
            v: c.time_s * ratios.ratio(v, scale, c.parts) + self._outside(block, v, workload)
            for v, c in said.items()
        }
        return times, ratios.deviation(scale, {v: c.parts for v, c in said.items()})

    def _measurable(self, block: BlockSpec, workload: Workload) -> _Measurable:
        """Of ``block``, at points where its keys are as many as its tokens: so it is measured."""
        has_keys = workload.key_len is not None

        def said(of: str, at: At) -> BlockCost:
            batch, seq_len = at
            there = replace(workload, batch=batch, seq_len=seq_len)
            return self.measurable(
                block, of, replace(there, key_len=seq_len) if has_keys else there
            )

        return said

    def measurable(self, block: BlockSpec, point: str, workload: Workload) -> BlockCost:
        """The prior's answer for ``block`` under ``point`` and ``workload``, less what is in no
        block's measurements."""
        cost = self._prior(block, point, workload)
        return replace(cost, time_s=cost.time_s - self._outside(block, point, workload))

    def head(self, head: HeadSpec, levers: str, workload: Workload) -> BlockCost:
        """Predicted cost of ``head`` with ``levers`` for ``workload``: as measured with these, else
        from the measured without levers, else by the prior."""
        key = head_structure(head), levers, workload.training
        if levers and not self._samples(key) and self._samples((key[0], "", workload.training)):
            plain, levered = (self._prior_of_head(head, of, workload) for of in ("", levers))
            cost = with_levers(self.head(head, "", workload), plain, levered)
            return self._over_limit(cost, key, workload)

        def measurable(of: str, at: At) -> BlockCost:
            there = replace(workload, batch=at[0], seq_len=at[1])
            cost = self._prior_of_head(head, of, there)
            return replace(cost, time_s=cost.time_s - self._outside_head(head, of, there))

        cost = self._read(key, workload, measurable)
        outside = self._outside_head(head, levers, workload)
        return self._over_limit(replace(cost, time_s=cost.time_s + outside), key, workload)

    def _prior_of_head(self, head: HeadSpec, levers: str, workload: Workload) -> BlockCost:
        return head_cost(head, levers, workload, self.machine, self.profile.header.sharded)

    def _outside_head(self, head: HeadSpec, levers: str, workload: Workload) -> float:
        """As ``_outside``."""
        if self.profile.header.sharded or not workload.training:
            return 0.0
        return head_sum_s(head, levers, workload, self.machine)

    def rest(
        self,
        workload: Workload,
        blocks: Sequence[BlockSpec] = (),
        head: HeadSpec | None = None,
    ) -> BlockCost:
        """Predicted for what of ``workload`` is in no block nor in ``head``, as far as enough was
        measured.

        A head that was not measured apart was measured with the rest, its logits whole: what the
        prior says of that is taken off. So is what ``cost`` adds for ``blocks``, as for the
        strategies that sum all their gradients: it was measured under all of them, and most do.
        """
        key = REST, "", workload.training
        if not (samples := self._samples(key)):
            return NOTHING
        curves = self._curves(key, None)
        cost = _read(curves, workload, NOTHING) if curves else on_a_line(samples, workload)
        outside = sum(self._outside(b, "megatron_cz", workload) for b in blocks)
        apart = head is not None and head_structure(head) in self.structures
        if head is not None and apart:
            outside += self._outside_head(head, "", workload)
        cost = replace(cost, time_s=max(0.0, cost.time_s - outside))
        if head is None or apart:
            return cost
        return without(cost, self._prior_of_head(head, "", workload))

    def floor(self, workload: Workload) -> int:
        """Bytes that a training step of ``workload`` holds beyond static, whatever the plan: at the
        end of backward, when gradients of replicated weights are summed.

        With whole logits it is more, but then the head has needed still more before.
        """
        of_rest, whole, levered = self._floors
        tokens = workload.batch * workload.seq_len
        of_head = [along(row, tokens) for row in levered] or [*whole.values(), 0][:1]
        return int(max(min(of_head), along(of_rest, tokens) if of_rest else 0))

    @cached_property
    def _floors(self) -> tuple[dict[int, int], dict[int, int], list[dict[int, int]]]:
        """Tokens -> bytes held at the end of backward, of the rest, of steps with whole logits, and
        of the head under each set of levers."""
        rows: dict[tuple[str, str], dict[int, int]] = {(REST, ""): {}, (HEAD, ""): {}}
        for (_, levers, training), measured in self._measured.items():
            for (batch, seq_len), m in sorted(measured.items()):
                if training and m.kind in (REST, HEAD):
                    rows.setdefault((m.kind, levers), {})[batch * seq_len] = m.floor_bytes
        return rows.pop((REST, "")), rows.pop((HEAD, "")), [*rows.values()]

    def notes_on(self, blocks: Sequence[BlockSpec]) -> tuple[str, ...]:
        """What ``explain`` says of this profile for these ``blocks``."""
        missing: dict[str, list[str]] = {}
        for b in blocks:
            if b.structure not in self.structures:
                missing.setdefault(b.structure, []).append(b.name)
        return (
            f"costs from the profile {self.profile.path}",
            *self.notes,
            *(
                f"not in the profile, so predicted by the analytic prior: {names[0]}"
                + (f" and {len(names) - 1} like it" if len(names) > 1 else "")
                for names in missing.values()
            ),
        )

    def _ahead(self, key: _Key, prior: BlockCost) -> int:
        """Bytes that are fetched ahead: as measured, as gloo's messages take twice what they bring;
        where another plan could not fetch ahead as much, by the ``prior``."""
        measured = (m.ahead_bytes for m in self._measured.get(key, {}).values())
        return max(prior.ahead_bytes, *measured, 0)

    def _outside(self, block: BlockSpec, point: str, workload: Workload) -> float:
        """Seconds that a block's strategy causes but its own measurements do not have."""
        if self.profile.header.sharded or not workload.training:
            return 0.0
        return gradient_sum_s(block, point, workload, self.machine)

    def _samples(self, key: _Key) -> Samples:
        structure, variant, training = key
        found = self._measured.get(key)
        if found is None and not training:
            found = self._measured.get((structure, variant, True))
        return {p: _quantities(m, training) for p, m in (found or {}).items()}

    def _curves(self, key: _Key, prior: Callable[[At], BlockCost] | None) -> list[Curve]:
        """Of what was measured, fitted when they are first asked for."""
        if key not in self._fitted:
            self._fitted[key] = self._fit(self._samples(key), prior)
        return self._fitted[key]

    def _fit(self, samples: Samples, prior: Callable[[At], BlockCost] | None) -> list[Curve]:
        """A curve for each of ``QUANTITIES``; none where too little was measured."""
        if len(samples) < MIN_POINTS:
            return []
        growths: Sequence[GrowthFactor | None] = prior_growths(prior) if prior else (None,) * 3
        # Embedding, head and loss are linear in the tokens.
        degrees = DEGREES if prior else DEGREES[:1]
        return [
            Curve({p: row[i] for p, row in samples.items()}, growth, degrees, quantity != "time_s")
            for i, (quantity, growth) in enumerate(zip(QUANTITIES, growths, strict=True))
        ]

    def _over_limit(self, cost: BlockCost, key: _Key, workload: Workload) -> BlockCost:
        """At or beyond a workload that did not fit: more than the limit it did not fit."""
        structure, variant, training = key
        over = self._over.get(key, [])
        if training:  # needs what the forward alone needs, and more
            over = over + self._over.get((structure, variant, False), [])
        limit = self.profile.header.memory_limit or self.machine.capacity_bytes
        if limit is None or not any(b <= workload.batch and s <= workload.seq_len for b, s in over):
            return cost
        return replace(cost, workspace_bytes=max(cost.workspace_bytes, limit + 1))


def head_structure(head: HeadSpec) -> str:
    """What tells ``head`` from others in a profile, as ``BlockSpec.structure`` does blocks."""
    return f"head of {head.hidden} to {head.vocabulary}"


def _key(m: Measurement) -> _Key:
    if m.kind == REST:
        return REST, "", m.training
    return m.structure, canonical_strategy(m.kind, m.strategy), m.training


def _quantities(m: Measurement, training: bool) -> tuple[float, float, float]:
    if training:
        return m.forward_s + m.backward_s, m.saved_bytes, m.workspace_bytes
    return m.forward_s, 0, m.workspace_bytes + (m.saved_bytes if m.training else 0)


def prior_growths(prior: Callable[[At], BlockCost]) -> list[GrowthFactor]:
    """Of each of ``QUANTITIES``, by what ``prior`` says at two points."""

    def growth(quantity: str, a: At, b: At) -> float:
        less, more = (float(getattr(prior(at), quantity)) for at in (a, b))
        return more / less if less > 0 else 1.0

    return [partial(growth, quantity) for quantity in QUANTITIES]


def _read(curves: Sequence[Curve], workload: Workload, prior: BlockCost) -> BlockCost:
    """The curves' answers; what is not measured is the prior's."""
    (time_s, source), *sizes = (curve(workload.batch, workload.seq_len) for curve in curves)
    saved, workspace = (math.ceil(num_bytes) for num_bytes, _ in sizes)
    return replace(
        prior, time_s=time_s, saved_bytes=saved, workspace_bytes=workspace, source=source
    )


class _Models(Recent[tuple[object, ...], CostModel]):
    """By what profile and model they are of: their fits take a while."""


def load_cost_model(path: str, blocks: Sequence[BlockSpec], present: Header) -> CostModel:
    """The cost model of the profile at ``path``, if it is one of these blocks as they run here.

    Args:
        blocks: of the captured model.
        present: what the model runs on; ``machine`` and ``memory_limit`` are not looked at.
    Raises:
        ValueError: the file cannot be read, or was measured on another number of ranks, in another
            dtype, with weights at rest otherwise, or of another model.
    """
    profile = read_profile(path)
    measured = profile.header
    again = f"paradyse profile --ranks {present.num_ranks}"
    layouts = {True: "sharded weights", False: "whole weights on every rank"}
    here, there = (
        (f"{h.num_ranks} ranks", h.dtype, layouts[h.sharded]) for h in (present, measured)
    )
    ways_out = (
        f"measure on {present.num_ranks} ranks: {again}",
        f"measure in this dtype: {again} --dtype {present.dtype}"
        + ", or paradyse.profile under autocast" * (present.dtype != "float32"),
        f"measure the model as it is trained: {again}{' --sharded' * present.sharded}, or "
        f"paradyse.profile of it with {here[-1]}",
    )
    for ours, theirs, way_out in zip(here, there, ways_out, strict=True):
        if ours != theirs:
            raise ValueError(
                f"profile {path}: measured with {theirs}, this runs with {ours}; {way_out}, or "
                "leave option 'cost_model' out"
            )
    of = {m.structure for m in profile.measurements if m.kind not in (REST, HEAD)}
    mine = sorted({b.structure for b in blocks})
    if mine and not of.intersection(mine):
        raise ValueError(
            f"profile {path}: a profile of another model: its blocks have the structures "
            f"{', '.join(sorted(of)) or 'none'}, this model's {', '.join(mine)}; measure this "
            f"model: {again}"
        )
    key = (path, profile.checksum, present.inner, present.device, *mine)
    known = SINGLE.session.of(_Models)
    if key not in known:
        notes = _differences(measured, present)
        for note in notes:
            log.warning("profile %s: %s", path, note)
        known[key] = CostModel(profile, notes=notes)
    return known[key]


def _differences(measured: Header, present: Header) -> tuple[str, ...]:
    """What may make the measurements wrong here, though they can be used."""
    theirs, ours = (
        {"device": h.device, "inner": h.inner}
        | {name: h.versions.get(name, "unknown") for name in ("paradyse", "torch", "triton")}
        for h in (measured, present)
    )
    return tuple(
        f"measured on {name} {theirs[name]}, running on {ours[name]}"
        for name in ours
        if theirs[name] != ours[name]
    )
