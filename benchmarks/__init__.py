"""Measurements, one file per question."""
