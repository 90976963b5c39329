"""The ranks that take part, and what they tell each other on the host."""
