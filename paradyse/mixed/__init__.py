"""Batches of mixed lengths: groups of ranks of different degree side by side."""
