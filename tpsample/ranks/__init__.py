"""Who takes part, and what they tell each other on the host."""
