"""`tpsample generate --tp`: the whole model split over the ranks that its heads allow."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="needs the extra hf")

import transformers

from tests.support.commands import GENERATE, TORCHRUN, invoke, run_command
from tests.support.ranks import run_ranks
from tests.support.tried import need_transformers
from tpsample.cli import report, tensor_parallel
from tpsample.cli.model import load
from tpsample.distributed import Job

PROMPTS = ("w5 w7 w9", "w7 w8 w9 w7 w8 w9 w7", "w3 w1 w4")
TEMPERATURES = (0.0, 0.7, 1.0)
NEW = 8


def _shown(job: Job, folder: Path, **own: Any) -> str:
    """Run the command, and return the text that this rank prints."""
    generate = importlib.import_module("tpsample.cli.generate")
    with (
        contextlib.redirect_stdout(io.StringIO()) as shown,
        mock.patch.object(generate, "join", lambda **_: contextlib.nullcontext(job)),
    ):
        generate.generate(
            *(list(PROMPTS), True),
            model=str(folder),
            tp=True,
            max_new_tokens=NEW,
            temperature=list(TEMPERATURES),
            seed=7,
            **{"backend": "torch", **own},
        )
    return shown.getvalue()


class _OtherRank(Job):
    """One of two ranks; the second token of the other one has other bits."""

    def gather(self, value: Any) -> list[Any]:
        return [value, [value[0], value[1] + 1, *value[2:]]]


def _on_ranks(llama: Path, folder: Path) -> list[Any]:
    os.environ.update(COLUMNS="200", TERM="dumb")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    job = Job(rank, world_size, rank, world_size, "torchrun")
    split = load(str(llama), job, torch.float32, tensor_parallel=True)
    return [
        _shown(job, llama, record=folder / "record"),
        _shown(job, llama, screening="int8", backend="auto"),
        report.split(split.causal_lm, [torch.zeros(2, 3)] * 3, _OtherRank(0, 2)),
    ]


@pytest.fixture(scope="module")
def ranks(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]]]:
    """Return the folder of a record, and the text of each of two ranks."""
    need_transformers()
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_ranks(2, _on_ranks, llama, folder)


def test_two_ranks_split_the_model_and_write_what_it_writes(llama: Path, ranks: Any) -> None:
    folder, ((plain, screened, _), others) = ranks
    assert others[:2] == ["", ""]
    compared = len(PROMPTS) * NEW
    for shown in (plain, screened):
        same = f"same tokens: 1 rank = 2 ranks = oracle ({compared} tokens compared, 0 differ"
        assert same in shown
    for shown in (plain, screened):
        assert re.search(rf"hidden states +the same bits on every rank for {compared} tok", shown)
        found = re.search(r"trunk +tensor-parallel, ([\d.]+) kB of its ([\d.]+) kB", shown)
        assert found and 0.5 <= float(found[1]) / float(found[2]) < 0.52, shown
    assert screened.split(" model ")[0] == plain.split(" model ")[0]

    whole = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    words = transformers.AutoTokenizer.from_pretrained(llama)
    ids = words(PROMPTS[0], return_tensors="pt").input_ids
    greedy = whole.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
    assert words.decode(greedy, skip_special_tokens=True) in plain

    verified = invoke("verify", folder / "record")
    assert verified.exit_code == 0, verified.output
    assert verified.output.count(": confirmed: ") == compared


def test_ranks_with_other_hidden_states_are_found(ranks: Any) -> None:
    trunk, hidden_states = ranks[1][0][2]
    assert trunk[0] == "trunk" and trunk[1].startswith("tensor-parallel, ")
    assert hidden_states == ("hidden states", "DIFFER BETWEEN RANKS for 1 of 3 tokens")


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "world_size", "way_out"),
    [
        (9, 3, 2, "start 3 ranks, or leave --tp out"),
        (32, 8, 3, "start 2, 4, 8 ranks, or leave --tp out"),
        (32, [8, 4], 8, "start 2, 4 ranks, or leave --tp out"),
        (8, 1, 2, "which 2 ranks cannot share evenly; leave --tp out"),
    ],
)
def test_ranks_that_cannot_share_the_heads_are_told_which_can(
    heads: int, key_value_heads: Any, world_size: int, way_out: str
) -> None:
    config = SimpleNamespace(
        base_model_tp_plan={"a": "colwise"},
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
    )
    with pytest.raises(ValueError, match=re.escape(way_out)) as error:
        tensor_parallel.check_model("MODEL", config, world_size)
    named = f"tp: MODEL has {heads} attention heads and {key_value_heads} key-value heads"
    assert str(error.value).startswith(named)


def test_heads_that_the_ranks_share_and_models_without_a_plan() -> None:
    config = SimpleNamespace(base_model_tp_plan={}, model_type="gpt2", num_attention_heads=12)
    with pytest.raises(ValueError, match=r"has no plan to split MODEL \(gpt2\); leave --tp out"):
        tensor_parallel.check_model("MODEL", config, 2)
    config.base_model_tp_plan["a"] = "colwise"
    for world_size in (2, 3, 4, 6, 12):
        tensor_parallel.check_model("MODEL", config, world_size)


def test_every_rank_refuses_before_it_loads_or_sends(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no process group here, so that whatever is sent would fail in another way."""
    need_transformers()
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", None)
    for rank in range(3):
        with pytest.raises(ValueError, match=r"4 attention heads and 2 key-value heads, which 3 "):
            load(str(llama), Job(rank, 3, rank, 3), torch.float32, tensor_parallel=True)
    with pytest.raises(ValueError, match="not callable"):  # which it says once it begins to load
        load(str(llama), Job(), torch.float32)


def test_a_transformers_that_was_not_tried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # By name, because transformers may put itself into sys.modules a second time.
    monkeypatch.setattr("transformers.__version__", "5.0.0")
    with pytest.raises(
        ValueError, match=r"^tp: .* is supported, 5\.0\.0 is installed; pip install"
    ):
        tensor_parallel.loading("MODEL", None, Job(0, 2, 0, 2))
    assert tensor_parallel.loading("MODEL", None, Job()) == {}


def test_one_rank_has_nothing_to_split(llama: Path) -> None:
    done = invoke("generate", "--tp", "--backend", "torch", "--model", llama, "--prompt", "w5")
    assert done.exit_code == 0, done.output
    assert "tensor-parallel" not in done.stdout
    assert re.search(r"trunk +whole: one rank has nothing to split", done.stdout)


@pytest.mark.long
def test_under_torchrun(llama: Path) -> None:
    options = ("--tp", "--model", llama, "--max-new-tokens", 6, "--prompt", "w5 w7 w9")
    done = run_command(*TORCHRUN, 2, *GENERATE, *options)
    assert done.returncode == 0, done.stderr
    assert "same tokens: 1 rank = 2 ranks = oracle (6 tokens compared, 0 differ" in done.stdout
    refused = run_command(*TORCHRUN, 3, *GENERATE, *options)
    assert refused.returncode == 1
    assert refused.stderr.count("which 3 ranks cannot share evenly; start 2 ranks") == 3
