"""Stands for SGLang's own kernels."""

from absent import stand_in

__version__ = "0.4.10"
__getattr__ = stand_in("sgl_kernel")
