"""Plans that a run tries beside the chosen one, where they may be faster.

Once a plan was used ``TRY_AFTER`` times at a scale of lengths, and twice, four times as often,
plans of one strategy that are predicted to be nearly as fast take turns with it for ``ROUNDS``
rounds: those of its own strategies, where it has several, and those that run at other lengths, so
that little is compiled for it. The times of whole steps are compared, but for the first rounds;
none of these calls is watched, whose blocks would run one by one, and blocks run together under all
of the plans or under none. Where steps of one plan differ by more than plans do, those that may be
the fastest take further turns. What the first rank measured all ranks go by. From ``TRY_AGAIN``
calls on plans are tried that were before: what they take may have changed.

Not where gradients pile up over calls (``paradyse.no_sync``): one of them sends those of all.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from paradyse.planning.alone import Alone
from paradyse.planning.corrections import scale_of
from paradyse.planning.steady import of_one_strategy
from paradyse.planning.tried import FASTER
from paradyse.profiling.step_reports import CallUnderWay
from paradyse.types import Plan, Workload

log = logging.getLogger(__name__)

T = TypeVar("T")

TRY_AFTER = 16
"""Training calls of a plan at a scale before others are tried there: blocks run together by then
(``runs.FUSE_AFTER``), and some calls were watched."""

TRY_AGAIN = 64
"""Such calls from which on what was tried is tried again: another load of the machine for a second
was enough for a verdict."""

ROUNDS, WARM_UP = 4, 1
"""Turns of each plan of a trial, and how many of them are not counted."""

LONGER = 3
"""Times that a trial goes on, each for as many rounds as counted before, where nothing is clear."""

CLEAR = 2.0
"""Standard errors that a plan is to be slower by, to be surely slower."""

NEAR = 1.2
"""Plans are tried that are predicted to take at most so many times what the chosen one is."""

MOST = 2
"""Plans that are tried beside one."""


@dataclass
class _Trial:
    """Plans in turns; the chosen one is the last of a round, as long as it may be the fastest."""

    plans: Sequence[Plan]
    together: bool
    """Blocks run together under all of them."""
    turns: list[tuple[Plan, Workload]] = field(default_factory=list)
    """Those so far."""
    calls: dict[int, CallUnderWay] = field(default_factory=dict)
    """Of turns, by their number."""

    def __post_init__(self) -> None:
        self.round, self.left = list(self.plans), ROUNDS * len(self.plans)
        """Whose turns are next, and how many are left of them."""
        self.longer = 0
        """How often it has gone on."""

    def next(self, workload: Workload) -> Plan:
        """Whose turn it is, at ``workload``."""
        plan = self.round[-self.left % len(self.round)]
        self.turns.append((plan, workload))
        self.left -= 1
        return plan

    def go_on(self, plans: Sequence[Plan]) -> None:
        """With further turns of ``plans``."""
        self.round, self.left = list(plans), (ROUNDS - WARM_UP) * len(plans)
        self.longer += 1

    def seen_ns(self) -> list[int]:
        """Nanoseconds of each turn, 0 of those that do not count."""
        seen = []
        for turn in range(len(self.turns)):
            call = self.calls.get(turn) if turn >= WARM_UP * len(self.plans) else None
            report = call.report if call is not None and call.follows else None
            seen.append(round(report.time_s * 1e9) if report and report.trained else 0)
        return seen


def may_be_fastest(logarithms: Mapping[T, Sequence[float]]) -> list[T]:
    """Which of some plans may be the fastest; the one alone where that is clear.

    Medians are compared, by a standard error that all plans' spread about theirs tells. What is
    nearer than ``FASTER`` is not told apart, so an error of less than that makes it clear too.

    Args:
        logarithms: of seconds of steps, some of each plan.
    """
    middle = {plan: statistics.median(of) for plan, of in logarithms.items()}
    best = min(middle, key=middle.__getitem__)
    off = [x - middle[plan] for plan, of in logarithms.items() for x in of]
    spread = math.sqrt(sum(x * x for x in off) / max(1, len(off) - len(middle)))

    def error(plan: T) -> float:
        """Of a difference to the best; that of a median is 1.25 times that of a mean."""
        return 1.25 * spread * math.hypot(*(len(logarithms[p]) ** -0.5 for p in (plan, best)))

    unclear = [
        plan for plan in middle if CLEAR * error(plan) > max(FASTER, middle[plan] - middle[best])
    ]
    return [plan for plan in middle if plan == best or plan in unclear]


class Trials:
    """Of one program.

    Args:
        alone: chooses plans, by what was tried too.
        first_says: what the first rank gives as numbers, on every rank.
        forget: called where plans are to be chosen anew, on all ranks at the same call.
        often: whether blocks run together under a plan, outside of trials.
    """

    def __init__(
        self,
        alone: Alone,
        first_says: Callable[[Sequence[int]], list[int]],
        forget: Callable[[], None],
        often: Callable[[Plan], bool],
    ) -> None:
        self.alone, self._first_says, self._forget = alone, first_says, forget
        self._often = often
        self._calls: Counter[tuple[Plan, int]] = Counter()
        self._ran: dict[Plan, None] = {}
        """Plans that were chosen, in order."""
        self._under_way: dict[tuple[Plan, int], _Trial] = {}
        self._latest: _Trial | None = None
        """Whose turn the latest call was."""
        self._ended = False

    def began(self, call: CallUnderWay) -> None:
        """``call`` has begun, by the plan that ``turn`` gave."""
        if self._latest is not None:
            self._latest.calls[len(self._latest.turns) - 1] = call

    @property
    def under_way(self) -> bool:
        """Whether the latest call is one of a trial."""
        return self._latest is not None

    @property
    def together(self) -> bool:
        """Whether blocks run together in that call."""
        return self._latest is not None and self._latest.together

    def turn(self, chosen: Plan, workload: Workload) -> Plan:
        """What the call that begins runs by: ``chosen`` for ``workload``, or another in its place.
        Every rank comes here at the same calls."""
        self._latest = None
        with_levers = any("+" in s for s in chosen.strategies)
        steps_alone = workload.training and not workload.keeps_gradients
        if self._ended or not steps_alone or with_levers or chosen.split:
            return chosen
        at = chosen, scale_of(workload)
        self._ran[chosen] = None
        trial = self._under_way.get(at)
        if trial is None:
            self._calls[at] += 1
            times, rest = divmod(self._calls[at], TRY_AFTER)
            if rest or times & (times - 1):  # no power of two
                return chosen
            rivals = self._rivals(chosen, workload, self._calls[at] >= TRY_AGAIN)
            if not rivals:
                return chosen
            plans = [*rivals, chosen]
            trial = self._under_way[at] = _Trial(plans, all(map(self._often, plans)))
        if not trial.left and not self._goes_on(trial, workload):
            del self._under_way[at]
            self._judge(trial, at[1])
            return chosen
        self._latest = trial
        return trial.next(workload)

    def restart(self) -> None:
        """Count calls anew, on all ranks; verdicts stay."""
        for counted in (self._calls, self._ran, self._under_way):
            counted.clear()
        self._latest = None

    def ran_out(self) -> None:
        """Memory did not do for a call: from now on nothing is tried, which may need more."""
        self._under_way.clear()
        self._latest, self._ended = None, True

    def _rivals(self, chosen: Plan, workload: Workload, again: bool) -> list[Plan]:
        """What is tried beside ``chosen``, as the first rank finds: plans that were tried beside
        it, those of several strategies among them, only ``again``."""
        planner, tried = self.alone.planner, self.alone.tried.at(workload)
        own = set(chosen.strategies) if planner.mixes(chosen) else set[str]()
        known = [
            plan
            for plan in dict.fromkeys([*self._of_one_strategy(chosen), *self._ran])
            if plan != chosen
            and (plan in tried or not planner.mixes(plan))
            and (plan in self._ran or set(plan.strategies) <= own)
            and (again or chosen not in tried or plan not in tried)
            and (self.alone.offered or not plan.alone)  # its program may have turned out to differ
        ]
        if not known:
            return []
        limit, predict = planner.memory_limit(workload.dtype), self.alone.splits.predict
        most = NEAR * predict(chosen, workload)[0]
        predicted = [predict(plan, workload) for plan in known]
        # Others of this scale have up to twice as many tokens.
        fits = [i for i, (_, peak) in enumerate(predicted) if 2 * peak <= limit]
        near = sorted((i for i in fits if predicted[i][0] <= most), key=lambda i: predicted[i][0])
        said = self._first_says([int(i in near[:MOST]) for i in range(len(known))])
        return [plan for plan, is_tried in zip(known, said, strict=True) if is_tried]

    def _of_one_strategy(self, chosen: Plan) -> list[Plan]:
        """Plans of one strategy for all blocks, with the head of ``chosen``; none where every rank
        computes the whole."""
        planner = self.alone.planner
        if chosen.alone:
            return []
        names = [planner.candidates(b, training=True) for b in planner.blocks]
        found = of_one_strategy(
            planner.points(chosen), names, planner.blocks, planner.options.splitting
        )
        return [planner.plan_of(points) for points in found]

    def _goes_on(self, trial: _Trial, workload: Workload) -> bool:
        """Whether ``trial`` has further turns, as the first rank finds by its steps so far: where
        it is not clear what is the fastest at ``workload``."""
        if trial.longer == LONGER:
            return False
        off = self._off(trial, trial.seen_ns())
        expected = {
            plan: [math.log(ratio * self._predicted_s(plan, workload)) for ratio in ratios]
            for plan, ratios in off.items()
        }
        fastest = may_be_fastest(expected) if trial.plans[-1] in off else []
        said = self._first_says([int(plan in fastest) for plan in trial.plans])
        going_on = [plan for plan, is_open in zip(trial.plans, said, strict=True) if is_open]
        if len(going_on) > 1:
            trial.go_on(going_on)
        return len(going_on) > 1

    def _judge(self, trial: _Trial, scale: int) -> None:
        """Go on by what the first rank has seen in ``trial``."""
        off = self._off(trial, self._first_says(trial.seen_ns()))
        found = {plan: statistics.median(ratios) for plan, ratios in off.items()}
        if not found:  # where a model is several graphs no step is one call: do not go on trying
            self._ended = True
        if trial.plans[-1] in found:
            self.alone.tried.add(scale, found)
            self._forget()
        told = ", ".join(f"{of:.2f} of what was predicted by {p.key}" for p, of in found.items())
        log.info("tried at scale %d: %s", scale, told or "nothing could be measured")

    def _off(self, trial: _Trial, seen_ns: Sequence[int]) -> dict[Plan, list[float]]:
        """Seconds over those predicted, of the turns of each plan that count."""
        off = dict[Plan, list[float]]()
        for (plan, workload), nanoseconds in zip(trial.turns, seen_ns, strict=True):
            if nanoseconds:
                ratio = nanoseconds / 1e9 / self._predicted_s(plan, workload)
                off.setdefault(plan, []).append(ratio)
        return off

    def _predicted_s(self, plan: Plan, workload: Workload) -> float:
        return self.alone.splits.predict(plan, workload)[0]
