"""Faults of levers and of runs: tiles, recompute, shared words, the host (``fault_table.py``)."""

from __future__ import annotations

from fault import Fault

LEVERS = "tests/strategies/test_levers.py::"
VOCABULARY = ("tests/strategies/test_vocabulary.py::test_some_losses",)
LOOK_UP = ("tests/strategies/test_look_up.py",)

RUNS = "tests/runtime/test_runs.py::"

CHUNKS = "paradyse/strategies/attention/in_chunks.py"
IN_CHUNKS = ("tests/strategies/test_in_chunks.py",)

SPLIT, WORDS, TABLE = (
    f"paradyse/strategies/{name}.py" for name in ("split_losses", "vocabulary", "look_up")
)

LEVER_FAULTS: tuple[Fault, ...] = (
    Fault(
        "rows of every tile put at the start",
        "paradyse/strategies/tiles.py",
        "return apart.narrow(at, self.start, self.num_tokens)",
        "return apart.narrow(at, 0, self.num_tokens)",
        ("tests/strategies/test_tiles.py",),
    ),
    Fault(
        "gradients of weights from the last tile alone",
        "paradyse/strategies/tiles.py",
        "total.add_(part)",
        "total.copy_(part)",
        ("tests/strategies/test_tiles.py",),
    ),
    Fault(
        "dropout in a tile as in a sequence of its length",
        "paradyse/strategies/dropout.py",
        "digit, num = positions, info[0]",
        "digit, num = positions, positions.shape[0]",
        (f"{LEVERS}test_dropout_is_that_of_the_whole_sequence",),
    ),
    Fault(
        "attention computed again where its output is kept",
        "paradyse/strategies/levers.py",
        "return replayed(op, (out.transpose(1, 2), lse), *args)",
        "return op(*args)",
        (f"{LEVERS}test_what_is_kept_and_what_is_computed_again",),
    ),
    Fault("labels picked of other ranks", SPLIT, ".masked_fill(~here, 0)", "", VOCABULARY),
    Fault("sums without maxima", SPLIT, "((tops - top).exp() * sums)", "sums", VOCABULARY),
    Fault(
        "first words everywhere", WORDS, "num_words).runs[axis.rank]", "num_words).runs[0]", LOOK_UP
    ),
    Fault("padding row with a gradient", TABLE, "here & (words != self.padding)", "here", LOOK_UP),
    Fault(
        "a lever of the plan that nothing pulls",
        "paradyse/runtime/frame.py",
        "if point.recomputes and torch.is_grad_enabled():",
        "if False:",
        ("tests/runtime/test_limited_memory.py", "tests/strategies/test_recompute.py"),
    ),
    Fault(
        "an input kept that the block before makes again",
        "paradyse/runtime/remake.py",
        "is_input = saved.shape == shape and storage_key(saved) == mine",
        "is_input = False",
        ("tests/runtime/test_remake.py",),
    ),
    Fault(
        "what an attention keeps while it runs again forgotten behind it",
        "paradyse/planning/costs.py",
        "workspace_bytes=cost.workspace_bytes + again,",
        "workspace_bytes=cost.workspace_bytes,",
        ("tests/planning/test_solver.py",),
    ),
    Fault(
        "levers of a long sequence kept for short ones",
        "paradyse/planning/planner.py",
        'or any(("+" in a) > ("+" in b) for a, b in zip(old, fastest))',
        "or False",
        ("tests/planning/test_points.py",),
    ),
    Fault(
        "blocks chosen by counts while their workspace still matters",
        "paradyse/planning/solver.py",
        "if held[0] >= left + most + self.short[i]:",
        "if True:",
        ("tests/planning/test_solver.py",),
    ),
    Fault(
        "more kept on the host than it has",
        "paradyse/planning/solver.py",
        "if plan is None or self.host_bytes(plan) <= self.host_limit:",
        "if True:",
        ("tests/planning/test_host_limit.py",),
    ),
    Fault(
        "what is kept on the host stays on the device too",
        "paradyse/runtime/offload.py",
        "self._wait, self._memory = nothing, None",
        "self._wait = nothing",
        ("tests/runtime/test_offload.py",),
    ),
    Fault(
        "memory of another tensor back from the host",
        "paradyse/runtime/offload.py",
        "return self.host.places(self._pages, self._starts[index], memory)",
        "return self.host.places(self._pages, self._starts[0], memory)",
        ("tests/runtime/test_offload.py",),
    ),
    Fault(
        "pages of the host never given back",
        "paradyse/runtime/offload.py",
        "        self.host.give(self._pages)\n",
        "",
        ("tests/runtime/test_offload.py",),
    ),
    Fault(
        "gradients of keys from the last chunk of queries alone",
        CHUNKS,
        "former[i].get().add_(rows) if former else rows",
        "rows",
        IN_CHUNKS,
    ),
    Fault(
        "chunks in a window not fetched",
        "kernels/attention_mask.py",
        "k1 < q0 - left",
        "k1 < q0",
        IN_CHUNKS,
    ),
    Fault(
        "second halves of a tile in the order of ranks",
        "paradyse/strategies/attention/chunked_call.py",
        "for r in reversed(range(p))]",
        "for r in range(p)]",
        ("tests/strategies/test_chunked.py::test_dropout_is_that_of_the_whole_sequence",),
    ),
    Fault(
        "rows on the host as long as the graph",
        "paradyse/strategies/chunked.py",
        "ctx.save_for_backward(*tensors, _carry(kept))",
        "ctx.kept = kept; ctx.save_for_backward(*tensors, _carry(kept))",
        (
            "tests/strategies/test_chunked.py::test_the_host_keeps_what_backward_needs_and_nothing_after_it",
        ),
    ),
    Fault(
        "a run whose blocks all have the first one's seed and place",
        "paradyse/strategies/fused.py",
        "own += step.common[3:]",
        "own += steps[0].common[3:]",
        (f"{RUNS}test_dropout_and_values_of_the_inside_are_those_of_single_blocks",),
    ),
    Fault(
        "what a run gives is what its last block gives",
        "paradyse/runtime/runs.py",
        "for m in members.values() for n in m.outputs if n not in freed]",
        "for m in list(members.values())[-1:] for n in m.outputs]",
        (f"{RUNS}test_dropout_and_values_of_the_inside_are_those_of_single_blocks",),
    ),
    Fault(
        "one run under two strategies",
        "paradyse/runtime/runs.py",
        "same = all(strategy == strategies[step.index] for strategy in alike)",
        "same = True",
        (f"{RUNS}test_ranks_agree_with_one_process",),
    ),
    Fault(
        "levers forgotten in a run",
        "paradyse/runtime/runs.py",
        "if Point.parse(strategies[step.index]).levers:",
        "if False:",
        (f"{RUNS}test_ranks_agree_with_one_process",),
    ),
    Fault(
        "a window taken for a causal mask",
        "paradyse/strategies/fused.py",
        "unread != plain or call.right > 0",
        "call.right > 0",
        ("tests/strategies/test_fused.py",),
    ),
    Fault(
        "autocast inside a model is passed over",
        "passes/retrace.py",
        "if n.target is AUTOCAST_ENTER:",
        "if n.target is None:",
        (
            "tests/passes/test_retrace.py::test_autocast_is_switched_where_the_model_does[False-True-False]",
        ),
    ),
)
