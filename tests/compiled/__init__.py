"""The compiled kernels, executed without a GPU: `python -m tests.compiled`."""
