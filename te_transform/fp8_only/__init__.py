"""Weights that are stored only in FP8."""
