"""Capture, describe, match and edit fx graphs, without knowledge of rules, backends or models."""
