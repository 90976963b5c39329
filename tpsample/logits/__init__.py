"""Rows whose logits a rank keeps for a step: filters, kept sets, logprobs."""
