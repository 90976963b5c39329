"""Stands for torchvision, whose wheel does not load beside torch's for CPUs."""

from absent import stand_in

__version__ = "0.28.0"
__getattr__ = stand_in("torchvision")
