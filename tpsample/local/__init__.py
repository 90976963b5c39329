"""Hidden states to this rank's best words, by Triton launches or in plain PyTorch."""
