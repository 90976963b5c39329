"""Registers the adapter under the one sampling backend that SGLang uses on a CPU."""

from tpsample.integrations import sglang


def register() -> None:
    """Do as the package's own entry point, and take the place of the backend "pytorch"."""
    sglang.register()
    sglang.register("pytorch")
