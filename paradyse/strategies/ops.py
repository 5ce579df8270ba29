"""Importing this module registers every attention operator."""

from __future__ import annotations

import paradyse.kernels.attention_op  # noqa: F401
import paradyse.strategies.colossal_attention  # noqa: F401
import paradyse.strategies.ring_attention  # noqa: F401
import paradyse.strategies.ulysses_attention  # noqa: F401
