"""Faults of what is foreseen, measured beforehand and reported."""

from __future__ import annotations

from fault import Fault

CHOICE, MEASURE = "tests/test_choice.py", "tests/profiling/test_measure.py"
MEASURED = "tests/planning/test_few_measurements.py"
STATIC = "tests/offline/test_static_on_paper.py"
GUARD = "tests/runtime/test_guard.py"

FORECAST_FAULTS: tuple[Fault, ...] = (
    Fault(
        "plans count with what the first rank holds",
        "paradyse/choice.py",
        'agreement.most_of("says what it holds", mine)',
        "mine",
        (f"{CHOICE}::test_plans_count_with_what_the_rank_holds_that_holds_most",),
    ),
    Fault(
        "evaluation counts gradients and optimizer state",
        "paradyse/planning/planner.py",
        "held = self.static_bytes - self.idle_bytes * (not workload.training)",
        "held = self.static_bytes",
        (f"{CHOICE}::test_a_model_that_is_not_trained_fits_where_its_weights_do",),
    ),
    Fault(
        "one rank plans with what its optimizer might hold",
        "paradyse/choice.py",
        "if self.blocks and may_choose and not in_group:",
        "if axis.size > 1 and self.blocks and may_choose and not in_group:",
        (f"{CHOICE}::test_one_rank_counts_what_its_optimizer_holds_and_evaluation_weights_alone",),
    ),
    Fault(
        "what is tried where nothing fits passes over the host's limit",
        "paradyse/planning/nothing_fits.py",
        "if choices.host_bytes(points) <= choices.host_limit:",
        "if choices.host_limit:",
        ("tests/planning/test_host_limit.py",),
    ),
    Fault(
        "no batch is split where the sequence does not fit",
        "paradyse/planning/splits.py",
        "if wanted == AUTO and not fixed else None",
        "if wanted is None else None",
        ("tests/planning/test_splits.py",),
    ),
    Fault(
        "plans along another dim need nothing beside blocks",
        "paradyse/planning/planner.py",
        "made = replace(made, measured_beside=lambda own: self.beside(as_here(own)))",
        "made = replace(made)",
        ("tests/planning/test_splits.py::test_the_memory_of_the_rest_is_there_whatever_is_split",),
    ),
    Fault(
        "keys are as many as queries where a profile is read",
        "paradyse/planning/measured.py",
        "if workload.key_len not in (None, workload.seq_len):",
        "if False:",
        (f"{MEASURED}::test_keys_may_be_longer_or_shorter_than_where_they_were_measured",),
    ),
    Fault(
        "a split that cannot be is an error of the call",
        "paradyse/runtime/capture.py",
        'replace(options, dump=None, on_unsupported="gather")',
        "replace(options, dump=None)",
        ("tests/test_split_along_batch.py::test_what_mixes_the_batch_is_a_reason_and_no_error",),
    ),
    Fault(
        "gradients that a call makes count as workspace",
        "paradyse/profiling/marks.py",
        "peaks[i] - new_bytes * (i > turn)",
        "peaks[i]",
        ("tests/profiling/test_online.py::test_gradients_that_a_call_makes_are_static_alone",),
    ),
    Fault(
        "gradients that blocks hand on are held by none",
        "paradyse/profiling/marks.py",
        "due[s.block] + behind[s.block] + new_bytes",
        "held[s.first]",
        ("tests/profiling/test_marks.py", "tests/profiling/test_steps.py"),
    ),
    Fault(
        "a message of gradients keeps the values of its block",
        "paradyse/strategies/weight_stream.py",
        "partial(self.stream.gradients, group, index, own)",
        "lambda flat, of=self: of.stream.gradients(group, index, own, flat)",
        (
            "tests/strategies/test_weight_stream.py::"
            "test_the_last_group_s_gradients_are_under_way_behind_the_block",
        ),
    ),
    Fault(
        "weights on the host leave blocks all of it on paper",
        "paradyse/offline/outlook.py",
        "left = None if host is None else host - run.on_host_bytes",
        "left = host",
        ("tests/offline/test_dry_run.py::test_weights_on_the_host_leave_less_of_it_to_blocks",),
    ),
    Fault(
        "frozen weights have gradients on paper",
        "paradyse/offline/dry_run.py",
        "return 1 + (1 + MOMENTS) * is_trained",
        "return 2 + MOMENTS",
        (STATIC,),
    ),
    Fault(
        "on paper the first of several graphs is the model",
        "paradyse/offline/capture.py",
        "dynamic=True, fullgraph=True)",
        "dynamic=True)",
        ("tests/offline/test_capture_on_paper.py::test_a_model_of_several_graphs_is_no_program",),
    ),
    Fault(
        "of several graphs the first call of a length is told",
        "paradyse/reports.py",
        "    used.sort(key=lambda call: call[0])",
        "    used.reverse()",
        (GUARD,),
    ),
    Fault(
        "the plan of a length is that of its first call",
        "paradyse/runtime/guard.py",
        "        self.used[workload.seq_len] = next(_numbers), plan",
        "        self.used.setdefault(workload.seq_len, (next(_numbers), plan))",
        (GUARD,),
    ),
    Fault(
        "--layers leaves decoders as they are",
        "paradyse/cli/models.py",
        '    "decoder_layers",\n',
        "",
        ("tests/cli/test_models.py",),
    ),
    Fault(
        "ranks may be silent for ten minutes, whatever --timeout says",
        "paradyse/cli/launch.py",
        "Setting(device, args.timeout, args.timeout, args.verbose, rate=rate)",
        "Setting(device, args.timeout, verbose=args.verbose, rate=rate)",
        ("tests/cli/test_launch.py::test_ranks_may_be_silent_as_long_as_the_timeout",),
    ),
    Fault(
        "under autocast plans count with weights' dtype",
        "paradyse/choice.py",
        "        self.dtype = computed_in or at_rest",
        "        self.dtype = at_rest",
        (
            "tests/planning/test_autocast_costs.py::"
            "test_plans_are_chosen_for_what_blocks_compute_in",
        ),
    ),
    Fault(
        "on paper whole weights come as wide under autocast as they lie",
        "paradyse/offline/dry_run.py",
        "        dtype = cast if cast is not None and comes and self.spread else like.dtype",
        "        dtype = like.dtype",
        (
            "tests/offline/test_autocast_on_paper.py::"
            "test_shards_are_gathered_as_blocks_read_them_and_whole_weights_are_copied",
        ),
    ),
)
