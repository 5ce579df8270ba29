"""Faults of models without attention: what the sequence is, and what is split behind a gather."""

from __future__ import annotations

from fault import Fault

LOOKED_UP = "tests/passes/test_looked_up.py::"

MIXER_FAULTS: tuple[Fault, ...] = (
    Fault(
        "the batch of token ids taken for the sequence",
        "passes/looked_up.py",
        "*batches, dim = names.of(ids)",
        "dim, *batches = names.of(ids)",
        (f"{LOOKED_UP}test_batch_and_sequence_are_those_of_token_ids",),
    ),
    Fault(
        "chunks taken for the sequence",
        "paradyse/graph/infer.py",
        "factor.whole = True",
        "pass",
        (f"{LOOKED_UP}test_a_sequence_that_views_cut_into_chunks_stays_one_dim",),
    ),
    Fault(
        "what is read by an operator that mixes tokens split again ahead of it",
        "passes/place_tokens.py",
        "if all(found.get(u, ctx.split.get(u)) is along for u in users):",
        "if True:",
        (f"{LOOKED_UP}test_what_mixes_tokens_once_more_has_them_gathered_once",),
    ),
)
