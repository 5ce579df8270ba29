"""Faults of memory that values share, and of what ranks and runs share (``fault_table.py``)."""

from __future__ import annotations

from fault import Fault

LAYOUTS = "tests/test_own_layouts.py::test_models_are_as_without_the_backend"
GRADIENTS = "tests/weights/test_shared_gradients.py::test_each_weight_has_a_gradient_of_its_own"
REPLICAS = "tests/distributed/test_replicas.py::test_replicas_"
FROZEN = "another_weight_frozen-disagree on which weights are trained .*requires_grad-False"

SHARED_FAULTS: tuple[Fault, ...] = (
    Fault(
        "copies are dropped whose memory a view as complex numbers reads",
        "passes/simplify.py",
        "        same = not _is_read_as_it_lies(node)",
        "        same = True",
        (f"{LAYOUTS}[HalvesAsComplex]",),
    ),
    Fault(
        "any swap of three dims is taken for one of the last two",
        "passes/fold_attention.py",
        "_taken_together(x.args[0] if _swaps_last(x) else x)",
        "_taken_together(x.args[0] if x.target is aten.transpose.int else x)",
        (f"{LAYOUTS}[OneOfTokensFirst]",),
    ),
    Fault(
        "a dim between those of a bias is passed over",
        "passes/recover_masks.py",
        "            if args[1] % len(shape_of(mask)):",
        "            if False:",
        (f"{LAYOUTS}[BiasOfSequences]",),
    ),
    Fault(
        "who read a tensor that was viewed in place read it as it was",
        "passes/retrace.py",
        '        if n.op == "call_method" and n.target in _VIEWS_IN_PLACE:',
        "        if False:",
        ("tests/passes/test_retrace.py::test_views_in_place_are_views",),
    ),
    Fault(
        "rates are measured where one rank reads what was predicted",
        "paradyse/choice.py",
        "        is_known = workload.dtype in self._known_rates",
        "        is_known = self.planner.chooses",
        ("tests/profiling/test_step_reports.py::test_one_rank_alone_may_read_what_was_predicted",),
    ),
    Fault(
        "two sharded weights have one gradient's memory",
        "paradyse/weights/unshard.py",
        "like.with_rows(_for_one_weight(grad))",
        "like.with_rows(grad)",
        (f"{GRADIENTS}[rows]",),
    ),
    Fault(
        "two weights have the memory of one gradient that was kept back",
        "paradyse/weights/partial_gradient.py",
        "rest=_cast(grad, kept_dtype(weight)), place=place)",
        "rest=_cast(grad, kept_dtype(weight)), place=grad)",
        (f"{GRADIENTS}[kept back]",),
    ),
    Fault(
        "which weights are trained is not compared",
        "paradyse/planned_program.py",
        "            TRAINED: digest(trained),\n",
        "",
        (f"tests/distributed/test_asymmetric_ranks.py::test_two_ranks[{FROZEN}]",),
    ),
    Fault(
        "replicas do not compare where gradients come together",
        "paradyse/planned_program.py",
        "{JOINED: digest(joined)} if capture.replicas.size > 1 else {}",
        "{}",
        (f"{REPLICAS}train_the_same_weights",),
    ),
    Fault(
        "replicas of single ranks start from any weights",
        "paradyse/backend.py",
        "            self._agree_with_replicas(trains)\n            return None",
        "            return None",
        (f"{REPLICAS}of_single_ranks_start_from_the_same_weights",),
    ),
    Fault(
        "a checkpoint keeps the shards of another run",
        "paradyse/trainer.py",
        "output_dir is not None and self.args.should_save and not keeps:",
        "False:",
        ("tests/test_trainer.py::test_what_another_run_left_in_a_checkpoint_is_no_part_of_it",),
    ),
    Fault(
        "ranks do not wait for the one that writes a model",
        "paradyse/trainer.py",
        "        if _internal_call:\n            _wait_for_writer()\n",
        "",
        ("tests/test_trainer.py::test_a_save_may_take_longer_than_ranks_wait_in_a_call",),
    ),
    Fault(
        "sequences of another length than the first rank's are taken",
        "paradyse/mixed/batches.py",
        '                    if (here := len(read[indices[i]]["input_ids"])) != lengths[i]:',
        "                    if here := 0:",
        ("tests/mixed/test_training.py::test_ranks_have_the_same_sequences_in_the_same_order",),
    ),
    Fault(
        "frozen weights stay whole behind backward",
        "paradyse/weights/unshard.py",
        "            at_end_of_backward(gathered.free)",
        "            pass",
        ("tests/weights/test_unshard.py::test_frozen_weights_are_let_go_of_once_backward_is_over",),
    ),
    Fault(
        "ways are measured beyond the positions of a model",
        "paradyse/mixed/measured_ways.py",
        "            longest = min(most, positions or most)",
        "            longest = most",
        (
            "tests/mixed/test_measured_ways.py::test_no_sequence_is_longer_than_the_model_has_positions_for",
        ),
    ),
    Fault(
        "a state of shards is not looked for where weights are whole",
        "paradyse/accelerator.py",
        "        if written and not sharded:",
        "        if False:",
        ("tests/test_accelerator.py::test_what_several_ranks_saved_goes_on_with_whole_weights",),
    ),
    Fault(
        "what a killed save had replaced counts as a step",
        "paradyse/checkpoint/folder.py",
        '    for old in [p for p in complete if p.suffix and p.with_suffix("") in complete]:',
        "    for old in ():",
        (
            "tests/checkpoint/test_checkpoint_files.py::test_what_a_killed_save_had_replaced_counts_for_no_step",
        ),
    ),
    Fault(
        "a rank that cannot watch memory sends weights in another order",
        "paradyse/profiling/online.py",
        "frame.gathering.shelf.holds = frame.gathering.streams.ahead = frame.fuses = False",
        "frame.gathering.shelf.holds = False",
        (
            "tests/profiling/test_online.py::test_a_rank_that_cannot_watch_memory_sends_as_those_that_do",
        ),
    ),
    Fault(
        "other backends compile sharded weights",
        "paradyse/weights/sharded_tensor.py",
        "        if name is not None:\n            _check_backend(name)",
        '        if False:\n            _check_backend(name or "")',
        ("tests/weights/test_host_shards.py::test_other_backends_are_refused[aot_eager]",),
    ),
    Fault(
        "Trainer counts ranks before they are joined",
        "paradyse/trainer.py",
        '        self._sequence, self._replicas = axes_of_all(self._mesh, "Trainer")',
        "        from paradyse.distributed.axis import SINGLE\n"
        "        self._sequence = self._replicas = SINGLE",
        ("tests/test_before_ranks_join.py::test_a_trainer_that_makes_its_own_arguments",),
    ),
    Fault(
        "what torch.compile returned is trained by Trainer",
        "paradyse/trainer.py",
        "        if original_module(given) is not given:",
        "        if False:",
        ("tests/test_trainer_models.py::test_what_torch_compile_returned_is_refused",),
    ),
    Fault(
        "weights are sharded before ranks are joined",
        "paradyse/weights/shard.py",
        '    check_group("paradyse.shard")\n',
        "",
        (
            "tests/test_before_ranks_join.py::test_what_would_be_of_one_rank_is_refused[paradyse.shard]",
        ),
    ),
    Fault(
        "a profile's file takes another model",
        "paradyse/profiling/book.py",
        "        if self._structures and not self._structures & {b.structure for b in blocks}:",
        "        if False:",
        ("tests/profiling/test_measure.py::test_a_file_is_of_one_model",),
    ),
    Fault(
        "replicas send gradients together by what their own plans sum",
        "paradyse/weights/no_sync.py",
        "kinds = [(kept.replicas[w], type(w), w.dtype, reduce_dtype_of(w)) for w in ready]",
        "kinds = [(kept.replicas[w], w.dtype, w.grad.own is None) for w in ready]",
        ("tests/weights/test_no_sync.py::test_replicas_may_plan_apart[True]",),
    ),
    Fault(
        "a last batch that is computed whole leaves what is kept back",
        "paradyse/runtime/backward.py",
        "        if sync.sends:",
        "        if False:",
        (
            "tests/weights/test_no_sync.py::"
            "test_the_last_batch_may_be_one_that_is_computed_whole[True]",
        ),
    ),
    Fault(
        "what shares memory with a weight that moves stays where it was",
        "paradyse/weights/moved_rows.py",
        "        alias.local, alias.placement = x.local, x.placement",
        "        pass",
        ("tests/weights/test_aliases.py::test_what_was_taken_before_the_first_call_moves_along",),
    ),
    Fault(
        "gradients of rows that groups share are added up in 16 bits",
        "paradyse/strategies/weight_stream.py",
        "dtype = sum_dtype(like) if form.overlap else like.dtype",
        "dtype = like.dtype",
        ("tests/weights/test_reduce_dtype.py::test_groups_that_share_rows_add_up_in_float32",),
    ),
    Fault(
        "a log-sum-exp over ranks is rounded before it is taken off",
        "paradyse/strategies/split_losses.py",
        "    total = split_logsumexp(columns, wide, dim, keepdim=True)",
        "    total = split_logsumexp(columns, x, dim, keepdim=True)",
        ("tests/strategies/test_split_losses.py::test_log_probabilities_are_rounded_once",),
    ),
    Fault(
        "a sink that is switched off has no number where no key is seen",
        "kernels/sinks.py",
        ".masked_fill_(unseeing, 0)[..., None]",
        "[..., None]",
        ("tests/kernels/test_sinks.py::test_a_sink_may_be_switched_off",),
    ),
)
