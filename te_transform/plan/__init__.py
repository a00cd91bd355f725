"""Decide what is fused and how; this room changes no model."""
