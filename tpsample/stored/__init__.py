"""What needs the logits of some rows: filters, kept sets, logprobs; each rank its part."""
