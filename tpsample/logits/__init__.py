"""What rows need after the draw whose logits each rank stored: filters, kept sets, logprobs."""
