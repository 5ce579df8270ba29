"""Faults of what finds batch and sequence in any input (``fault_table.py``)."""

from __future__ import annotations

from fault import Fault

INPUT_FAULTS: tuple[Fault, ...] = (
    Fault(
        "views show what was there before a write",
        "passes/remove_mutation.py",
        "if made < now:",
        "if made < now - 1:",
        ("tests/passes/test_remove_mutation.py",),
    ),
    Fault(
        "queries of causal attention counted from each rank's first",
        "paradyse/graph/layer_rules.py",
        "names.mix(node, dims[-2])",
        "pass",
        ("tests/graph/test_rules.py",),
    ),
    Fault(
        "position embeddings whole beside split tokens",
        "passes/place_tokens.py",
        "    _read_tables_by_position(gm, ctx)\n    _place_all",
        "    _place_all",
        ("tests/passes/test_place_tokens.py",),
    ),
    Fault(
        "programs of other fixed sizes taken for one",
        "paradyse/runtime/capture.py",
        "[n for n in find_sizes(program).values() if isinstance(n, int)]",
        "[]",
        (
            "tests/runtime/test_capture.py::"
            "test_a_length_that_no_input_shows_is_not_taken_for_that_of_all_calls",
        ),
    ),
)
