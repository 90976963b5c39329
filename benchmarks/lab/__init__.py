"""Shared by all benchmarks: problems and their gate, baselines, timing, results and pages."""
