"""The bundled model is converted once, and a head that the model changes is refused."""

from __future__ import annotations

import importlib.metadata
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tpsample.cli import model as model_module

TRANSFORMERS = pytest.importorskip("transformers", reason="needs the extra hf")


def test_a_head_that_is_not_given_what_the_trunk_returns_is_refused(tiny: Path) -> None:
    causal_lm = TRANSFORMERS.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    found = model_module.head_of(causal_lm)
    assert (found.scale, found.softcap) == (1.0, 4.0)
    causal_lm.lm_head.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    with pytest.raises(ValueError, match="changes its hidden states before its LM head"):
        model_module.head_of(causal_lm)


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
