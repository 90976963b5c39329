"""The bundled model is converted once, and a head that the model changes is refused."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tpsample.cli import model as model_module
from tpsample.distributed import Job

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
            (folder / "model").write_text("weights")
            converted.append(folder)
            return folder

        monkeypatch.setattr(model_module, "convert_gguf", convert)
        monkeypatch.setattr(model_module, "find_gguf", lambda: Path("/nowhere"))
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
        return converted

    def test_converts_once(
        self, conversion: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
        first, second = (model_module.bundled_folder(Job()) for _ in range(2))
        assert first == second
        assert (first / "model").read_text() == "weights"
        assert len(conversion) == 1
        assert list((tmp_path / "new" / "tpsample").iterdir()) == [first]

    def test_two_at_once_leave_one_folder(
        self, conversion: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        faster = model_module.convert_gguf

        def slower(gguf_folder: Path, folder: Path) -> Path:
            monkeypatch.setattr(model_module, "convert_gguf", faster)
            model_module.bundled_folder(Job())
            return faster(gguf_folder, folder)

        monkeypatch.setattr(model_module, "convert_gguf", slower)
        path = model_module.bundled_folder(Job())
        assert len(conversion) == 2
        assert list((tmp_path / "tpsample").iterdir()) == [path]

    def test_a_folder_that_cannot_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        path = model_module.bundled_folder(Job())
        assert (path / "model").exists()
        assert tmp_path not in path.parents

    def test_a_failed_conversion_is_told_to_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Waiting(Job):
            """Rank 1, to which rank 0 reports."""

            def gather(self, value: Any) -> list[Any]:
                return [("machine", None, "OSError: disk full"), value]

        with pytest.raises(ValueError, match=r"rank 0 cannot convert .* disk full"):
            model_module.bundled_folder(Waiting(1, 2, 1, 2))
