"""Triton kernels. Nothing here knows of process groups; nothing above imports this without need."""
