"""The Triton kernels for queries and keys whose positions are runs known on the host.

What a mask makes of two lists of runs is kept: layers and steps of a ring, and training steps where
it is by position alone, meet the same lists again, and then nothing but the kernels themselves is
launched.

``q``, ``k``, ``v``, ``given``, ``q_runs``, ``kv_runs`` and ``spec`` are as of the public
functions of ``attention``; here runs may have any order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from paradyse.kernels.attention_core import Backward, Grads, adjacent
from paradyse.kernels.attention_mask import AttentionSpec, Runs, run_positions
from paradyse.kernels.flash_backward import launch_backward
from paradyse.kernels.flash_forward import launch_forward
from paradyse.kernels.flash_plan import aligned, refusal
from paradyse.kernels.flash_tiles import (
    Keys,
    Queries,
    Visibility,
    describe_keys,
    describe_mask,
    describe_queries,
    visibility_of,
)
from paradyse.kernels.kept import Kept

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


_POSITIONS, _QUERIES, _KEYS, _TABLES = Kept(), Kept(), Kept(), Kept()
_BY_DATA = Kept(lambda visibility: [*vars(visibility).values()])
"""Of masks with padding or documents, each with its own tables."""


def _positions(runs: Runs, device: torch.device) -> Tensor:
    return _POSITIONS.get((runs, device), lambda: run_positions(runs, device).int())


def _by_position(
    q_runs: Runs, kv_runs: Runs, spec: AttentionSpec, device: torch.device
) -> Visibility:
    """Of a ``spec.positional``. Queries and keys are kept apart, as a ring has the same queries in
    every step."""

    def queries() -> Queries:
        return describe_queries(_positions(q_runs, device), spec)

    def keys() -> Keys:
        return describe_keys(_positions(kv_runs, device), spec)

    def keep(tile: Hashable, make: Callable[[], Tensor]) -> Tensor:
        return _TABLES.get((q_runs, kv_runs, spec, device, tile), make)

    mine = _QUERIES.get((q_runs, spec, device), queries)
    theirs = _KEYS.get((kv_runs, spec.seq_len, device), keys)
    return visibility_of(mine, theirs, spec, keep=keep)


def _by_data(q_runs: Runs, kv_runs: Runs, spec: AttentionSpec, device: torch.device) -> Visibility:
    """With padding or documents, which all layers have in common."""

    def make() -> Visibility:
        visibility = describe_mask(_positions(q_runs, device), _positions(kv_runs, device), spec)
        return replace(visibility, keep=Kept().get)

    key = q_runs, kv_runs, spec.positional, device
    return _BY_DATA.get_of(key, (spec.key_padding, spec.document_ids), make)


def _visibility(q: Tensor, q_runs: Runs, kv_runs: Runs, spec: AttentionSpec) -> Visibility:
    if spec.key_padding is None and spec.document_ids is None:
        return _by_position(q_runs, kv_runs, spec.positional, q.device)
    return _by_data(q_runs, kv_runs, spec, q.device)


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_runs: Runs, kv_runs: Runs, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """``attention.attention_forward`` of a call that ``supports`` allows."""
    q, k, v = aligned([adjacent(q), adjacent(k), adjacent(v)])
    return launch_forward(q, k, v, _visibility(q, q_runs, kv_runs, spec), spec)


def backward(given: Backward, q_runs: Runs, kv_runs: Runs, spec: AttentionSpec) -> Grads:
    """``attention.attention_backward`` of a call that ``supports`` allows; every run gives the same
    gradients.
    """
    grad, q, k, v, out, lse = given.readable()
    grad, q, k, v = aligned([grad, q, k, v])
    given = Backward(grad, q, k, v, out, lse)
    return launch_backward(given, _visibility(q, q_runs, kv_runs, spec), spec)
