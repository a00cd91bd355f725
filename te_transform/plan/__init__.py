"""Decides what is fused and how; touches no model."""
