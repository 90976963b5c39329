"""The definition of each pass, in plain PyTorch; it serves any device."""
