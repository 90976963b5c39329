"""The backend of a CPU: calls, and in `kernels` what Numba compiles for them."""
