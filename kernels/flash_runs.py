"""The Triton kernels for queries and keys whose positions are runs known on the host.

What a mask by position alone makes of two lists of runs is kept: layers, steps of a ring and
training steps meet the same lists again, and then nothing but the kernels themselves is launched.
"""

from __future__ import annotations

import logging
from functools import cache, lru_cache

import torch
from torch import Tensor

from paradyse.kernels.attention_mask import AttentionSpec, Runs, run_positions
from paradyse.kernels.flash_backward import launch_backward
from paradyse.kernels.flash_forward import launch_forward
from paradyse.kernels.flash_plan import Plan, make_plan, refusal
from paradyse.kernels.flash_tiles import Visibility, describe_mask

log = logging.getLogger(__name__)


def supports(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    """Whether the kernels compute this call; why not is logged, once per reason."""
    reason = refusal(q, k, v, spec.scale)
    if reason is not None:
        _log_refusal(reason)
    return reason is None


@cache
def _log_refusal(reason: str) -> None:
    log.warning("attention without the Triton kernels, by dense tiles in PyTorch: %s", reason)


@lru_cache(maxsize=64)
def _positions(runs: Runs, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return run_positions(runs, device).int()


@lru_cache(maxsize=32)
def _by_position(
    q_runs: Runs, kv_runs: Runs, spec: AttentionSpec, device: torch.device
) -> Visibility:
    with torch.inference_mode(False):
        return describe_mask(_positions(q_runs, device), _positions(kv_runs, device), spec)


def _plan(
    q: Tensor, k: Tensor, v: Tensor, q_runs: Runs, kv_runs: Runs, spec: AttentionSpec
) -> Plan:
    if spec.key_padding is None and spec.document_ids is None:
        visibility = _by_position(q_runs, kv_runs, spec.positional, q.device)
    else:
        at = _positions(q_runs, q.device), _positions(kv_runs, q.device)
        visibility = describe_mask(*at, spec)
    return make_plan(q, k, v, visibility, spec)


def _readable(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous() for x in tensors
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_runs: Runs, kv_runs: Runs, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """``attention.attention_forward`` of a call that ``supports`` allows; runs in any order."""
    q, k, v = _readable(q, k, v)
    return launch_forward(q, k, v, _plan(q, k, v, q_runs, kv_runs, spec))


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_runs: Runs,
    kv_runs: Runs,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """``attention.attention_backward`` of a call that ``supports`` allows; runs in any order.
    Gradients are the same in every run.
    """
    grad_out, q, k, v, out, lse = _readable(grad_out, q, k, v, out, lse)
    plan = _plan(q, k, v, q_runs, kv_runs, spec)
    return launch_backward(grad_out, q, k, v, out, lse.contiguous(), plan)
