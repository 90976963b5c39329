"""Kernels run in the Triton interpreter, and every process on one thread.

Triton reads the variable when it is imported, so it is set before anything else; the processes
of `tests.ranks` inherit it.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
