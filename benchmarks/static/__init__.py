"""Kernels compiled ahead of time, for GPUs that are absent."""
