"""Importing this module registers every attention operator."""

from __future__ import annotations

import paradyse.kernels.attention_op
import paradyse.strategies.colossal_attention
import paradyse.strategies.ring_attention
import paradyse.strategies.ulysses_attention  # noqa: F401
