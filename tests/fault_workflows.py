"""Faults of what people do with sharded parameters, of accelerate's loop, of what calls tell."""

from __future__ import annotations

from fault import Fault

OPERATORS = "tests/weights/test_whole_operators.py::"
VERSIONS = "tests/weights/test_versions.py::"
TRIALS = "tests/profiling/test_trials.py::"
REDUCTIONS = "paradyse/weights/reductions.py"
REDUCED = ("tests/weights/test_reductions.py::test_they_are_those_of_the_whole_tensor",)

FAILED_PLANS = "tests/distributed/test_failed_plans.py::"

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
        "gradients that were kept back come in tensors of their own",
        "paradyse/weights/no_sync.py",
        "w.grad = grad if part.place is None else part.place.copy_(grad)",
        "w.grad = grad",
        (
            "tests/weights/test_no_sync.py::"
            "test_gradients_arrive_in_the_tensors_that_stood_there[False]",
        ),
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
        "into_others = any(not _lies_as(x, like) for x in into)",
        "into_others = False",
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
        "self.calls.get(turn) if turn >= WARM_UP * len(self.plans) else None",
        "self.calls.get(turn)",
        (f"{TRIALS}test_the_first_rounds_are_not_counted",),
    ),
    Fault(
        "a part of a step is compared as if it were one",
        "paradyse/profiling/trials.py",
        "call is not None and call.follows else None",
        "call is not None else None",
        (f"{TRIALS}test_calls_that_are_parts_of_a_step_say_nothing",),
    ),
    Fault(
        "blocks run together under one of the plans that are compared",
        "paradyse/choice.py",
        "            return self.trials.together\n",
        "            return together\n",
        (f"{TRIALS}test_ranks_try_the_same_and_go_on_by_the_same",),
    ),
    Fault(
        "replicas' waits for each other are compared",
        "paradyse/choice.py",
        "options.plan == AUTO and num_replicas == 1",
        "options.plan == AUTO",
        (
            "tests/distributed/test_replicas.py::test_no_plans_are_tried_where_steps_wait_for_other_replicas",
        ),
    ),
    Fault(
        "ranks count on after a call that some of them have counted",
        "paradyse/planned_program.py",
        "            self.choice.settle()\n            tried.append",
        "            tried.append",
        ("tests/distributed/test_asymmetric_ranks.py::test_ranks_go_on_choosing_the_same_plans",),
    ),
    Fault(
        "different weights are told of once",
        "paradyse/distributed/compared.py",
        "            self._weights.clear()\n",
        "",
        (
            "tests/distributed/test_asymmetric_ranks.py::test_different_weights_are_told_of_until_they_are_equal",
        ),
    ),
    Fault(
        "out of memory in backward counts for the latest call",
        "paradyse/distributed/agreement.py",
        "(call := self._of_axis.calls.get(name)) is not None",
        "(call := self._of_axis.call) is not None",
        (
            "tests/distributed/test_calls.py::test_the_call_whose_backward_ran_out_of_memory_has_another_plan",
        ),
    ),
    Fault(
        "gradients zeroed in place are forgotten",
        "paradyse/weights/no_sync.py",
        "if not inside and not waiting:",
        "if not inside and not any(w.grad.num_parts for w in waiting):",
        ("tests/weights/test_no_sync.py::test_cleared_gradients_are_gone_and_others_stay",),
    ),
    Fault(
        "pages of an evaluation cannot be written to",
        "paradyse/strategies/host_memory.py",
        "with torch.inference_mode(False):",
        "if True:",
        (
            "tests/strategies/test_host_memory.py::test_pages_that_an_evaluation_made_are_written_to_in_training",
        ),
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
        "self._first_says(trial.seen_ns())",
        "trial.seen_ns()",
        (f"{TRIALS}test_ranks_try_the_same_and_go_on_by_the_same",),
    ),
    Fault(
        "trials of other days are compared as they are",
        "paradyse/planning/tried.py",
        "plan: link * ratio for",
        "plan: ratio for",
        ("tests/planning/test_tried.py",),
    ),
    Fault(
        "backward gathers what weights have become",
        "paradyse/weights/versions.py",
        "version_of(self.tensor) != self.version",
        "False",
        (f"{VERSIONS}test_a_backward_with_other_weights_is_an_error[megatron_cz]",),
    ),
    Fault(
        "a view of a sharded weight is of another shape",
        "paradyse/weights/sharded_tensor.py",
        "isinstance(args[0], cls) and [*args[1]] == [*args[0].shape]",
        "False",
        ("tests/weights/test_shard_training.py::test_hooks_find_where_gradients_arrive",),
    ),
    Fault(
        "a graph that every rank computes writes into copies of weights",
        "paradyse/backend.py",
        "            if writes:",
        "            if False:",
        (
            "tests/runtime/test_weight_writes.py::"
            "test_weights_that_a_graph_on_every_rank_writes[FollowsByData-True]",
        ),
    ),
    Fault(
        "weights of a graph that every rank computes are gone before another backward",
        "paradyse/backend.py",
        "gathered.stays = True",
        "pass",
        ("tests/runtime/test_computed_whole.py::test_backward_of_a_whole_graph_again",),
    ),
    Fault(
        "hooks for checkpoints end the graph",
        "paradyse/torch_private.py",
        "is_hook = x.source is None and",
        "is_hook = False and",
        (
            "tests/strategies/test_recompute.py::"
            "test_checkpointing_with_a_frozen_embedding[2-True-aot_eager]",
        ),
    ),
    Fault(
        "what runs again reads what weights have become",
        "paradyse/runtime/frame.py",
        "                    weight.again()",
        "                    weight.tensor",
        (f"{VERSIONS}test_what_backward_reads_again_may_not_change[recompute-True]",),
    ),
    Fault(
        "what runs again reads what inputs have become",
        "paradyse/runtime/offload.py",
        "return known.again() if isinstance(known, Read) else known",
        "return known.tensor if isinstance(known, Read) else known",
        (
            f"{VERSIONS}test_no_other_tensor_may_change_where_a_block_reads_it_again[recompute-given]",
        ),
    ),
    Fault(
        "what stays on the device is not looked at",
        "paradyse/runtime/offload.py",
        "kept.get() if isinstance(kept, Moved) else kept.again()",
        "kept.get() if isinstance(kept, Moved) else kept.tensor",
        (f"{VERSIONS}test_what_backward_reads_again_may_not_change[offload-False]",),
    ),
    Fault(
        "weights beside an input that is made again are not looked at",
        "paradyse/runtime/remake.py",
        "if kept is node else kept.again()",
        "if kept is node else kept.tensor",
        (f"{VERSIONS}test_what_backward_reads_again_may_not_change[recompute and tiled-False]",),
    ),
    Fault(
        "what is saved while memory is measured is not looked at",
        "paradyse/runtime/saved_memory.py",
        "hooks(pack, Read.again)",
        "hooks(pack, lambda kept: kept.tensor)",
        (f"{VERSIONS}test_what_is_saved_while_memory_is_measured_may_not_change",),
    ),
    Fault(
        "writes to rows are not counted",
        "paradyse/weights/versions.py",
        "increment_version([*shards, *(x.local for x in shards)])",
        "increment_version(shards)",
        (f"{VERSIONS}test_a_backward_with_other_weights_is_an_error[megatron_ts]",),
    ),
    Fault(
        "what is logged once ends the graph",
        "paradyse/torch_private.py",
        'name == "warning_once" and all(',
        'name == "never" and all(',
        (
            "tests/test_torch_private.py::"
            "test_it_is_there_and_does_what_we_rely_on[pass_over_warnings_once]",
        ),
    ),
    Fault(
        "sparse gradients are added up as they are",
        "paradyse/weights/shard_comm.py",
        "g if g is None or g.layout is strided else g.to_dense()",
        "g",
        (
            "tests/weights/test_shard_training.py::test_tables_of_sparse_gradients[sharded-ulysses_z]",
        ),
    ),
    Fault(
        "what load_safetensors writes is not counted",
        "paradyse/checkpoint/load_safetensors.py",
        "            count_write([target])\n",
        "",
        (
            "tests/weights/test_versions.py::test_a_backward_with_other_weights_is_an_error[megatron_cz]",
        ),
    ),
    Fault(
        "what load_checkpoint writes is not counted",
        "paradyse/checkpoint/storage.py",
        "    count_write(entries.values())\n",
        "",
        (
            "tests/weights/test_versions.py::test_a_backward_with_other_weights_is_an_error[megatron_cz]",
        ),
    ),
    Fault(
        "variances are rounded before the root",
        "paradyse/weights/reductions.py",
        "    return var, mean\n",
        "    return var.to(x.dtype), mean\n",
        ("tests/weights/test_reductions.py::test_deviations_of_16_bits_are_rounded_once",),
    ),
    Fault(
        "costs are known by the names of blocks",
        "paradyse/planning/measured.py",
        "key = block.structure, block.priced_by, strategy, workload",
        "key = block.name, strategy, workload",
        ("tests/planning/test_measured.py::test_blocks_of_two_models_that_have_one_name",),
    ),
    Fault(
        "groups that are gone are listened for",
        "paradyse/distributed/agreement.py",
        "            of_all.session.at_end.append(partial(watchers.remove, listen))\n",
        "",
        ("tests/distributed/test_agreement.py::test_nothing_listens_for_groups_that_are_gone",),
    ),
    Fault(
        "every value of a number keeps its program",
        "paradyse/backend.py",
        "self.graphs: Recent[tuple[Any, ...], PlannedProgram] = Recent()",
        "self.graphs: dict[tuple[Any, ...], PlannedProgram] = {}",
        ("tests/runtime/test_graph_limit.py::test_numbers_that_vary_are_told_of_and_forgotten",),
    ),
    Fault(
        "hooks that collect are hung by the model itself",
        "paradyse/torch_private.py",
        '"__name__", "") == "maybe_install_capturing_hooks"',
        '"__name__", "") == "never"',
        (
            "tests/test_torch_private.py::test_it_is_there_and_does_what_we_rely_on[hang_collecting_hooks]",
        ),
    ),
    Fault(
        "guards of sizes that were found to be others are passed over",
        "paradyse/runtime/trace_sizes.py",
        "found = [env.replace(g.expr) for g in env.guards]",
        "found = [g.expr for g in env.guards]",
        ("tests/runtime/test_capture.py::test_batch_and_length_that_both_change",),
    ),
    Fault(
        "gradients that a model asks for end the graph",
        "paradyse/torch_private.py",
        'startswith("transformers.")',
        'startswith("nowhere.")',
        (
            "tests/test_torch_private.py::test_it_is_there_and_does_what_we_rely_on[pass_over_required_gradients]",
        ),
    ),
    Fault(
        "lengths are read of dims that are exactly as long",
        "paradyse/runtime/capture.py",
        "                    related.setdefault(origin, (i, d, -more))\n",
        "",
        ("tests/runtime/test_capture.py::test_one_program_for_all_lengths_and_batches[shortened]",),
    ),
    Fault(
        "repeats of one element are numbers",
        "passes/retrace.py",
        "_SPELT_OUT = {aten.repeat.default: _repeated}",
        "_SPELT_OUT = {}",
        ("tests/runtime/test_capture.py::test_one_program_for_all_lengths_and_batches[repeated]",),
    ),
    Fault(
        "what is to be known of a graph is not explained",
        "paradyse/reports.py",
        "notes = capture.notes_of(program.ctx.notes)",
        "notes = program.ctx.notes",
        (
            "tests/test_own_models.py::test_a_program_for_each_length_is_explained_whichever_ran_last",
        ),
    ),
    Fault(
        "a graph of a rank's own has it compare weights anew",
        "paradyse/backend.py",
        "not compared.has(program, self.weights.held()):",
        "True:",
        (
            "tests/distributed/test_compared.py::test_groups_whose_ranks_make_graphs_at_different_calls",
        ),
    ),
    Fault(
        "replicas may send other messages than each other",
        "paradyse/planned_program.py",
        "gradient_order(program) != gradient_order(self.program):",
        "False:",
        (
            "tests/runtime/test_joined.py::test_a_split_whose_messages_other_replicas_may_not_send_is_refused",
        ),
    ),
    Fault(
        "a profile that was measured anew is not read",
        "paradyse/choice.py",
        "_content_of(options.cost_model)\n",
        "0\n",
        ("tests/test_choice.py::test_a_profile_that_was_measured_anew_is_read_anew",),
    ),
    Fault(
        "a rank that has no plan leaves the others waiting",
        "paradyse/choice.py",
        "except Exception as e:  # the others wait",
        "except ValueError as e:  # the others wait",
        ("tests/test_choice.py::test_a_rank_without_memory_to_plan_takes_part_all_the_same",),
    ),
    Fault(
        "rates are measured where a rank that fails says that it has no plan",
        "paradyse/choice.py",
        "if self._is_measuring:",
        "if False:",
        (f"{FAILED_PLANS}test_one_rank_has_no_memory_to_measure_rates",),
    ),
    Fault(
        "plans of functions are compared within a replica alone",
        "paradyse/choice.py",
        "together = self.agreement.all_replicas_call",
        "together = False",
        (f"{FAILED_PLANS}test_a_function_that_plans_fails_on_one_rank_of_a_replica",),
    ),
    Fault(
        "a call begins after a comparison broke",
        "paradyse/distributed/agreement.py",
        "axes = (*self._axes, *(control.axis for control in some))",
        "axes = self._axes",
        (f"{FAILED_PLANS}test_no_call_begins_after_a_comparison_broke",),
    ),
    Fault(
        "messages of a backward that failed are waited for by the next",
        "paradyse/weights/no_sync.py",
        "self._backward, self._ends = backward, None",
        "self._backward = backward",
        (
            "tests/weights/test_no_sync.py::"
            "test_messages_of_a_backward_that_failed_are_not_waited_for_by_the_next",
        ),
    ),
)
