"""Measuring blocks inside whole training steps, before a run and during it."""
