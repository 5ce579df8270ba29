"""Weights at rest (whole, or 1/p of each on a rank) and in use by a block."""
