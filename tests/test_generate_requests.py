"""Request controls on the command line and from a file of requests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.commands import TORCHRUN, run_command
from tests.test_generate import GENERATE, texts, tiny  # noqa: F401 (a fixture)
from tpsample.cli.requests import Request, bias_of, read_params

COMMAND = (*GENERATE, "--max-new-tokens", 8, "--temperature", 1.2)


@pytest.mark.timeout(300)
def test_controls_change_the_texts_and_pass_the_check(tiny: Path) -> None:  # noqa: F811
    command = (*COMMAND, "--model", tiny)
    plain = run_command(sys.executable, *command, timeout_s=60)
    first = texts(plain.stdout).split()[-1]
    controls = (
        *("--repetition-penalty", 1.5, "--presence-penalty", 1, "--frequency-penalty", 0.5),
        *("--logit-bias", "7=3", "--bad-word", first, "--min-tokens", 4),
    )
    done = run_command(*TORCHRUN, 2, *command, *controls, timeout_s=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same tokens: 1 rank = 2 ranks = oracle (40 tokens compared, 0 differ" in done.stdout
    assert texts(done.stdout) != texts(plain.stdout)
    answers = texts(done.stdout).replace("w5 w7 w9", "")
    assert first in texts(plain.stdout).split() and first not in answers.split()


def test_a_file_gives_each_prompt_its_own_request(tiny: Path, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "params.json"
    file.write_text(
        json.dumps([{"allowed_token_ids": [3]}, {"logit_bias": {"4": 100}, "temperature": 0}])
    )
    prompts = ("--prompt", "w5", "--prompt", "w6", "--params", file)
    done = run_command(sys.executable, *COMMAND, "--model", tiny, *prompts, timeout_s=60)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = texts(done.stdout)
    assert " ".join(["w3"] * 8) in shown and " ".join(["w4"] * 8) in shown


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("[{}, {}]", "expected 1 objects"),
        ("[1]", "list of objects"),
        ("{", "cannot read"),
        ('[{"top_q": 1}]', "top_q: not a field"),
        ('[{"top_p": 2}]', "top_p: expected"),
        ('[{"bad_words": [[]]}]', "bad_words: expected"),
        ('[{"min_tokens": -1}]', "min_tokens: expected"),
        ('[{"temperature": "hot"}]', "temperature: expected"),
    ],
)
def test_wrong_files_are_refused_before_a_model_is_loaded(content, match, tmp_path) -> None:
    file = tmp_path / "params.json"
    file.write_text(content)
    options = ("--prompt", "w5", "--temperature", 1, "--params", file, "--model", "/nowhere")
    done = run_command(sys.executable, *GENERATE, *options, timeout_s=60)
    assert done.returncode == 1 and match in done.stderr, done.stderr


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        read_params(tmp_path / "none.json", 1)


def test_biases_are_id_and_value() -> None:
    assert bias_of(["17=-5", "3=1e2"]) == {17: -5.0, 3: 100.0}
    assert bias_of(None) is None
    with pytest.raises(ValueError, match="ID=BIAS"):
        bias_of(["17"])


class Letters:
    """A tokenizer with a token per character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def test_texts_are_forbidden_with_and_without_a_space() -> None:
    request = Request.of("p", {"bad_words": ["ab", [5]], "min_tokens": 2})
    params = request.complete(Letters(), [9, 8])
    assert params.bad_words == [[97, 98], [32, 97, 98], [5]]
    assert (params.min_tokens, params.stop_token_ids) == (2, (8, 9))
