"""The faults that ``seeded_faults.py`` sows: one a person makes, a sign, a bound, a rank, a sum.

Whoever changes a line that a fault replaces gives the fault its new text.
"""

from __future__ import annotations

from fault import Fault
from fault_biases import BIAS_FAULTS
from fault_device import DEVICE_FAULTS
from fault_experts import EXPERT_FAULTS
from fault_forecasts import FORECAST_FAULTS
from fault_inputs import INPUT_FAULTS
from fault_levers import LEVER_FAULTS
from fault_mixed import MIXED_FAULTS
from fault_mixers import MIXER_FAULTS
from fault_overlap import OVERLAP_FAULTS
from fault_own_models import OWN_MODEL_FAULTS
from fault_shared import SHARED_FAULTS
from fault_splits import SPLIT_FAULTS
from fault_workflows import WORKFLOW_FAULTS

TILES = ("tests/kernels/test_attention_kernel.py",)
RANKS = "tests/strategies/test_attention_ranks.py::test_equal_to_one_rank"
SIZES, MASKS, OTHERS = ((f"{RANKS}[3-{cases}]",) for cases in ("sizes", "masks", "others"))
COLLECTIVE = ("tests/distributed/test_collectives.py",)
MOVES = ("tests/distributed/test_tokens.py",)
SHARDED = ("tests/test_exactness.py::test_sharded_over_three_ranks[llama_odd]",)
WHOLE = ("tests/test_exactness.py::test_two_ranks[llama_odd]",)
RECOVER = ("tests/passes/test_recover_masks.py",)
FOLD = ("tests/passes/test_fold_attention.py::test_equal",)
REPLICAS = ("tests/distributed/test_replicas.py::test_one_of_the_axes_has_one_rank",)
NO_SYNC = "tests/weights/test_no_sync.py::"
STEPS = "tests/weights/test_sharded_tensor.py::"
HEADS = "tests/strategies/test_head_parallel.py::"
ROWS = (f"{HEADS}test_rows_are_taken_and_put_back",)
EXCHANGE = ("tests/kernels/test_head_exchange.py", *SIZES)

MASK, CORE = "kernels/attention_mask.py", "kernels/attention_core.py"
RING = "paradyse/strategies/attention/ring.py"
COLOSSAL = "paradyse/strategies/attention/colossal.py"
ULYSSES = "paradyse/strategies/attention/ulysses.py"
COLLECTIVES = "paradyse/distributed/collectives.py"
TOKENS = "paradyse/distributed/tokens.py"

FAULTS: tuple[Fault, ...] = (
    # kernels
    Fault("window one too narrow", MASK, "x - spec.left)", "x - spec.left + 1)", TILES),
    Fault("causal sees the next key", MASK, "x + spec.right + 1)", "x + spec.right + 2)", TILES),
    Fault("chunks do not end", MASK, "torch.minimum(end, begin + spec.chunk)", "end", TILES),
    Fault("padding rows see keys", MASK, "    end = end * (x < spec.num_queries)\n", "", SIZES),
    Fault("documents mixed", "kernels/additive_mask.py", "visible & same", "visible | same", TILES),
    Fault(
        "dq without the scale",
        CORE,
        "dq = times_values(ds, k).mul_(self.spec.scale)",
        "dq = times_values(ds, k)",
        TILES,
    ),
    Fault(
        "softcap's derivative with a flipped sign",
        CORE,
        "capped.square_().neg_().add_(1)",
        "capped.square_().add_(1)",
        TILES,
    ),
    Fault(
        "softmax's gradient without its row sum",
        CORE,
        "ds.sub_((grad * out).sum(-1, keepdim=True)).mul_(p)",
        "ds.mul_(p)",
        TILES,
    ),
    Fault(
        "log-sum-exp without the maximum",
        CORE,
        "return p, highest + total.log()",
        "return p, total.log()",
        TILES,
    ),
    Fault(
        "attention dropout not scaled",
        CORE,
        "keep.to(like.dtype).mul_(1 / (1 - p) if p < 1 else 0)",
        "keep.to(like.dtype)",
        (f"{TILES[0]}::test_dropout_is_fair_and_uncorrelated", *OTHERS),
    ),
    Fault(
        "dropout not scaled",
        "kernels/dropout.py",
        "x * (1 / (1 - p))",
        "x",
        ("tests/kernels/test_dropout.py", "tests/test_dropin.py::test_dropout[gpt2]"),
    ),
    Fault(
        "replicas of a KV head not summed",
        "kernels/head_slots.py",
        "self.replicas, width).sum(3)",
        "self.replicas, width)[:, :, :, 0]",
        EXCHANGE,
    ),
    Fault(
        "query heads of the wrong KV head",
        "kernels/head_slots.py",
        "return kv * self.group + at if",
        "return at * self.num_kv_heads + kv if",
        ("tests/strategies/test_heads.py",),
    ),
    # distributed
    Fault(
        "send and receive swapped",
        COLLECTIVES,
        "to, source = ranks[",
        "source, to = ranks[",
        COLLECTIVE,
    ),
    Fault(
        "reduce-scatter without the sum",
        COLLECTIVES,
        "sent.then(partial(torch.sum, dim=0, dtype=dtype))",
        "sent.then(lambda parts: parts[0].to(dtype))",
        COLLECTIVE,
    ),
    Fault(
        "all-reduce of few elements without the sum",
        COLLECTIVES,
        "parts.sum(0, dtype=x.dtype)",
        "parts[axis.rank]",
        COLLECTIVE,
    ),
    Fault(
        "broadcast from the wrong rank",
        COLLECTIVES,
        "source = dist.get_process_group_ranks(axis.group)[root]",
        "source = dist.get_process_group_ranks(axis.group)[root - 1]",
        COLLECTIVE,
    ),
    Fault(
        "second halves of the sequence in the ranks' order",
        TOKENS,
        "for r in range(p - 1, -1, -1)]",
        "for r in range(p)]",
        MOVES,
    ),
    Fault(
        "gradient of gathered tokens from the first rank's rows",
        TOKENS,
        "take_rows(x, layout, rank, dim, 0)",
        "take_rows(x, layout, 0, dim, 0)",
        MOVES,
    ),
    Fault(
        "partial gradient of a replicated value not summed",
        TOKENS,
        "return collectives.all_reduce(grad, *ctx.where), None, None",
        "return grad, None, None",
        MOVES,
    ),
    Fault(
        "loss of the rank's own tokens",
        TOKENS,
        "return collectives.all_reduce(x, axis, block_id)\n",
        "return x.clone()\n",
        MOVES,
    ),
    Fault(
        "gradients summed, not averaged, over replicas",
        "paradyse/distributed/replicas.py",
        ".div_(replicas.size)",
        "",
        REPLICAS,
    ),
    Fault(
        "joined loss: gradient of the own replica alone",
        "paradyse/distributed/replicas.py",
        "(sum_over_replicas(g, ctx.axis), None)",
        "(g, None)",
        REPLICAS,
    ),
    # strategies
    Fault(
        "ring: positions of the wrong rank",
        RING,
        "part = attention_forward(q, k, v, own, layout.runs((axis.rank - step) % p), spec)",
        "part = attention_forward(q, k, v, own, layout.runs((axis.rank + step) % p), spec)",
        SIZES,
    ),
    Fault(
        "ring: gradients of keys not added up",
        RING,
        "grads += gradients_under_way.wait()",
        "gradients_under_way.wait()",
        SIZES,
    ),
    Fault(
        "ring: gradient of the bias from the last step alone",
        RING,
        "d_bias = d_bias_i if d_bias is None else d_bias + d_bias_i",
        "d_bias = d_bias_i",
        MASKS,
    ),
    Fault(
        "gradient of the bias not summed over ranks",
        "paradyse/distributed/tokens.py",
        "return collectives.all_reduce(grad, *ctx.where), None, None\n",
        "return grad.clone(), None, None\n",
        ("tests/passes/test_written_out.py::test_by_hand[t5]",),
    ),
    Fault(
        "ulysses: bias of the first rank's heads",
        ULYSSES,
        "self.slots.head_ids(self.axis.rank, device, first)",
        "self.slots.head_ids(0, device, first)",
        MASKS,
    ),
    Fault("colossal: no scale", COLOSSAL, ".to(exact) * spec.scale", ".to(exact)", SIZES),
    Fault("colossal: no softcap", COLOSSAL, "    cap_scores(scores, spec.softcap)\n", "", MASKS),
    Fault(
        "colossal: columns of the wrong rank",
        COLOSSAL,
        "in layout.runs((axis.rank - step) % p):",
        "in layout.runs((axis.rank + step) % p):",
        SIZES,
    ),
    Fault(
        "megatron_ts: bias added on every rank before the sum",
        "paradyse/strategies/tensor_parallel.py",
        "env[d.node] = y if bias is None else y + bias",
        "env[d.node] = y if bias is None else y + bias * scope.axis.size",
        SHARDED,
    ),
    Fault(
        "metp: gradients of a padded group lost",
        "paradyse/strategies/weight_stream.py",
        "return real[0] if len(real) == 1",
        "return real[0] * 0 if len(real) == 1",
        SHARDED,
    ),
    Fault(
        "dropout inside a block by the rank's own count of tokens",
        "paradyse/strategies/dropout.py",
        "positions = local if layout == SPLIT else whole",
        "positions = (local - local[0]) if layout == SPLIT else whole",
        ("tests/test_dropin.py::test_dropout[gpt2]",),
    ),
    Fault(
        "attention dropout of a rank's sequences as of the first ones",
        "paradyse/strategies/dropout.py",
        "if call.dropout_p == 0:",
        "if call.dropout_p >= 0:",
        ("tests/strategies/test_dsp.py::test_dropout_is_the_same_whatever_is_split",),
    ),
    # weights
    Fault(
        "gradients of whole weights not summed over ranks",
        "paradyse/weights/gradients.py",
        "message = collectives.start_all_reduce(flat, lane, shares)",
        'message = Pending([], flat, "all_reduce", lane, owners[index[0]], None)',
        WHOLE,
    ),
    Fault(
        "streamed gradients added up in the dtype that they are computed in",
        "paradyse/strategies/weight_stream.py",
        "torch.cat(parts).to(like.reduce_dtype)",
        "torch.cat(parts)",
        ("tests/weights/test_reduce_dtype.py::test_four_ranks_add_up_in_float32",),
    ),
    Fault(
        "gradient of a group's rows put at the first rows",
        "paradyse/weights/slices.py",
        "grad.narrow(self.dim, at, n)",
        "grad.narrow(self.dim, 0, n)",
        ROWS,
    ),
    Fault(
        "a group's padding holds a weight",
        "paradyse/weights/slices.py",
        "return taken * there.to(weight.dtype).view(shape)",
        "return taken",
        ROWS,
    ),
    Fault(
        "gathered weights: gradient of the rank's own tokens alone",
        "paradyse/weights/unshard.py",
        "if not gathered.summed and not gathered.shelf.group_size:",
        "if True:",
        SHARDED,
    ),
    Fault(
        "gathered weights: not there again for backward",
        "paradyse/weights/unshard.py",
        "gather_shards(shards, self.block_id, wholes, coming)",
        "pass",
        SHARDED,
    ),
    Fault(
        "rows put at the start of their stretch",
        "paradyse/weights/layout.py",
        "            at += n\n",
        "            at = n\n",
        ("tests/weights/test_layout.py",),
    ),
    # graph
    Fault(
        "stale function for a batch of one",
        "paradyse/graph/lower.py",
        "return self._known[key]",
        "return True",
        ("tests/graph/test_lower.py", *SHARDED),
    ),
    Fault(
        "key of a piece without its sizes",
        "paradyse/graph/subgraph.py",
        'lines.append(f"i{i}: {shape} {val.dtype}',
        'lines.append(f"i{i}: {len(val.shape)} {val.dtype}',
        ("tests/graph", *SHARDED),
    ),
    Fault(
        "normalized dims said to be splittable",
        "paradyse/graph/rules.py",
        "    names.mix(node, *dims[-k:])\n",
        "",
        ("tests/graph", f"{HEADS}test_refuses_by_name"),
    ),
    Fault(
        "dims of a permutation in the wrong order",
        "paradyse/graph/rules.py",
        "return [dims[d] for d in order]",
        "return [dims[d] for d in reversed(order)]",
        ("tests/graph", *SHARDED),
    ),
    # passes
    Fault(
        "not (x <= 0) taken for x >= 0",
        "passes/mask_domain.py",
        "return le0(sub(ONE, lin))",
        "return le0(sub(ZERO, lin))",
        RECOVER,
    ),
    Fault(
        "an absolute value bounded on one side",
        "passes/mask_domain.py",
        "return conj(*both) if c > 0 else disj(*both)",
        "return disj(*both) if c > 0 else conj(*both)",
        RECOVER,
    ),
    Fault(
        "left and right of a window swapped",
        "passes/mask_spec.py",
        "if coefficients == {Var(QUERY): 1, Var(KEY): -1} and const <= 0:",
        "if coefficients == {Var(QUERY): -1, Var(KEY): 1} and const < 0:",
        RECOVER,
    ),
    Fault(
        "padding of queries for padding of keys",
        "passes/mask_spec.py",
        "if QUERY not in dims:",
        "if KEY not in dims:",
        RECOVER,
    ),
    Fault(
        "folded attention without its scale",
        "passes/score_terms.py",
        "scale=found.scale * factor",
        "scale=found.scale",
        FOLD,
    ),
    Fault(
        "folded attention divided where it was multiplied",
        "passes/score_terms.py",
        "return x, c ** _FACTORS[node.target]",
        "return x, c",
        FOLD,
    ),
    Fault(
        "labels of padding tokens count",
        "passes/place_tokens.py",
        "    ctx.fills[labels] = ignore_index\n",
        "",
        ("tests/passes/test_place_tokens.py",),
    ),
    # planning
    # runtime
    Fault(
        "stale plan for another length",
        "paradyse/runtime/guard.py",
        "self._known.get(workload)",
        "next((p for w, p in self._known.items() if w.training == workload.training), None)",
        ("tests/runtime/test_guard.py", "tests/test_dropin.py::test_dynamic"),
    ),
    Fault(
        "a converted value of an earlier layout",
        "paradyse/runtime/frame.py",
        "        return forms[form]",
        "        return next(iter(forms.values()))",
        WHOLE,
    ),
    Fault(
        "switches not counted",
        "paradyse/runtime/guard.py",
        "self.num_switches += 1",
        "pass",
        ("tests/runtime/test_guard.py",),
    ),
    Fault(
        "deferred value computed at every use",
        "paradyse/runtime/deferred.py",
        "if self._tensor is None:",
        "if True:",
        ("tests/runtime/test_deferred.py",),
    ),
    Fault(
        "emptied memory counted as held",
        "paradyse/runtime/saved_memory.py",
        "sum(storage_bytes(ref) for ref in alive)",
        "sum(n for key, (_, n) in self.found.items() if key not in others)",
        ("tests/profiling/test_online.py::test_emptied_memory_does_not_count",),
    ),
    # gradients kept back
    Fault(
        "gradients that were there before are dropped",
        "paradyse/weights/no_sync.py",
        "w.grad = rest_part(w, w.grad, place=w.grad)",
        "w.grad = None",
        (f"{NO_SYNC}test_cleared_gradients_are_gone_and_others_stay",),
    ),
    Fault(
        "an optimizer steps with a rank's part",
        "paradyse/weights/no_sync.py",
        'if any(isinstance(w.grad, PartialGradient) for w in group["params"]):',
        "if False:",
        (f"{NO_SYNC}test_partial_gradients_are_not_used",),
    ),
    Fault(
        "gradients sent of a model that is inside",
        "paradyse/weights/no_sync.py",
        "for w in kept.waiting() if w not in _INSIDE]",
        "for w in kept.waiting()]",
        (f"{NO_SYNC}test_any_backward_over_the_ranks_sends",),
    ),
    Fault(
        "of what needs no sum over ranks one call's alone",
        "paradyse/weights/partial_gradient.py",
        "_plus(x.own, y.own), _plus(x.rest, y.rest)",
        "_plus(x.own, y.own), x.rest",
        ("tests/weights/test_partial_gradient.py",),
    ),
    # norms and optimizers
    Fault(
        "clipping takes sharded gradients one by one",
        "paradyse/weights/sharded_tensor.py",
        "join_foreach_types(ShardedTensor)",
        "pass",
        (f"{STEPS}test_gradients_are_clipped_by_one_message",),
    ),
    Fault(
        "least norms joined by their maximum",
        "paradyse/weights/norms.py",
        "every.amin(0)",
        "every.amax(0)",
        ("tests/weights/test_norms.py",),
    ),
    Fault(
        "a list's first layout for all of it",
        "paradyse/weights/sharded_tensor.py",
        "return [_whole(v) if like is None else rows_of(v, like) for v, like in zip(x, likes)]",
        "return [v if likes[0] is None else rows_of(v, likes[0]) for v in x]",
        (f"{STEPS}test_five_steps",),
    ),
    # checkpoint
    Fault(
        "checksums not compared",
        "paradyse/checkpoint/storage.py",
        "if _checksum(file, stretch) != saved:",
        "if False:",
        ("tests/checkpoint/test_checkpoint_damage.py::test_no_flipped_bit_loads",),
    ),
    Fault(
        "another rank's failure not heard",
        "paradyse/distributed/together.py",
        "if failure is not None:\n                raise",
        "if False:\n                raise",
        ("tests/distributed/test_together.py::test_what_one_rank_raises_all_ranks_raise",),
    ),
    *LEVER_FAULTS,
    *INPUT_FAULTS,
    *BIAS_FAULTS,
    *DEVICE_FAULTS,
    *OVERLAP_FAULTS,
    *MIXED_FAULTS,
    *MIXER_FAULTS,
    *EXPERT_FAULTS,
    *WORKFLOW_FAULTS,
    *OWN_MODEL_FAULTS,
    *SHARED_FAULTS,
    *SPLIT_FAULTS,
    *FORECAST_FAULTS,
)
