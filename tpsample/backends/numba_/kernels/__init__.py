"""The kernels of a CPU, compiled by Numba: the counterparts of `tpsample.backends.triton_.kernels`.

Numba is an extra (`cpu`). Import this package only where `missing` is None.
"""
