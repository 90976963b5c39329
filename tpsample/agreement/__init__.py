"""Whether the ranks agree: when a sampler is built, before a step, and after it."""
