"""Requests for tokens, and a batch of them as tensors."""
