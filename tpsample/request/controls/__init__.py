"""Penalties, biases and masks of requests: tables, state of a shard, and their application."""
