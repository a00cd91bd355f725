"""Parallelism as an extra: a converted model divided among the ranks of a tensor-parallel group."""
