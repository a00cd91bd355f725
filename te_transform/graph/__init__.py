"""fx graphs alone: captured, described, matched and edited. Nothing in here knows of rules, backends or
models."""
