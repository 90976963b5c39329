"""Filters, kept sets and logprobs, from the logits that each rank stored of a step's rows."""
