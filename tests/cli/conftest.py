from pathlib import Path

import pytest
import torch

from tests.support.tiny_model import save_tiny_llama, save_tiny_model
from tpsample.cli.model import Model, load
from tpsample.distributed import Job


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that `--model` takes."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_model(tiny: Path) -> Model:
    return load(str(tiny), Job(), torch.float32)
