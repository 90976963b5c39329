from pathlib import Path

import pytest
import torch

from tests.support.tiny_model import save_tiny_llama, save_tiny_model
from tpsample.cli.model import Model, load
from tpsample.distributed import Job


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that `--model` takes."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama, whose cache can forget tokens, and whose four heads in two
    groups two ranks can share."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    folder = tmp_path_factory.mktemp("llama")
    save_tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny: Path) -> Model:
    return load(str(tiny), Job(), torch.float32)
