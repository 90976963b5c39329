"""The steps of the package that run on emulated GPUs."""
