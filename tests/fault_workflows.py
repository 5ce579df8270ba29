"""Faults of what people do with sharded parameters, of accelerate's loop, of what calls tell."""

from __future__ import annotations

from fault import Fault

OPERATORS = "tests/weights/test_whole_operators.py::"
TRIALS = "tests/profiling/test_trials.py::"
REDUCTIONS = "paradyse/weights/reductions.py"
REDUCED = ("tests/weights/test_reductions.py::test_they_are_those_of_the_whole_tensor",)

WORKFLOW_FAULTS: tuple[Fault, ...] = (
    Fault(
        "spreads joined without the distance of means",
        REDUCTIONS,
        "+ ((means - mean).square() * counts).sum(0)",
        "",
        REDUCED,
    ),
    Fault(
        "the largest of no rows is zero",
        REDUCTIONS,
        "_limit(x.dtype, False), lambda e: e.amax(0)",
        "0, lambda e: e.amax(0)",
        REDUCED,
    ),
    Fault(
        "what is written through a view is lost",
        "paradyse/weights/whole_operators.py",
        "base.local.copy_(base.placement.take_own(wholes[id(base)]))",
        "pass",
        (f"{OPERATORS}test_what_is_written_is_written_to_the_rows",),
    ),
    Fault(
        "a whole tensor written to in this rank's rows alone",
        "paradyse/weights/sharded_tensor.py",
        "into_plain = kind.writes and writes_plain(func, args, kwargs)",
        "into_plain = False",
        (f"{OPERATORS}test_a_whole_tensor_that_is_written_to_is_written_whole",),
    ),
    Fault(
        "schedulers that step once for each rank",
        "paradyse/accelerator.py",
        "prepared.split_batches = True",
        "prepared.split_batches = False",
        ("tests/test_accelerator.py::test_everything_is_prepared[True]",),
    ),
    Fault(
        "switches counted against the first plan",
        "paradyse/profiling/step_reports.py",
        "self._plan = plan\n",
        "self._plan = self._plan or plan\n",
        ("tests/profiling/test_step_reports.py::test_calls_are_told_of_in_order",),
    ),
    Fault(
        "steps that compile are compared with others",
        "paradyse/profiling/trials.py",
        "turn >= WARM_UP * len(self.plans) and report.trained",
        "report.trained",
        (f"{TRIALS}test_the_first_rounds_are_not_counted",),
    ),
    Fault(
        "steps that are compared are watched",
        "paradyse/profiling/online.py",
        "if self._runs[plan] > WARM_UP and not self.pauses():",
        "if self._runs[plan] > WARM_UP:",
        (f"{TRIALS}test_ranks_try_the_same_and_go_on_by_the_same",),
    ),
    Fault(
        "each rank goes on by its own clock",
        "paradyse/profiling/trials.py",
        "seen = self._first_says([round(r.time_s * 1e9) if r else 0 for r in reports])",
        "seen = [round(r.time_s * 1e9) if r else 0 for r in reports]",
        (f"{TRIALS}test_ranks_try_the_same_and_go_on_by_the_same",),
    ),
    Fault(
        "trials of other days are compared as they are",
        "paradyse/planning/tried.py",
        "plan: link * ratio for",
        "plan: ratio for",
        ("tests/planning/test_tried.py",),
    ),
)
