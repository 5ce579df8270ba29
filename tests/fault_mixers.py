"""Faults of models without attention: what the sequence is, what is split behind a gather, and by
which dim ranks share what mixes tokens."""

from __future__ import annotations

from fault import Fault

REGIONS = "tests/passes/test_mixing_regions.py::test_what_is_mixed_too_or_lost_is_no_such_dim"
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
    Fault(
        "a dim that is mixed inside taken for one that ranks can share",
        "paradyse/graph/switches.py",
        "if factor in names.mixed(node) or max(",
        "if max(",
        (f"{REGIONS}[norm over channels inside]",),
    ),
    Fault(
        "weights of all channels computed from those of some",
        "passes/mixing_regions.py",
        "closed = [*nodes, *_from_weights(nodes)]",
        "closed = nodes",
        (f"{REGIONS}[weights of all channels]",),
    ),
    Fault(
        "channels of a convolution counted for all ranks",
        "paradyse/graph/subgraph.py",
        "return (*args[:6], size(names.of(args[0])[1]))",
        "return args",
        ("tests/graph/test_rules.py::test_what_a_rule_claims_to_be_splittable_is[conv1d]",),
    ),
    Fault(
        "tokens that are there twice are as many each time",
        "passes/mixing_regions.py",
        "return times(dims, seq) > 0 and any(is_shifted(f, seq) for d in dims for f in d)",
        "return False",
        ("tests/test_own_models.py::test_loss_and_gradients_are_those_of_the_model[one key more]",),
    ),
    Fault(
        "products of vectors have no rule",
        "paradyse/graph/vector_rules.py",
        '    "x[i], y[j] -> [i, j]": aten.outer.default,\n',
        "",
        ("tests/graph/test_vector_rules.py::test_tokens_stay_with_their_ranks[rotated]",),
    ),
    Fault(
        "norms have no rule",
        "paradyse/graph/vector_rules.py",
        'rule(*overloads("linalg_vector_norm norm.ScalarOpt_dim nanmean nansum"))(reduction)\n',
        "",
        ("tests/graph/test_vector_rules.py::test_tokens_stay_with_their_ranks[normalize]",),
    ),
)
