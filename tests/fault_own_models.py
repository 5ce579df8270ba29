"""Faults that models of people's own would show, and loops over them."""

from __future__ import annotations

from fault import Fault

EQUAL = "tests/test_own_models.py::test_loss_and_gradients_are_those_of_the_model"

OWN_MODEL_FAULTS: tuple[Fault, ...] = (
    Fault(
        "losses of the same labels have one filling behind the end",
        "passes/place_tokens.py",
        "if not dense and len(labels.users) > 1:",
        "if False:",
        (f"{EQUAL}[two losses, turned]", f"{EQUAL}[two losses of the same labels]"),
    ),
    Fault(
        "attention over several dims split along one of them",
        "passes/place_tokens.py",
        "if tuple(names.of(call.q)[2]) != (seq,):",
        "if seq not in names.of(call.q)[2]:",
        (f"{EQUAL}[attention over tokens, and over pairs]",),
    ),
    Fault(
        "a mask made of hidden states is of the rank's tokens",
        "passes/outline_blocks.py",
        "*self._ways_to(masks)}",
        "}",
        (f"{EQUAL}[a mask of hidden states]",),
    ),
    Fault(
        "a formula's table for another number of keys",
        "passes/recover_masks.py",
        "key = parts, emit.sizes ",
        "key = parts, (1, 1) ",
        (f"{EQUAL}[one formula for two lengths]",),
    ),
    Fault(
        "pieces drop the same elements",
        "passes/split_steps.py",
        "else num + 1 + first)",
        "else num)",
        ("tests/test_own_models.py::test_two_drops_are_independent_at_any_length",),
    ),
    Fault(
        "a cut dim has the traced length in dropout",
        "paradyse/strategies/dropout.py",
        "size_of((f,), known)",
        'sizes.get(scope.labels(layout).of.get(f, ""), f.size)',
        ("tests/test_own_models.py::test_two_drops_are_independent_at_any_length",),
    ),
    Fault(
        "a copy for the caller is the tensor itself",
        "passes/simplify.py",
        "is not None and not _is_copy_for_caller(node):",
        "is not None:",
        ("tests/test_own_models.py::test_copies_are_the_callers",),
    ),
    Fault(
        "what is computed of labels is computed of padding",
        "passes/pad_labels.py",
        "_replay(gm, [n for n in labels if n.target not in _FLATTENS], labels[0])",
        "labels[0]",
        ("tests/passes/test_pad_labels.py::test_the_loss_is_the_same_and_no_logits_are_cut",),
    ),
    Fault(
        "hooks on gradients are lost when a model is sharded",
        "paradyse/torch_private.py",
        "return bool(hooked._backward_hooks or hooked._post",
        "return bool(hooked._post",
        ("tests/weights/test_shard_training.py::test_refused",),
    ),
    Fault(
        "whole tensors that are assigned replace sharded ones",
        "paradyse/weights/shard.py",
        'if not told.get("assign_to_params_buffers"):',
        "if True:",
        ("tests/weights/test_shard_training.py",),
    ),
    Fault(
        "fused optimizers write to copies of whole states",
        "paradyse/weights/sharded_tensor.py",
        "        whole.copy_(_whole(shard))\n",
        "        pass\n",
        ("tests/weights/test_sharded_tensor.py::test_steps_go_on_from_the_state_of_one_process",),
    ),
    Fault(
        "ranks are taken to lie in order over replicas",
        "paradyse/accelerator.py",
        "return apart[list(mine)].flatten(0, 1)",
        "return apart[:: self.sequence_axis.size].flatten(0, 1)",
        ("tests/test_accelerator.py::test_what_is_gathered_is_of_each_group_once",),
    ),
    Fault(
        "one optimizer of two is saved with a sharded model",
        "paradyse/accelerator.py",
        "for o in _optimizers_of(m, optimizers) or [None]]",
        "for o in _optimizers_of(m, optimizers)[:1] or [None]]",
        ("tests/test_accelerator.py::test_two_optimizers_of_one_model_and_random_states",),
    ),
    Fault(
        "ranks that had no random state go on with their own",
        "paradyse/accelerator.py",
        "torch.set_rng_state(agreement.first_has(torch.get_rng_state()))",
        "agreement.first_has(torch.get_rng_state())",
        ("tests/test_accelerator.py::test_two_optimizers_of_one_model_and_random_states",),
    ),
    Fault(
        "attention that is returned is of the rank's tokens",
        "passes/outline_blocks.py",
        "if block.attention is not None and self.ctx.axis.size > 1:",
        "if False:",
        (f"{EQUAL}[attention is returned]",),
    ),
    Fault(
        "an MLP may have attention inside",
        "passes/outline_blocks.py",
        "if node.target is ATTENTION or columns & self.ctx.names.mixed(node):",
        "if columns & self.ctx.names.mixed(node):",
        (f"{EQUAL}[attention is returned]",),
    ),
    Fault(
        "replicas keep their own gradient of a weight that is read whole too",
        "paradyse/runtime/frame.py",
        "self._joined.summed if step.split else self._joined.replicated",
        "self._joined.summed if step.split else {}",
        ("tests/runtime/test_joined.py::test_replicas_agree_on_weights_read_by_parts_and_whole",),
    ),
    Fault(
        "an alarm goes on after ranks disagree",
        "paradyse/distributed/agreement.py",
        "control.alarm.reset()  # a rank may have failed before it heard of this",
        "pass",
        ("tests/distributed/test_failures.py::test_where_ranks_were_out_of_step_already",),
    ),
    Fault(
        "outputs read late have second derivatives of zero",
        "paradyse/runtime/deferred.py",
        'refuse_second_derivatives("an output that is computed when it is read")',
        "pass",
        ("tests/runtime/test_deferred.py::test_second_derivatives_are_refused",),
    ),
    Fault(
        "an input that nothing makes again is not kept",
        "paradyse/runtime/frame.py",
        "if grad_fn is None or node not in step.piece.inputs:",
        "if node not in step.piece.inputs:",
        (
            "tests/runtime/test_remake.py"
            "::test_behind_attention_without_gradients_the_input_is_kept",
        ),
    ),
    Fault(
        "a copy of a weight keeps gradients back",
        "paradyse/planned_program.py",
        "if isinstance(argument, nn.Parameter) or not isinstance(argument, Tensor):",
        "if not isinstance(argument, Tensor):",
        ("tests/weights/test_no_sync.py::test_gradients_are_those_of_calls_that_send[turned]",),
    ),
    Fault(
        "what is kept of a mask lives as long as the caller's tensor",
        "paradyse/runtime/frame.py",
        "self.env[node] = self.env[node].detach()",
        "pass",
        ("tests/runtime/test_frame.py::test_what_is_kept_of_a_mask_goes_with_the_call",),
    ),
)
