"""Adapters for engines; nothing is imported here, because each needs its engine. See README.md."""
