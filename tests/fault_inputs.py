"""Faults of what finds batch, sequence and blocks in any input (``fault_table.py``)."""

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
        "keys of another sequence laid out as queries are",
        "paradyse/strategies/attention/method.py",
        "self.axis.layout(self.spec.num_queries), self.axis.layout(self.spec.seq_len)",
        "(self.axis.layout(self.spec.num_queries),) * 2",
        ("tests/strategies/test_attention_ranks.py::test_equal_to_one_rank[2-across]",),
    ),
    Fault(
        "gradient of tokens that each rank reads not summed",
        "paradyse/distributed/tokens.py",
        "        if summed:",
        "        if False:",
        ("tests/distributed/test_tokens.py::test_values_and_gradients[7]",),
    ),
    Fault(
        "a plan for other lengths of the other sequences",
        "paradyse/runtime/guard.py",
        "self._known.get(workload)",
        "next((p for w, p in self._known.items() if w.seq_len == workload.seq_len), None)",
        ("tests/runtime/test_guard.py",),
    ),
    Fault(
        "values of the encoder taken for the decoder's tokens",
        "paradyse/runtime/frame.py",
        "if layout == SPLIT and along in (step.seq, step.keys):",
        "if layout == SPLIT:",
        ("tests/runtime/test_two_sequences.py::test_what_reads_both_outside_blocks",),
    ),
    Fault(
        "programs of other fixed sizes taken for one",
        "paradyse/runtime/capture.py",
        "[n if isinstance(n, int) else n[2] for n in find_sizes(program).values()]",
        "[]",
        (
            "tests/runtime/test_capture.py::"
            "test_a_length_that_no_input_shows_is_not_taken_for_that_of_all_calls",
        ),
    ),
    Fault(
        "the first of several sequences depends on lengths",
        "passes/name_dims.py",
        'n.args[1].meta["val"].numel()',
        'n.meta["val"].numel()',
        ("tests/passes/test_name_dims.py",),
    ),
    Fault(
        "what makes a latent taken for a projection into heads",
        "passes/outline_blocks.py",
        "        if not latent:\n",
        "        if True:\n",
        (
            "tests/passes/test_outline_blocks.py::"
            "test_what_makes_a_latent_is_ahead_of_the_projections",
        ),
    ),
    Fault(
        "floats are compared with infinity by their difference",
        "passes/mask_values.py",
        "            same = eq0(sub(a, b)) if whole else _equals(a, b)",
        "            same = eq0(sub(a, b))",
        ("tests/passes/test_mask_values.py::test_formula[floats that are seen]",),
    ),
    Fault(
        "a logsumexp over tokens and words is taken over the words first",
        "passes/stage_sums.py",
        "    aten.mean.dim: aten.mean.dim,\n",
        "    aten.mean.dim: aten.mean.dim,\n    aten.logsumexp.default: aten.logsumexp.default,\n",
        ("tests/passes/test_stage_sums.py::test_sums_over_words_or_tokens_alone_stay",),
    ),
    Fault(
        "convolutions under autocast have inputs of several dtypes",
        "passes/retrace.py",
        "    aten.conv1d.default,\n    aten.conv1d.padding,\n",
        "",
        (
            "tests/test_autocast_convolutions.py::test_the_casts_of_convolutions_are_in_the_graph[Conv1d]",
        ),
    ),
    Fault(
        "a buffer that no mask is read from may not change",
        "paradyse/runtime/known_buffers.py",
        "            if not self._uses[i]:",
        "            if False:",
        (
            "tests/runtime/test_known_buffers.py::test_a_buffer_that_no_mask_is_read_from_may_change",
        ),
    ),
    Fault(
        "an input without elements is taken for an empty batch",
        "paradyse/runtime/capture.py",
        "all(0 in e.shape for _, e in data if e.ndim > 1)",
        "True",
        ("tests/runtime/test_capture.py::test_an_input_without_elements_beside_others",),
    ),
    Fault(
        "logits that are minus infinity where they were cut off",
        "passes/pad_labels.py",
        "or not rows_are_finite(cut.args[0], whole[1])",
        "or False",
        ("tests/passes/test_pad_labels.py::test_what_is_not_understood_stays",),
    ),
    Fault(
        "logarithms of what a loss had cut off",
        "passes/pad_labels.py",
        "any(map(steep_inputs, logits))",
        "False",
        ("tests/passes/test_pad_labels.py::test_what_is_not_understood_stays",),
    ),
    Fault(
        "rows that are infinite read with no gradient",
        "passes/cut_later.py",
        "and _is_cut(n) and _is_finite_whole(n)]",
        "and _is_cut(n)]",
        ("tests/passes/test_cut_later.py::test_others_stay",),
    ),
    Fault(
        "an infinite number less itself",
        "passes/own_gradients.py",
        "(x - constant).nan_to_num()",
        "(x - constant)",
        ("tests/passes/test_own_gradients.py",),
    ),
    Fault(
        "bytes of whole numbers counted as numbers",
        "paradyse/distributed/crossing.py",
        "[n * x.itemsize for n in ns]",
        "[n for n in ns]",
        ("tests/distributed/test_collectives.py::test_values_of_any_dtype_travel",),
    ),
)
