"""Ranks, the axes of a mesh they lie on, and the messages between them."""
