"""Faults of mixtures of experts (``fault_table.py``)."""

from __future__ import annotations

from fault import Fault

EXPERTS = "tests/strategies/test_experts.py::"
DOUBLE = (f"{EXPERTS}test_mixtral_in_double_precision[2-5-2-True]",)
MOVED = (f"{EXPERTS}test_one_expert_has_all_tokens_and_others_none[2-True-4]",)

EXPERT_FAULTS: tuple[Fault, ...] = (
    Fault(
        "rows of an expert without any get another's weight",
        "kernels/expert_rows.py",
        "torch.searchsorted(in_order, experts, right=True)",
        "torch.searchsorted(in_order, experts)",
        ("tests/kernels/test_expert_rows.py::test_order_and_way_back",),
    ),
    Fault(
        "a token's gradient from one of its experts alone",
        "kernels/expert_rows.py",
        "rows.view(-1, ctx.repeats, *grad.shape[1:]).sum(1)",
        "rows.view(-1, ctx.repeats, *grad.shape[1:])[:, 0]",
        (
            "tests/kernels/test_expert_rows.py::"
            "test_rows_that_are_taken_several_times_get_the_sum_of_gradients",
        ),
    ),
    Fault(
        "ranks sort their own rows though something sees the order",
        "passes/expert_regions.py",
        "if a not in inside and seq in names.factors(a):",
        "if False:",
        (
            "tests/passes/test_expert_regions.py::"
            "test_where_the_order_is_seen_all_is_computed_on_gathered_tokens",
        ),
    ),
    Fault(
        "bins that are no experts counted as experts",
        "passes/fold_experts.py",
        "if (bins, least, most) != (shape[0], 0, shape[0] - 1):",
        "if (bins, least) != (shape[0], 0):",
        ("tests/passes/test_fold_experts.py",),
    ),
    Fault(
        "rows sent back to the ranks that they were for",
        "paradyse/strategies/experts/exchange.py",
        "counts = tuple(zip(*dealing.counts)) if back else dealing.counts",
        "counts = dealing.counts",
        DOUBLE,
    ),
    Fault(
        "rows that came taken for sorted",
        "paradyse/strategies/experts/exchange.py",
        "torch.ops.paradyse.take_rows(came, self.order, self.inverse, 1)",
        "torch.ops.paradyse.take_rows(came, self.inverse, self.inverse, 1)",
        DOUBLE,
    ),
    Fault(
        "a bias by the expert's number in the whole model",
        "paradyse/strategies/experts/model.py",
        "factors = {d[0] for d in dims}",
        "factors = set(names.of(ends)[0])",
        MOVED,
    ),
    Fault(
        "gradients of a group's rows put at the first rows",
        "paradyse/strategies/experts/streamed.py",
        "of_rows[i][at] = g[:num]",
        "of_rows[i][:num] = g[:num]",
        DOUBLE,
    ),
    Fault(
        "messages between ranks go ways that depend on the rank's own rows",
        "paradyse/distributed/collectives.py",
        "most = max(map(max, counts)) * width",
        "most = max(*leave, *arrive)",
        ("tests/distributed/test_collectives.py::test_rows_of_any_number",),
    ),
)
