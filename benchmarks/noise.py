"""What repeated measurement of two things that take turns can tell, and what is noise.

Both were measured in each round, so each round gives one difference. If they did not differ, either
sign of each difference would be as likely as the other: the medians of differences with random
signs show how far a median strays by chance (a permutation test of paired samples).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAWS = 4000
"""Of random signs."""


def noise_of(differences: Sequence[float], level: float = 0.95, seed: int = 0) -> float:
    """What the median's absolute value stays below by chance, with a probability of ``level``."""
    values = np.abs(np.asarray(differences, dtype=float))
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), (DRAWS, len(values)))
    return float(np.quantile(np.abs(np.median(signs * values, axis=1)), level))


def is_noise(differences: Sequence[float], level: float = 0.95) -> bool:
    """Whether the median of ``differences`` is one that chance gives."""
    return bool(abs(np.median(differences)) <= noise_of(differences, level))
