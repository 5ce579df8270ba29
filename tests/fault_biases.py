"""Faults of sinks, of biases, and of how attention that is written out is understood."""

from __future__ import annotations

from fault import Fault

KERNEL = "tests/kernels/test_attention_kernel.py::"
SINKS = ("tests/kernels/test_sinks.py::test_sinks_are_one_more_column",)
DISTANCE = (f"{KERNEL}test_bias_by_distance",)
WRITTEN = "tests/passes/test_written_out.py::test_by_hand"
ADDITIVE, METP = "kernels/additive_mask.py", "paradyse/strategies/metp.py"

BIAS_FAULTS: tuple[Fault, ...] = (
    Fault(
        "gradient of sinks with a flipped sign",
        "kernels/sinks.py",
        "own = -rows.masked_fill",
        "own = rows.masked_fill",
        SINKS,
    ),
    Fault(
        "log-sum-exp without the sink",
        "kernels/sinks.py",
        "torch.logaddexp(lse, column)",
        "lse.clone()",
        SINKS,
    ),
    Fault(
        "biases ahead for those behind",
        ADDITIVE,
        "torch.cat([bias[:, 0, 1:].flip(1), bias[:, 1]], 1)",
        "torch.cat([bias[:, 1, 1:].flip(1), bias[:, 0]], 1)",
        DISTANCE,
    ),
    Fault(
        "gradient of a bias one distance off",
        ADDITIVE,
        "first = key - (row + rows.stop - rows.start - 1)",
        "first = key - (row + rows.stop - rows.start)",
        DISTANCE,
    ),
    Fault(
        "metp: no gradients of biases and sinks",
        METP,
        "zip((self.bias_at, self.sinks_at), d_qkv[3:], strict=True)",
        "zip((), ())",
        (f"{WRITTEN}[sunk]", f"{WRITTEN}[t5]"),
    ),
    Fault(
        "a buffer's values are not looked at again",
        "paradyse/runtime/known_buffers.py",
        "if band_of(x) != band:",
        "if False:",
        ("tests/runtime/test_known_buffers.py::test_a_buffer_that_changes_is_told",),
    ),
    Fault(
        "a finite number taken for minus infinity",
        "passes/recover_masks.py",
        "if not found.infinite and not has_sinks and not spec.sees_itself:",
        "if False:",
        ("tests/passes/test_fold_attention.py::test_a_query_that_might_see_no_key",),
    ),
    Fault(
        "a factor of scores and their mask multiplies queries alone",
        "passes/score_terms.py",
        "if found is not None and not found.terms and not found.softcap:",
        "if found is not None:",
        ("tests/passes/test_fold_attention.py::test_refused[times a tensor after the mask]",),
    ),
    Fault(
        "a factor of batch and heads in one dim counts as one of heads",
        "passes/score_terms.py",
        "if shape_of(factor) and len(shape_of(node)) != 4 or shape_of(scores) != shape_of(node):",
        "if shape_of(scores) != shape_of(node):",
        ("tests/passes/test_fold_attention.py::test_a_factor_beside_batch_and_heads_in_one_dim",),
    ),
)
