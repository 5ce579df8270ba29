"""Attention across ranks: one operator for each way that keys and queries meet."""
