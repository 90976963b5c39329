"""The messages that users read when they do something wrong: the argument, what was expected, what
came, and the way out. Each entry is a mistake that somebody made, and the whole text that must
come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tpsample import (
    LMHeadSampler,
    RankMismatch,
    SamplingBatch,
    SamplingParams,
    VocabShard,
    compiled,
    reference,
    sample_draft,
    verify,
)
from tpsample.agreement import construction
from tpsample.request.as_json import from_json

V, D, B = 20, 4, 2
WEIGHT = torch.arange(V * D, dtype=torch.float32).reshape(V, D).sin()
HIDDEN = torch.ones(B, D)


def _batch(**fields: Any) -> SamplingBatch:
    params = [SamplingParams(**{"seed": row, **fields}) for row in range(B)]
    return SamplingBatch.from_params(params, vocab_size=V)


def _request(**fields: Any) -> SamplingParams:
    return SamplingParams(**fields)


def _sampler(**options: Any) -> LMHeadSampler:
    return LMHeadSampler(WEIGHT, **{"backend": "torch", "max_rows": 4, **options})


def _on_meta() -> SamplingBatch:
    with torch.device("meta"):  # as engines build models
        return SamplingBatch.from_params([SamplingParams(seed=1)] * B, vocab_size=V)


def _closed() -> object:
    with _sampler() as sampler:
        pass
    return sampler(HIDDEN, _batch(), 0)


def _appended(count: int) -> None:
    _batch(frequency_penalty=1).append(torch.zeros(count, dtype=torch.int64))


class Mesh:
    """As `init_device_mesh(...)["tp"]` is: it has a group, and is none."""

    def get_group(self) -> None: ...

    def __repr__(self) -> str:
        return "Mesh"


class Model:
    """As one of transformers is: its head is a module inside it."""

    lm_head = torch.nn.Linear(D, V)

    def __repr__(self) -> str:
        return "Model"


class DTensor(torch.Tensor):
    """Goes by the name of torch's."""


SHARDED = torch.ones(B, D).as_subclass(DTensor)

ALONE: dict[str, tuple[Callable[[], object], str]] = {
    # --- requests
    "bad_words of ids": (
        lambda: SamplingParams(bad_words=[5, 6]),
        "bad_words: expected sequences of token ids, such as [[5, 6]], got 5 among them; words of "
        "text are the tokenizer's to encode",
    ),
    "bad_words of text": (
        lambda: SamplingParams(bad_words=["the"]),
        "bad_words: expected sequences of token ids, such as [[5, 6]], got 'the' among them; words "
        "of text are the tokenizer's to encode",
    ),
    "max_tokens": (
        lambda: _request(temperature=1, max_tokens=16),
        "max_tokens: not a field of SamplingParams; when an answer ends is the engine's to decide, "
        "as in launch/examples/continuous_batching.py",
    ),
    "stop": (
        lambda: _request(stop=["."]),
        "stop: not a field of SamplingParams; texts that end an answer are the engine's to look "
        "for; for ids see stop_token_ids",
    ),
    "n": (
        lambda: _request(n=2),
        "n: not a field of SamplingParams; give each answer a request with a seed of its own, or "
        "call the sampler with num_samples=",
    ),
    "a typing error": (
        lambda: _request(temprature=1),
        "temprature: not a field of SamplingParams; did you mean temperature?",
    ),
    "a field of a file": (
        lambda: from_json("params[0]", {"structured_outputs": {}}),
        "params[0]: structured_outputs: not a field of SamplingParams; set "
        "SamplingBatch.grammar_bitmask before each step",
    ),
    "a temperature beyond fp32": (
        lambda: SamplingParams(temperature=1e39),
        "temperature: expected a finite fp32 number >= 0, got 1e+39, which is inf in fp32",
    ),
    "a seed of 65 bits": (
        lambda: SamplingParams(seed=2**64),
        "seed: expected None or an int of 64 bits, got 18446744073709551616",
    ),
    "an id outside the vocabulary": (
        lambda: _batch(stop_token_ids=[V]),
        "stop_token_ids: expected ids in [0, 20), got 20",
    ),
    "nothing left to draw": (
        lambda: SamplingParams(allowed_token_ids=[5], bad_words=[[5]]),
        "allowed_token_ids: bad_words and min_tokens forbid every id in it, so no token is left; "
        "allow another id",
    ),
    # --- batches
    "one prompt in place of one per row": (
        lambda: SamplingBatch.from_params([SamplingParams()], vocab_size=V, prompt_token_ids=[5]),
        "prompt_token_ids[0]: expected a sequence of token ids, got 5; a batch takes one per row, "
        "such as [[5, 6], []]",
    ),
    "a field for update": (
        lambda: _batch().update(0, temperature=0.3),
        "update: expected a whole SamplingParams, got temperature=0.3; pass "
        "dataclasses.replace(batch.requests[0], temperature=0.3)",
    ),
    "a device that is not here": (
        lambda: SamplingBatch.from_params([], vocab_size=V, device="cuda:99"),
        "device: torch has no 'cuda:99' here (",
    ),
    "tokens of other rows": (
        lambda: _appended(3),
        "token_ids: expected the tokens of 2 rows, as the batch has, got 3 rows",
    ),
    "a list for a batch": (
        lambda: _sampler()(HIDDEN, [SamplingParams()] * B, 0),
        "batch: expected a SamplingBatch, got list; see SamplingBatch.from_params",
    ),
    "a batch of another vocabulary": (
        lambda: _sampler()(HIDDEN, SamplingBatch.from_params([], vocab_size=V + 1), 0),
        "batch: expected vocab_size 20 as the sampler has, got 21",
    ),
    "a batch built under another default device": (
        lambda: _sampler()(HIDDEN, _on_meta(), 0),
        "batch: expected tensors on cpu, got meta; build it with device='cpu'",
    ),
    "another number of rows": (
        lambda: _sampler()(torch.ones(3, D), _batch(), 0),
        "batch: expected 3 rows, as hidden_states or logits have, got 2; pass one SamplingParams "
        "per row, or a single one for all",
    ),
    "more rows than there is room for": (
        lambda: _sampler()(torch.ones(5, D), SamplingBatch.from_params([], vocab_size=V), 0),
        "hidden_states: 5 rows × 1 samples exceed max_rows=4; build the sampler with a larger "
        "max_rows",
    ),
    "a mask of rows that left": (
        lambda: _with_stale_mask(),
        "batch.forced_token_ids: rows of the batch joined, left, moved or changed since it was "
        "assigned; assign it anew, or None",
    ),
    # --- the sampler
    "a module for a weight": (
        lambda: LMHeadSampler(torch.nn.Linear(D, V)),
        "lm_head_weight: expected a tensor [V_local, D], got Linear(in_features=4, "
        "out_features=20, bias=True); pass its .weight, and bias=its .bias",
    ),
    "a model for a weight": (
        lambda: LMHeadSampler(Model()),
        "lm_head_weight: expected a tensor [V_local, D], got Model; pass its "
        ".lm_head.weight, and bias=its .lm_head.bias",
    ),
    "a transposed weight": (
        lambda: LMHeadSampler(WEIGHT.T),
        "lm_head_weight: expected [V_local, D] with a contiguous last axis, got (4, 20) with "
        "strides (1, 4); call .contiguous(), or pass .T of it if it is [D, V_local]",
    ),
    "a weight [D, V]": (
        lambda: LMHeadSampler(WEIGHT.T.contiguous())(HIDDEN, _batch(), 0),
        "hidden_states: expected D = 20 columns as lm_head_weight has, got torch.float32 (2, 4) on "
        "cpu; lm_head_weight seems to be [D, V_local]: build the sampler of "
        "lm_head_weight.T.contiguous()",
    ),
    "one process with too few rows": (
        lambda: LMHeadSampler(WEIGHT, vocab_size=V + 1),
        "lm_head_weight: rank 0 needs 21 rows for its shard VocabShard(start=0, stop=21), got 20",
    ),
    "an exchange of another name": (
        lambda: LMHeadSampler(WEIGHT, exchange="nccl"),
        "exchange: expected one of auto, collective, p2p, peer, two_level, got 'nccl'",
    ),
    "a mesh for a group": (
        lambda: LMHeadSampler(WEIGHT, group=Mesh()),
        'group: expected a torch process group, None or "alone", got Mesh; pass its group, '
        ".get_group()",
    ),
    "a weight of another dtype": (
        lambda: LMHeadSampler(WEIGHT.double()),
        "lm_head_weight: expected one of torch.bfloat16, torch.float16, torch.float32, got "
        "torch.float64; convert it once with .to(torch.float32)",
    ),
    "a quantised weight": (
        lambda: LMHeadSampler(WEIGHT.to(torch.float8_e4m3fn)),
        "lm_head_weight: expected one of torch.bfloat16, torch.float16, torch.float32, got "
        "torch.float8_e4m3fn; a quantised head makes its logits itself: pass them to sample_logits "
        "of a sampler over torch.empty(V_local, 0)",
    ),
    "a vocabulary that is no number": (
        lambda: VocabShard.even("20", 0, 1),
        "vocab_size: expected an int, got '20'",
    ),
    "half an id": (lambda: VocabShard(0, 2.5), "VocabShard.stop: expected an int, got 2.5"),
    "a sampler that was closed": (
        lambda: _closed(),
        "sampler: closed; build a new LMHeadSampler",
    ),
    # --- steps
    "hidden states as a DTensor": (
        lambda: _sampler()(SHARDED, _batch(), 0),
        "hidden_states: got a DTensor; pass its part on this rank, hidden_states.to_local()",
    ),
    "a weight as a DTensor": (
        lambda: LMHeadSampler(SHARDED),
        "lm_head_weight: got a DTensor; pass its part on this rank, lm_head_weight.to_local()",
    ),
    "drafted logits as a DTensor": (
        lambda: sample_draft(_sampler(), SHARDED, _batch(), 0, 0),
        "draft_logits: got a DTensor; pass its part on this rank, draft_logits.to_local()",
    ),
    "hidden states of NumPy": (
        lambda: _sampler()(np.ones((B, 100)), _batch(), 0),
        "hidden_states: expected a tensor [B, 4], got ndarray array([[1., 1., 1., 1., 1., 1., 1., "
        "1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., …",
    ),
    "hidden states of another dtype": (
        lambda: _sampler()(HIDDEN.bfloat16(), _batch(), 0),
        "hidden_states: expected torch.float32 on cpu like lm_head_weight, got torch.bfloat16 "
        "(2, 4) on cpu; convert with .to(lm_head_weight)",
    ),
    "hidden states of whole sequences": (
        lambda: _sampler()(torch.ones(B, 3, D), _batch(), 0),
        "hidden_states: expected a tensor [B, 4], got torch.float32 (2, 3, 4) on cpu; pass those "
        "of the last position, hidden_states[:, -1]",
    ),
    "hidden states of one row": (
        lambda: _sampler()(HIDDEN[0], _batch(), 0),
        "hidden_states: expected a tensor [B, 4], got torch.float32 (4,) on cpu; one row is "
        "hidden_states.unsqueeze(0)",
    ),
    "no positions": (
        lambda: _sampler()(HIDDEN, _batch()),
        "positions: expected an int or an int64 tensor [2] on cpu, got None; a position is "
        "the index, in its sequence, of the token being generated",
    ),
    "an output under another name": (
        lambda: getattr(_sampler()(HIDDEN, _batch(), 0), "tokens"),  # noqa: B009
        "SampleOutput has no 'tokens'; it has token_ids, status, seeds, logprobs, kept",
    ),
    "a list of positions": (
        lambda: _sampler()(HIDDEN, _batch(), [3, 4]),
        "positions: expected an int or an int64 tensor [2] on cpu, got [3, 4]; a "
        "position is the index, in its sequence, of the token being generated",
    ),
    "a draft of coupled verification": (
        lambda: verify(
            _sampler(),
            torch.ones(B, 2, D),
            torch.zeros(B, 1, dtype=torch.int64),
            _batch(),
            0,
            draft=torch.zeros(B, 1, V),
        ),
        'draft: method="coupled" looks at no draft probabilities; leave it out, or choose '
        '"rejection" or "block"',
    ),
    "filters inside torch.compile": (
        lambda: compiled.call(0, HIDDEN, _batch(top_p=0.9), 0, None, None),
        "batch: inside torch.compile every row needs a seed, and filters, logprobs, penalties and "
        "constraints must be off; call the sampler outside the compiled function",
    ),
}


def _with_stale_mask() -> object:
    batch = _batch()
    batch.forced_token_ids = torch.tensor([3, 9])
    batch.drop(0)
    return _sampler()(HIDDEN[:1], batch, 0)


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize("name", ALONE)
def test_a_process_alone_is_told(name: str) -> None:
    call, message = ALONE[name]
    with pytest.raises((TypeError, ValueError, RuntimeError, AttributeError)) as raised:
        call()
    text = str(raised.value)
    assert (text[: len(message)] if message.endswith("(") else text) == message
    assert not isinstance(raised.value, RankMismatch)  # one rank disagrees with nobody


def _tokens(sampler: LMHeadSampler, batch: SamplingBatch | None = None, *, hidden: Any = HIDDEN):
    return sampler(hidden, batch or _batch(), 0).token_ids.tolist()


def _quantised() -> list[int]:
    """A head with a scale, which its 8-bit weight alone does not have."""
    quantised = (WEIGHT / 0.01).round().to(torch.int8)
    sampler = LMHeadSampler(torch.empty(V, 0), backend="torch")
    logits = 0.01 * (HIDDEN @ quantised.float().T)
    return sampler.sample_logits(logits, _batch(), 0).token_ids.tolist()


def _assigned_anew() -> list[int]:
    batch = _batch()
    batch.forced_token_ids = torch.tensor([3, 9])
    batch.permute([1, 0])
    batch.forced_token_ids = torch.tensor([9, 3])
    return _tokens(_sampler(), batch)


LINEAR = torch.nn.Linear(D, V)
FOLLOWED: dict[str, Callable[[], tuple[list[int], Any]]] = {
    "a module for a weight": lambda: (
        _tokens(LMHeadSampler(LINEAR.weight, bias=LINEAR.bias)),
        LINEAR(HIDDEN),
    ),
    "a model for a weight": lambda: (
        _tokens(LMHeadSampler(Model().lm_head.weight, bias=Model().lm_head.bias)),
        Model().lm_head(HIDDEN),
    ),
    "a transposed weight": lambda: (_tokens(LMHeadSampler(WEIGHT.T.T)), HIDDEN @ WEIGHT.T),
    "a weight of another dtype": lambda: (
        _tokens(LMHeadSampler(WEIGHT.double().to(torch.float32))),
        HIDDEN @ WEIGHT.T,
    ),
    "a quantised weight": lambda: (
        _quantised(),
        0.01 * (HIDDEN @ (WEIGHT / 0.01).round().T),
    ),
    "hidden states of another dtype": lambda: (
        _tokens(_sampler(), hidden=HIDDEN.bfloat16().to(WEIGHT)),
        HIDDEN @ WEIGHT.T,
    ),
    "a sampler that was closed": lambda: (_tokens(_sampler()), HIDDEN @ WEIGHT.T),
    "more rows than there is room for": lambda: (
        _tokens(_sampler(max_rows=B)),
        HIDDEN @ WEIGHT.T,
    ),
    "filters inside torch.compile": lambda: (_tokens(_sampler()), HIDDEN @ WEIGHT.T),
    "a mask of rows that left": lambda: (_assigned_anew(), [9, 3]),
    "nothing left to draw": lambda: (
        _tokens(_sampler(), _batch(allowed_token_ids=[5, 6], bad_words=[[5]])),
        [6, 6],
    ),
}
"""Messages by name: a function does what each says, and gives the tokens that must come of it."""


@pytest.mark.parametrize("name", FOLLOWED)
def test_advice_leads_to_the_right_tokens(name: str) -> None:
    assert name in ALONE
    found, right = FOLLOWED[name]()
    if isinstance(right, torch.Tensor):
        right = reference.sample(right.detach(), _batch(), 0).token_ids.tolist()
    assert found == right


def test_kernels_on_a_cpu_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(construction, "interpreted", lambda: False)
    assert _said(lambda: LMHeadSampler(WEIGHT, backend="triton")) == (
        'backend: "triton" needs a GPU, lm_head_weight is on cpu; use backend="auto", or set '
        "TRITON_INTERPRET=1 before Python starts"
    )


def test_min_tokens_without_the_ids_it_holds_back_is_a_warning_at_the_call() -> None:
    with pytest.warns(UserWarning, match="min_tokens=2 has no effect without the ids") as warned:
        SamplingParams(min_tokens=2)
    assert [Path(each.filename) for each in warned] == [Path(__file__)]


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.float16(0.5)])
def test_numbers_of_numpy_are_numbers(value: Any) -> None:
    params = SamplingParams(temperature=value, top_p=value, seed=np.int64(3))
    assert params == SamplingParams(temperature=0.5, top_p=0.5, seed=3)
    sampler = _sampler(logit_scale=value, logit_softcap=value * 60)
    logits = reference.logits(HIDDEN, WEIGHT, logit_scale=0.5, logit_softcap=30.0)
    expected = reference.sample(logits, _batch(), 3).token_ids
    assert torch.equal(sampler(HIDDEN, _batch(), 3).token_ids, expected)
    assert _said(lambda: _sampler(logit_scale=10**400)).startswith("logit_scale: expected a finite")


# --- several ranks: all of them raise the same


def _half(rank: int) -> torch.Tensor:
    return WEIGHT[V // 2 * rank : V // 2 * (rank + 1)]


def _written_temperature(sampler: LMHeadSampler, rank: int) -> object:
    batch = _batch()
    batch.temperature[1] = 0.5 + 0.2 * rank
    return sampler(HIDDEN, batch, 0)


def _appended_on_one(sampler: LMHeadSampler, rank: int) -> object:
    batch = _batch(presence_penalty=1)
    sampler(HIDDEN, batch, 0)
    if rank == 0:
        batch.append(torch.tensor([1, 2]))
    return sampler(HIDDEN, batch, 1)


def _other_drafts(sampler: LMHeadSampler, rank: int) -> object:
    drafts = torch.tensor([[7], [8 + rank]])
    return verify(sampler, torch.ones(B, 2, D), drafts, _batch(), 0)


SAME = "must be the same on every rank"
TOGETHER: dict[str, tuple[Callable[[LMHeadSampler, int], object], str]] = {
    "requests with other temperatures": (
        lambda sampler, rank: sampler(HIDDEN, _batch(temperature=0.5 + 0.25 * rank), 0),
        f"batch: row 0: temperature: {SAME}, got rank 0: 0.5, rank 1: 0.75",
    ),
    "a temperature that was written": (
        _written_temperature,
        f"temperatures: row 1: {SAME}, got rank 0: 0.5, rank 1: 0.699999988",
    ),
    "other seeds": (
        lambda sampler, rank: sampler(HIDDEN, _batch(seed=5 + rank), 0),
        f"seeds: row 0: {SAME}, got rank 0: 5, rank 1: 6",
    ),
    "a rank that skipped a step": (
        lambda sampler, rank: sampler(HIDDEN, _batch(), torch.tensor([3, 4 + rank])),
        f"positions: row 1: {SAME}; a rank that skipped a step has others, got rank 0: 4, rank 1: "
        "5",
    ),
    "other drafts": (
        _other_drafts,
        f"token_ids: row 1: {SAME}, got rank 0: [8], rank 1: [9]",
    ),
    "tokens appended on one rank alone": (
        _appended_on_one,
        f"tokens so far: row 0: {SAME}, by digest; every rank appends the same tokens as often, "
        "got ",
    ),
    "another call": (
        lambda sampler, rank: sampler.compare() if rank else sampler(HIDDEN, _batch(), 0),
        "call: every rank must make the same call, got rank 0: step, rank 1: compare",
    ),
    "a wrong argument on one rank": (
        lambda sampler, rank: sampler(HIDDEN.bfloat16() if rank else HIDDEN, _batch(), 0),
        "rank 1: hidden_states: expected torch.float32 on cpu like lm_head_weight, got "
        "torch.bfloat16 (2, 4) on cpu; convert with .to(lm_head_weight)",
    ),
    "the whole weight on every rank": (
        lambda sampler, rank: LMHeadSampler(WEIGHT, vocab_size=V),
        "lm_head_weight: expected a shard of the 20 rows of the vocabulary, but every rank holds "
        "at least as many; pass each rank its own rows, lm_head_weight[shard.start : shard.stop] "
        "with shard = VocabShard.even(vocab_size, rank, world_size); where this is meant, name "
        "them by shard=",
    ),
    "the whole weight and no vocabulary size": (
        lambda sampler, rank: LMHeadSampler(WEIGHT),
        "lm_head_weight: rank 0 and rank 1 hold the same 20 rows; pass each rank its own rows, "
        "lm_head_weight[shard.start : shard.stop] with shard = VocabShard.even(vocab_size, rank, "
        "world_size); where this is meant, name them by shard=",
    ),
    "other arguments of the sampler": (
        lambda sampler, rank: LMHeadSampler(_half(rank), chunks=1 + rank),
        f"chunks: {SAME}, got rank 0: 1, rank 1: 2",
    ),
    "exchange='peer' without a kernel": (
        lambda sampler, rank: LMHeadSampler(_half(rank), exchange="peer", backend="torch"),
        'exchange: "peer" is not possible here: rank 0: backend "torch" has no kernel that writes '
        "to peers; use a GPU, or the interpreter with TRITON_INTERPRET=1; rank 1: backend "
        '"torch" has no kernel that writes to peers; use a GPU, or the interpreter with '
        'TRITON_INTERPRET=1; or use exchange="collective"',
    ),
}


def _all_together() -> dict[str, tuple[str, bool]]:
    """Return what this rank was told of each, and whether the step after it was right."""
    rank = dist.get_rank()
    sampler = LMHeadSampler(_half(rank), backend="torch")
    expected = sampler(HIDDEN, _batch(), 0).token_ids
    found = {}
    for name, (call, _) in TOGETHER.items():
        text = _said(lambda call=call: call(sampler, rank))
        right = torch.equal(sampler(HIDDEN, _batch(), 0).token_ids, expected)
        found[name] = (text, right)
    return found


def test_ranks_are_told_the_same_and_go_on() -> None:
    first, second = run_ranks(2, _all_together)
    assert first == second
    for name, (_, message) in TOGETHER.items():
        text, right = first[name]
        assert (text[: len(message)] if message.endswith(" ") else text, right) == (message, True)


# --- the command line


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pytest.importorskip("tpsample.cli.model", reason="needs the extra hf")
    pytest.importorskip("transformers", reason="needs the extra hf")
    monkeypatch.setattr(model, "hub_fault", lambda: "no network")


COMMANDS = {
    "objects without prompts": (
        ("--prompt", "p", "--params", "two.json"),
        "error: params: expected 1 object, one per prompt, got 2 in two.json; an object without a "
        "list around it is for all",
    ),
    "a model that is not there": (
        ("--model", "nobody/nothing"),
        "error: model: cannot load 'nobody/nothing': there is no such folder and no model of that "
        "name in the cache, and Hugging Face does not answer (no network)",
    ),
    "a bias without a number": (
        ("--set", 'logit_bias={"17": "x"}'),
        "error: set: logit_bias[17]: expected a number, got 'x'",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_says_it_in_one_line(
    name: str, offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    testing = pytest.importorskip("typer.testing", reason="needs the extra cli")
    from tpsample.cli.app import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.json").write_text("[{}, {}]")
    words, message = COMMANDS[name]
    done = testing.CliRunner().invoke(app, ["generate", *words])
    assert (done.exit_code, done.stderr) == (1, f"{message}\n")
