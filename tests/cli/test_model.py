"""The bundled model is converted once."""

from __future__ import annotations

import importlib.metadata
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from tpsample.cli import model as model_module
from tpsample.distributed import Job

pytest.importorskip("transformers", reason="needs the extra hf")


def _saved_by(tiny: Path, folder: Path) -> list[str]:
    model = model_module.load(str(tiny), Job(), torch.float32).causal_lm
    own = folder / str(torch.distributed.get_rank())
    model_module.save_on_any_rank(model, own)
    return sorted(file.name for file in own.iterdir())


def test_each_rank_of_a_job_can_write_a_model(tiny: Path, tmp_path: Path) -> None:
    found = run_ranks(2, _saved_by, tiny, tmp_path)
    assert found[0] == found[1] and {"config.json", "model.safetensors"} <= set(found[1])


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_whose_file_is_half_written_is_named(file: str, tiny: Path, tmp_path: Path) -> None:
    """Its reader decides what is raised, and a command shows a ValueError alone as one line."""
    folder = tmp_path / "half"
    shutil.copytree(tiny, folder)
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"^model: cannot load '{folder}': "):
        model_module.load(str(folder), Job(), torch.float32)


class TestBundledCache:
    """Where the converted model lives, with the conversion itself replaced."""

    @pytest.fixture(autouse=True)
    def conversion(self, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        converted: list[Path] = []

        def convert(gguf_folder: Path, folder: Path) -> Path:
            folder.mkdir()
            converted.append(folder)
            time.sleep(0.2)
            (folder / "model").write_text("weights")
            return folder

        monkeypatch.setattr(model_module, "convert_gguf", convert)
        monkeypatch.setattr(model_module, "find_gguf", lambda: Path("/nowhere"))
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
        return converted

    def test_processes_that_need_it_at_once_convert_it_once(
        self, conversion: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
        with ThreadPoolExecutor() as threads:
            found = [threads.submit(model_module.bundled_folder) for _ in range(3)]
            first, *others = [each.result() for each in found]
        assert others == [first, first]
        assert (first / "model").read_text() == "weights"
        assert len(conversion) == 1
        kept = {path.name for path in (tmp_path / "new" / "tpsample").iterdir()}
        assert kept <= {first.name, "lock"}

    def test_a_folder_that_cannot_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        path = model_module.bundled_folder()
        assert (path / "model").exists()
        assert tmp_path not in path.parents
