"""`tpsample generate` streams answers, ends and records them, and may leave the check out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="needs the extra hf")

from tests.support.commands import invoke, texts
from tests.support.ranks import same_on_ranks
from tpsample.cli.generate import _check_record
from tpsample.cli.report import Report
from tpsample.cli.requests import Request
from tpsample.distributed import Job

COMMAND = ("generate", "--backend", "torch", "--max-new-tokens", 6, "--prompt", "w5 w7 w9")


def _answer(tiny: Path, *words: object) -> str:
    done = invoke(*COMMAND, "--model", tiny, *words)
    assert done.exit_code == 0, done.output
    shown: str = texts(done.stdout).strip().splitlines()[-1]
    return shown


def test_one_prompt_has_one_answer_and_others_are_drawn_apart(tiny: Path) -> None:
    done = invoke(*COMMAND, "--model", tiny, "--num-samples", 3)
    assert "same tokens: 1 rank = oracle (18 tokens compared, 0 differ" in done.stdout
    found = texts(done.stdout).strip().split("w5 w7 w9")[1:]
    assert len(found) == 3 == len(set(found))
    assert _answer(tiny) in found[0]


def test_a_streamed_answer_is_the_one_that_is_shown_at_the_end(tiny: Path) -> None:
    answer = _answer(tiny)
    done = invoke(*COMMAND, "--model", tiny, "--stream")
    assert done.exit_code == 0, done.output
    assert done.stdout.count(answer) == 1 and "w5 w7 w9" not in done.stdout
    refused = invoke(*COMMAND, "--model", "/nowhere", "--stream", "--num-samples", 2)
    assert refused.exit_code == 1 and "stream: expected one answer" in refused.stderr


class Bytes:
    """A model whose tokenizer has a token per byte, two for some letters."""

    eos_token_ids: frozenset[int] = frozenset()

    @property
    def tokenizer(self) -> Bytes:
        return self

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode(errors="replace")

    def prompt_token_ids(self, prompt: str, *, raw: bool) -> list[int]:
        return self.encode(prompt)


def test_a_letter_is_streamed_once_it_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    row, shown = Request("p", {}, ["!"]).row(Bytes()), Report(0)  # type: ignore[arg-type]
    pieces, ended = [], []
    for byte in "aé b!c".encode():
        row.take(byte, torch.zeros(1))
        shown.write(row.text)
        pieces.append(capsys.readouterr().out)
        ended.append(row.ended)
    assert "".join(pieces) == "aé b" and "é" in pieces
    assert ended == [False] * 5 + [True] * 2


def test_a_model_that_would_generate_by_beams_is_sampled(tiny: Path, tmp_path: Path) -> None:
    beams = tmp_path / "beams"
    shutil.copytree(tiny, beams)
    config = json.loads((tiny / "generation_config.json").read_text())
    own = {"num_beams": 2, "repetition_penalty": 2.0, "max_length": 5}
    (beams / "generation_config.json").write_text(json.dumps(config | own))
    assert _answer(beams) == _answer(tiny)


def test_a_raw_prompt_is_not_a_turn_of_a_chat(tiny: Path, tmp_path: Path) -> None:
    chat = tmp_path / "chat"
    shutil.copytree(tiny, chat)
    template = "w1 w2 {% for m in messages %}{{ m['content'] }}{% endfor %} w3"
    (chat / "chat_template.jinja").write_text(template)
    assert _answer(chat, "--raw") == _answer(tiny) == _answer(tiny, "--raw") != _answer(chat)


def test_answers_end_where_their_requests_say(tiny: Path) -> None:
    words = _answer(tiny).split()
    for stop, expected in (
        (f" {words[3]}", words[:3]),
        (["nowhere", words[0]], ["w5", "w7", "w9", "T=0.7", "seed=0"]),
    ):
        assert _answer(tiny, "--set", f"stop={json.dumps(stop)}").split() == expected


def test_a_record_of_a_text_is_confirmed_token_by_token(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.record"
    few = ("--set", "allowed_token_ids=[3, 4, 5, 6]")  # so that each step counts
    words = (
        *few,
        "--set",
        "frequency_penalty=2",
        "--num-samples",
        2,
        "--no-check",
        "--record",
        file,
    )
    done = invoke(*COMMAND, "--model", tiny, *words)
    assert done.exit_code == 0 and "tpsample verify" in done.stdout, done.output
    assert "tokens were not checked (--no-check)" in done.stdout
    assert "same tokens" not in done.stdout and "checking tokens" not in done.stdout
    verified = invoke("verify", file)
    assert verified.exit_code == 0, verified.output
    assert verified.stdout.count(": confirmed: token ") == 12
    refused = invoke(*COMMAND, "--model", "/nowhere", "--record", "/no/folder/x")
    assert (
        refused.exit_code == 1
        and "record: cannot be written in '/no/folder': No " in refused.stderr
    )
    refused = invoke(*COMMAND, "--model", "/nowhere", "--record", file.parent)
    assert refused.exit_code == 1 and "is a folder; name a file in it" in refused.stderr
    refused = invoke(*COMMAND, "--model", tiny, "--raw", "--prompt", "w1", "--prompt", "")
    assert refused.exit_code == 1 and "prompt: '' has no token to continue" in refused.stderr


def _refusals(writes: Path, elsewhere: str) -> list[str]:
    """Return what this rank was told of a file of rank 0, and of one that rank 0 cannot write."""
    rank, told = dist.get_rank(), []
    for files in ((writes, Path(elsewhere)), (Path(elsewhere), writes), (Path(elsewhere), None)):
        try:
            _check_record(files[rank], Job(rank, 2))
        except ValueError as wrong:
            told.append(str(wrong))
        else:
            told.append("")
    return told


def test_only_the_rank_that_writes_a_record_needs_its_folder(tmp_path: Path) -> None:
    told = same_on_ranks(2, _refusals, tmp_path / "text.record", "/no/folder/x")
    no_folder = "record: cannot be written in '/no/folder': No such file or directory"
    assert told == ["", no_folder, no_folder]
    assert not list(tmp_path.iterdir())
