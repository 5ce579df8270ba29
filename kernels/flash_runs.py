"""The Triton kernels for queries and keys whose positions are runs known on the host.

What a mask by position alone makes of two lists of runs is kept: layers, steps of a ring and
training steps meet the same lists again, and then nothing but the kernels themselves is launched.

``q``, ``k``, ``v``, ``given``, ``q_runs``, ``kv_runs`` and ``spec`` are as of the public
functions of ``attention``; here runs may have any order.
"""

from __future__ import annotations

import logging
from functools import cache, lru_cache

import torch
from torch import Tensor

from paradyse.kernels.attention_core import Backward, Grads, adjacent
from paradyse.kernels.attention_mask import AttentionSpec, Runs, run_positions
from paradyse.kernels.flash_backward import launch_backward
from paradyse.kernels.flash_forward import launch_forward
from paradyse.kernels.flash_plan import refusal
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


def _visibility(q: Tensor, q_runs: Runs, kv_runs: Runs, spec: AttentionSpec) -> Visibility:
    if spec.key_padding is None and spec.document_ids is None:
        return _by_position(q_runs, kv_runs, spec.positional, q.device)
    return describe_mask(_positions(q_runs, q.device), _positions(kv_runs, q.device), spec)


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_runs: Runs, kv_runs: Runs, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """``attention.attention_forward`` of a call that ``supports`` allows."""
    visibility = _visibility(q, q_runs, kv_runs, spec)
    return launch_forward(adjacent(q), adjacent(k), adjacent(v), visibility, spec)


def backward(given: Backward, q_runs: Runs, kv_runs: Runs, spec: AttentionSpec) -> Grads:
    """``attention.attention_backward`` of a call that ``supports`` allows; every run gives the same
    gradients.
    """
    return launch_backward(given.readable(), _visibility(given.q, q_runs, kv_runs, spec), spec)
