"""Importing this module registers every attention operator."""

from __future__ import annotations

import paradyse.kernels.attention_op
import paradyse.strategies.attention.colossal
import paradyse.strategies.attention.ring
import paradyse.strategies.attention.ulysses  # noqa: F401
