"""Experts by groups of them: each rank's own on the rows of all ranks, or one group after the
other on the rank's own rows."""
