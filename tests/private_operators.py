"""Checks of ``test_torch_private.py``: operators of PyTorch that are called by their own names."""

from __future__ import annotations

from typing import Any

import torch

from paradyse import torch_private as private


def arguments(op: Any) -> list[str]:
    return [a.name for a in private.schema_of(op.default).arguments]


QKV = ["query", "key", "value"]
GRADS = ["grad_out", *QKV]
REST = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
RANDOM = ["philox_seed", "philox_offset"]


def check_flash_attention() -> None:
    """Arguments alone: the operator needs a GPU."""
    got = arguments(private.flash_attention)
    assert got == [*QKV, "dropout_p", "is_causal", "return_debug_mask", "scale"]


def check_flash_attention_backward() -> None:
    got = arguments(private.flash_attention_backward)
    assert got == [*GRADS, "out", "logsumexp", *REST, *RANDOM, "scale"]


def check_cudnn_attention() -> None:
    got = arguments(private.cudnn_attention)
    options = ["dropout_p", "is_causal", "return_debug_mask", "scale"]
    assert got == [*QKV, "attn_bias", "compute_log_sumexp", *options]


def check_cudnn_attention_backward() -> None:
    got = arguments(private.cudnn_attention_backward)
    assert got == [*GRADS, "out", "logsumexp", *RANDOM, "attn_bias", *REST, "scale"]


WINDOW = ["window_size_left", "window_size_right"]


def check_flash_window() -> None:
    got = arguments(private.flash_window)
    given = [*QKV, *REST, "return_debug_mask", "scale", *WINDOW]
    assert got[: len(given)] == given  # behind them some that are left out


def check_flash_window_backward() -> None:
    got = arguments(private.flash_window_backward)
    assert got[:-3] == [*GRADS, "out", "logsumexp", *REST, *got[-5:-3]]
    assert got[-3:] == ["scale", *WINDOW]  # before them the random state


def check_foreach_copy() -> None:
    to, of = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3, dtype=torch.float64)]
    private.foreach_copy(to, of)
    assert all(torch.equal(x, torch.ones_like(x)) for x in to)


def check_has_gradient_hooks() -> None:
    before, after = leaves = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    assert not any(map(private.has_gradient_hooks, leaves))
    before.register_hook(print), after.register_post_accumulate_grad_hook(print)
    assert all(map(private.has_gradient_hooks, leaves))
