"""Advice is right: a test does what a message says and compares the tokens.

Every advice of the package is found by reading its source. It is followed here, or by a test that a
list names, or it needs a GPU.
"""

from __future__ import annotations

import re
import warnings

import pytest
import torch

from tests.support.advice import advices, is_said_in, names_of_tests
from tests.support.commands import ROOT
from tests.support.followed import FOLLOWED, right_of
from tests.support.mistakes import said
from tests.support.pasted import options_of
from tests.support.wrong_batches import BATCHES
from tests.support.wrong_ranks import FOLLOWED_BY_RANKS, TOGETHER
from tests.support.wrong_samplers import SAMPLERS

ALONE = BATCHES | SAMPLERS

NAMED: dict[str, dict[str, str]] = {
    "tests/messages/test_advice.py": {
        "in a clone of tpsample, pip": "test_commands_of_messages_are_those_of_the_project",
        "triton missing: ": "test_commands_of_messages_are_those_of_the_project",
        "the package with the weights": "test_commands_of_messages_are_those_of_the_project",
        "run `make bench` there": "test_commands_of_messages_are_those_of_the_project",
    },
    "tests/cli/test_generate_drafts.py": {
        "decode without drafts": "test_a_model_whose_cache_forgets_nothing_decodes_without_drafts",
    },
    "tests/cli/test_doctor.py": {
        "several are started by": "test_on_two_ranks",
    },
    "tests/cli/test_generate_requests.py": {
        "are one; give one": "test_one_prompt_has_one_answer_and_others_by_request",
        "ask for fewer": "test_one_prompt_has_one_answer_and_others_by_request",
        "got ''; leave it out": "test_a_file_gives_each_prompt_its_own_request",
    },
    "tests/cli/test_generate.py": {
        "leave --tp out: ": "test_one_and_two_ranks_write_the_same_texts",
    },
    "tests/cli/test_generate_tp.py": {
        "start {} ranks": "test_two_ranks_split_the_model_and_write_what_it_writes",
    },
    "tests/cli/test_generate_answers.py": {
        "use `tpsample verify`": "test_a_record_of_a_text_is_confirmed_token_by_token",
    },
    "tests/test_record.py": {
        "see --allow-download": "test_a_model_is_not_downloaded_unless_that_is_allowed",
    },
    "tests/test_trace.py": {
        "ask for them with": "test_every_step_is_the_oracles",
    },
    "tests/test_distributed.py": {
        "start with torchrun, or": "test_two_ranks_join",
        "are; set it": "test_place_from_environment",
        "set MASTER_ADDR and MASTER_PORT": "test_variables_of_a_launcher_and_an_address_are_enough",
        "GPUs visible": "test_more_ranks_than_gpus_raises_on_every_rank",
        "does not reach all": "test_ranks_that_do_not_reach_each_other_are_told_the_variable",
    },
    "tests/launch/test_launchers.py": {
        "give the address of": (
            "test_an_address_of_this_machine_is_the_first_and_a_longer_wait_finds_another"
        ),
        "give an address of": (
            "test_an_address_of_this_machine_is_the_first_and_a_longer_wait_finds_another"
        ),
    },
    "tests/ranks/test_rendezvous.py": {
        "have no process group": "test_a_virtual_rank_alone_refuses_filters_before_it_waits",
    },
    "tests/ranks/test_lost_ranks.py": {
        "on every rank first": "test_a_rank_that_fails_inside_a_step_says_why",
        "{}. If all ranks live": "test_a_rank_that_stays_away_is_named_and_reset_recovers",
        "does not answer either": (
            "test_a_rank_that_is_cut_off_from_the_store_says_so_in_time_and_reset_waits_for_it"
        ),
    },
    "tests/agreement/test_reset.py": {
        "did not answer within {} s": "test_a_reset_that_fails_ends_and_the_next_one_recovers",
        "did not come within {} s": "test_a_reset_that_fails_ends_and_the_next_one_recovers",
    },
    "tests/integrations/test_versions.py": {
        "is installed; pip": "test_other_versions_are_refused_with_the_way_out",
    },
    "tests/integrations/test_transformers.py": {
        "pass stream_to=": "test_a_streamer_is_given_the_prompt_every_token_and_the_end",
        "leave them off": "test_greedy_text_is_generates_own",
        "load it onto one device": "test_greedy_text_is_generates_own",
        "leave it out, or call": "test_greedy_text_is_generates_own",
        "expected the order {}": "test_every_token_is_the_one_of_its_seed_and_position",
        "an argument of transformers'": "test_every_token_is_the_one_of_its_seed_and_position",
        "padding on the left": (
            "test_a_row_has_its_text_alone_and_beside_others_with_and_without_a_cache"
        ),
    },
    "tests/sampler/test_from_logits.py": {
        "makes its own logits, see": "test_the_head_is_not_applied",
    },
    "tests/integrations/test_vllm_params.py": {
        "uninstall its package": "test_modes_of_the_surroundings_are_refused_too",
        "pass --no-async": "test_without_asynchronous_scheduling_or_with_runner_v2_a_server_starts",
    },
    "tests/logits/test_fixed_rounds.py": {
        "capture a batch without it": "test_a_captured_step_takes_fixed_rounds_by_itself",
    },
}
"""Tests elsewhere that do what a text says, by file and a part of the text."""

NEEDS_A_GPU = (
    'backend: "numba" needs a CPU',
    "the current device of this process is cuda:{}; call torch.cuda.set_device",
    "without NVLink between all pairs of GPUs, or torch cannot tell",
    "sees one GPU and its peers have others",
    "no GPU is visible: everything runs on the CPU; if there is one, see nvidia-smi",
)
NO_ADVICE = ("compare hidden states", "Write two short sentences")
"""The name of a call, and a prompt."""


@pytest.mark.parametrize("name", FOLLOWED)
def test_advice_leads_to_the_right_tokens(name: str) -> None:
    assert name in ALONE
    found, right = FOLLOWED[name]()
    assert found == (right_of(right) if isinstance(right, torch.Tensor) else right)


def test_every_advice_is_followed_by_a_test_or_needs_a_gpu() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        told = [said(ALONE[name][0]) for name in FOLLOWED]
    told += [(ALONE | TOGETHER)[name][1] for name in FOLLOWED_BY_RANKS]
    elsewhere = [*NEEDS_A_GPU, *NO_ADVICE, *(part for parts in NAMED.values() for part in parts)]
    found = advices()
    assert len(found) > 90
    left = {advice for advice in found if not any(is_said_in(advice, text) for text in told)}
    unknown = {advice for advice in left if not any(part in advice for part in elsewhere)}
    assert unknown == set(), "nobody tried what these texts advise"
    assert {part for part in elsewhere if not any(part in advice for advice in left)} == set()
    for file, tests in NAMED.items():
        assert set(tests.values()) - names_of_tests(ROOT / file) == set(), file


def test_commands_of_messages_are_those_of_the_project() -> None:
    """Extras, pinned packages and targets are there; nothing is installed."""
    pytest.importorskip("rich", reason="needs the extra cli")
    from tpsample.cli.doctor import PACKAGES

    commands = [
        found[1] or found[2]
        for advice in advices()
        if "{}==" not in advice
        and (found := re.search(r"`(make .*?)`|(pip install [^,]+)", advice))
    ]
    assert len(commands) >= 4
    for command in commands:
        for extra in ("cli,hf", *PACKAGES.values()):
            options_of(command.replace("{}", extra))
