"""The mistakes of users: each call, and the whole message that must come.

`REFERENCE`, `REQUESTS` and `SAMPLERS` are made without a sampler, `STEPS` with one, alone or as one
rank of several, and `TOGETHER` by ranks that differ. `tests/messages/test_mistakes.py` runs them.
The values that every argument refuses are in `tests.support.calls`.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from tpsample import (
    Draft,
    LMHeadSampler,
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    VocabShard,
    reference,
    sample,
    sample_draft,
    seed_of,
    verify,
    verify_logits,
)
from tpsample.agreement import construction
from tpsample.exchange import peer
from tpsample.integrations.engine_rows import EngineRows
from tpsample.record.format import write_record
from tpsample.request.as_json import from_json

V, D, B = 20, 4, 2
WEIGHT = torch.arange(V * D, dtype=torch.float32).reshape(V, D).sin()
HIDDEN = torch.ones(B, D)


def batch_of(cap: int | None = None, fixed_rounds: bool = False, **fields: Any) -> SamplingBatch:
    params = [SamplingParams(**{"seed": row, **fields}) for row in range(B)]
    how = {"kept_cap": cap, "fixed_rounds": fixed_rounds}
    return SamplingBatch.from_params(params, vocab_size=V, **how)


def request(**fields: Any) -> SamplingParams:
    return SamplingParams(**fields)


def sampler_over(weight: torch.Tensor = WEIGHT, **options: Any) -> LMHeadSampler:
    return LMHeadSampler(weight, **{"backend": "torch", "max_rows": 4, **options})


def under_meta() -> SamplingBatch:
    """Return a batch that was built under a default device, as engines build models."""
    with torch.device("meta"):
        return batch_of()


class Mesh:
    """As `init_device_mesh(...)["tp"]` is: it has a group, and is none."""

    def get_group(self) -> None: ...

    def __repr__(self) -> str:
        return "Mesh"


class QuantisedHead(torch.nn.Module):
    """As those of torch.ao.nn, whose weight is a method."""

    def weight(self) -> torch.Tensor:
        return WEIGHT


class Model:
    """As one of transformers is: its head is a module inside it."""

    lm_head = torch.nn.Linear(D, V)

    def __repr__(self) -> str:
        return "Model"


class Sharded(DTensor):
    """Takes no group to be made."""


SHARDED = torch.Tensor._make_subclass(Sharded, torch.ones(B, D))  # type: ignore[arg-type]


def half(rank: int) -> torch.Tensor:
    """Return the rows of one of two ranks."""
    return WEIGHT[V // 2 * rank : V // 2 * (rank + 1)]


def tokens(
    sampler: LMHeadSampler, batch: Any = None, *, hidden: Any = HIDDEN, position: int = 0
) -> list[int]:
    """Return what a sampler draws of a batch, or of two plain rows."""
    found: list[int] = sampler(hidden, batch or batch_of(), position).token_ids.tolist()
    return found


def tokens_and_all(sampler: LMHeadSampler, batch: Any = None) -> SampleOutput:
    """Return what a sampler draws of a batch, or of two plain rows."""
    return sampler(HIDDEN, batch or batch_of(), 0)


# -- requests and batches --------------------------------------------------------------------


def with_stale_mask() -> object:
    batch = batch_of()
    batch.forced_token_ids = torch.tensor([3, 9])
    batch.drop(0)
    return sampler_over()(HIDDEN[:1], batch, 0)


def slots_of() -> SamplingBatch:
    """Return slots, and the last is empty."""
    batch = SamplingBatch.of_slots(B, vocab_size=V)
    batch.put(0, SamplingParams(seed=0))
    return batch


def late() -> object:
    """Let a sampler see a batch first after tokens were appended."""
    batch = batch_of(frequency_penalty=2)
    batch.append(torch.tensor([3, 4]))
    return sampler_over()(HIDDEN, batch, 0)


def two_steps() -> object:
    """Take a second step with penalties before the first one's tokens are appended."""
    sampler, batch = sampler_over(), batch_of(frequency_penalty=2)
    sampler(HIDDEN, batch, 0)
    return sampler(HIDDEN, batch, 1)


def moved() -> object:
    """Take a step of rows that moved after they were selected."""
    batch = batch_of()
    rows = batch.select(torch.tensor([0, 1]))
    batch.permute([1, 0])
    return sampler_over()(HIDDEN, rows, 0)


def verified() -> object:
    """Verify drafts of slots whose mask has a row per slot."""
    batch = batch_of()
    rows = batch.select(torch.tensor([0, 1]))
    batch.forced_token_ids = torch.tensor([3, 9])
    hidden_states = HIDDEN.unsqueeze(1).repeat(1, 2, 1)
    return verify(sampler_over(), hidden_states, torch.tensor([[3], [9]]), rows, 0)


def forced(ids: list[int]) -> object:
    """Take a step of two rows with so many forced ids."""
    batch = batch_of()
    batch.forced_token_ids = torch.tensor(ids)
    return sampler_over()(HIDDEN, batch, 0)


def masked(name: str, change: Callable[[torch.Tensor], object]) -> SamplingBatch:
    """Return a batch whose mask was changed after it was assigned."""
    batch = batch_of()
    mask = torch.full((B, 1), -1, dtype=torch.int32)
    if name == "forced_token_ids":
        mask = torch.tensor([3, 9])
    setattr(batch, name, mask)
    change(mask)
    return batch


def free_memory(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def of_columns(**filters: Any) -> SamplingBatch:
    return SamplingBatch.from_tensors(
        vocab_size=V, temperature=torch.ones(B), seed=torch.arange(B), **filters
    )


def written() -> object:
    """Read the temperatures of a selection after some were written to it."""
    rows = batch_of().select(torch.tensor([0, 1]))
    rows.temperature[:] = 0.5
    return rows.temperature


def moved_to(name: str, numbers: torch.Tensor) -> SamplingBatch:
    """Return a batch one of whose tensors was given other numbers in other memory."""
    batch = batch_of()
    getattr(batch, name).data = numbers
    return batch


def engine_rows() -> EngineRows:
    return EngineRows(V, B, torch.device("cpu"))


def recorded(prompts: Any) -> None:
    output = tokens_and_all(sampler_over())
    requests = [SamplingParams(seed=row) for row in range(B)]
    write_record("", HIDDEN, WEIGHT, requests, 0, output, prompt_token_ids=prompts)


def of_logits(name: str, *given: Any, **named: Any) -> Callable[[], object]:
    """Return a call of a function of the reference with a batch of two rows that ask for logprobs.

    Args:
        given: its logits, and what comes behind the batch.
    """
    call = getattr(reference, name)
    return lambda: call(given[0], batch_of(logprobs=1), *given[1:], **named)


LOGITS = HIDDEN @ WEIGHT.T
HEAD = reference.logits
POSITIVE = "a finite fp32 number > 0, got"
A_MATRIX = "expected a floating-point tensor [{}], got"
REFERENCE: dict[str, tuple[Callable[[], object], str]] = {
    **{
        f"{name} of the reference at a position below 0": (
            of_logits(name, LOGITS, torch.tensor([3, -1])),
            "positions: expected 0 <= position < 2^63, got -1; pass the index of the token being "
            "generated, the number of tokens before it",
        )
        for name in ("sample", "scores")
    },
    **{
        f"scores of sample {value}": (
            of_logits("scores", LOGITS, 0, sample=value),
            f"sample: expected an int from 0 to 1048575, got {value}",
        )
        for value in (-1, 1.5)
    },
    "a soft-cap of 0 for the reference": (
        lambda: HEAD(HIDDEN, WEIGHT, logit_softcap=0.0),
        f"logit_softcap: expected None or {POSITIVE} 0.0",
    ),
    "a scale below 0 for the reference": (
        lambda: HEAD(HIDDEN, WEIGHT, logit_scale=-1.0),
        f"logit_scale: expected {POSITIVE} -1.0",
    ),
    "a bias of one value for the reference": (
        lambda: HEAD(HIDDEN, WEIGHT, bias=torch.ones(1)),
        "bias: expected a tensor [20] of any float on cpu, one value per row of lm_head_weight, "
        "got torch.float32 (1,) on cpu",
    ),
    "a weight that is turned": (
        lambda: HEAD(HIDDEN[:, :1].expand(B, V), WEIGHT),
        "hidden_states: expected D = 4 columns on cpu as lm_head_weight [V, D] has, got "
        "torch.float32 (2, 20) on cpu; if lm_head_weight is [D, V], pass lm_head_weight.T",
    ),
    "hidden states of numpy for the reference": (
        lambda: HEAD(np.ones((1, 1)), WEIGHT),  # type: ignore[arg-type]
        f"hidden_states: {A_MATRIX.format('B, D')} array([[1.]]); pass torch.tensor(hidden_states)",
    ),
    "hidden states of all positions for the reference": (
        lambda: HEAD(HIDDEN.unsqueeze(0), WEIGHT),
        f"hidden_states: {A_MATRIX.format('B, D')} torch.float32 (1, 2, 4) on cpu; pass those of "
        "the last position, hidden_states[:, -1]",
    ),
    "a list for logits": (
        of_logits("sample", [[0.0]], 0),
        f"logits: {A_MATRIX.format('B, V')} [[0.0]]; pass torch.tensor(logits)",
    ),
    "logits of all positions": (
        of_logits("sample", LOGITS.unsqueeze(0), 0),
        f"logits: {A_MATRIX.format('B, V')} torch.float32 (1, 2, 20) on cpu; pass those of the "
        "last position, logits[:, -1]",
    ),
    "requests for a batch of the reference": (
        lambda: reference.sample(LOGITS, [request()] * B, 0),  # type: ignore[arg-type]
        "batch: expected a SamplingBatch, got list; see SamplingBatch.from_params",
    ),
    "logprobs of an id outside the vocabulary": (
        of_logits("logprobs", LOGITS, torch.tensor([0, V])),
        "token_ids: expected ids below V = 20, got 20; a row without a token has -1",
    ),
    "logprobs of other rows": (
        of_logits("logprobs", LOGITS, torch.tensor([[0]])),
        "token_ids: expected a tensor [2, num_samples] of int64 on cpu, got torch.int64 (1, 1) on "
        "cpu",
    ),
}
UNKNOWN = {
    "max_tokens": "when an answer ends is the engine's to decide, between two steps",
    "stop": "texts that end an answer are the engine's to look for; for ids see stop_token_ids",
    "n": "give each answer a request with a seed of its own, or call the sampler with num_samples=",
    "best_of": "answers are not ranked; give each a request with a seed of its own",
    "prompt_logprobs": "see LMHeadSampler.prompt_logprobs",
    "logits_processors": "functions of the logits are not supported; see logit_bias",
    "generator": "give each request seed=, an int of 64 bits",
    "top_logprobs": "give logprobs= the number of tokens to report",
    "temprature": "did you mean temperature?",
}
"""By name of a field that requests do not have, the way out."""
FIXED = {
    "temperature": "it stays in its place; write batch.temperature[:] = values",
    "seed": "it stays in its place; write batch.seed[:] = values",
    "requests": "call update, add, drop or arrange to change the requests",
    "max_rows": "build a new batch",
    "vocab_size": "build a new batch",
    "plan": "call update, add, drop or arrange to change the requests",
}
"""By attribute of a batch that cannot be set, the way out."""
REQUESTS: dict[str, tuple[Callable[[], object], str]] = {
    **{
        name: (
            lambda name=name: request(**{name: 2}),
            f"{name}: not a field of SamplingParams; {way_out}",
        )
        for name, way_out in UNKNOWN.items()
    },
    **{
        f"{name} of a batch": (
            lambda name=name: setattr(batch_of(), name, 64),
            f"{name}: is fixed once SamplingBatch is built; {way_out}",
        )
        for name, way_out in FIXED.items()
    },
    **{
        f"{name} of a selection": (
            lambda name=name: setattr(batch_of().select(torch.tensor([0])), name, 0.5),
            f"{name}: is fixed once Selection is built; {way_out}",
        )
        for name, way_out in (
            ("temperature", "it stays in its place; write batch.temperature[:] = values"),
            ("device", "build a new batch"),
        )
    },
    "bad_words of ids": (
        lambda: SamplingParams(bad_words=[5, 6]),
        "bad_words: expected sequences of token ids, such as [[5, 6]], got 5 among them; words of "
        "text are the tokenizer's to encode",
    ),
    **{
        f"one id as {name}": (
            lambda name=name, one=one: request(**{name: one}),
            f"{name}: expected a sequence of token ids, got {got}",
        )
        for name, one, got in (
            ("allowed_token_ids", torch.tensor(1), "torch.int64 () on cpu; of one id pass [1]"),
            ("logprob_token_ids", 5, "5; of one id pass [5]"),
            ("stop_token_ids", np.array(5), "array(5)"),
        )
    },
    "one id among bad words": (
        lambda: request(bad_words=[torch.tensor(5)]),
        "bad_words: expected sequences of token ids, such as [[5, 6]], got torch.int64 () on cpu "
        "among them; words of text are the tokenizer's to encode",
    ),
    "one id for prompts": (
        lambda: SamplingBatch.from_params(
            [request()],
            vocab_size=V,
            prompt_token_ids=torch.tensor(5),  # type: ignore[arg-type]
        ),
        "prompt_token_ids: expected one list of token ids per row, got torch.int64 () on cpu",
    ),
    **{
        f"a temperature that is a {type(value).__name__}": (
            lambda value=value: request(temperature=value),
            f"temperature: expected a finite fp32 number >= 0, got {got}; give float(…) of it",
        )
        for value, got in (
            (torch.tensor(0.7), "torch.float32 () on cpu"),
            ("0.7", "'0.7'"),
            (Decimal("0.7"), "Decimal('0.7')"),
        )
    },
    "a temperature that is a word": (
        lambda: request(temperature="hot"),
        "temperature: expected a finite fp32 number >= 0, got 'hot'",
    ),
    "a bias that forbids": (
        lambda: request(logit_bias={5: -float("inf")}),
        "logit_bias[5]: expected a finite number, got -inf; to forbid the id give bad_words=[[5]]",
    ),
    "two biases of one id": (
        lambda: request(logit_bias={torch.tensor(5): 1.0, torch.tensor(5): 2.0}),
        "logit_bias: expected one bias of each id, got more of 5",
    ),
    "a bias that is a tensor": (
        lambda: request(logit_bias={5: torch.tensor(1.0)}),
        "logit_bias[5]: expected a finite number, got torch.float32 () on cpu; give float(…) of it",
    ),
    "prompts of numpy": (
        lambda: SamplingBatch.from_params(
            [request()],
            vocab_size=V,
            prompt_token_ids=np.array([[5, 6]]),  # type: ignore[arg-type]
        ),
        "prompt_token_ids: expected one list of token ids per row, got array([[5, 6]]); pass "
        "prompt_token_ids.tolist()",
    ),
    "a seed too long to write": (
        lambda: request(seed=10**5000),
        "seed: expected None or an int of 64 bits, got an int of 16610 bits",
    ),
    "a number too long to write for a seed": (
        lambda: seed_of(10**5000, 1),
        "seed_of: expected an int from -9223372036854775808 to 18446744073709551615, got an int of "
        "16610 bits",
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
        lambda: batch_of(min_tokens=1, stop_token_ids=[V]),
        "stop_token_ids: expected ids in [0, 20), got 20",
    ),
    "nothing left to draw": (
        lambda: SamplingParams(allowed_token_ids=[5], bad_words=[[5]]),
        "allowed_token_ids: bad_words and min_tokens forbid every id in it, so no token is left; "
        "allow another id",
    ),
    "fields without their names": (
        lambda: SamplingParams(0.7, 1),
        "SamplingParams: expected every field by its name, such as temperature=0.7, got 0.7 "
        "without a name; give it one",
    ),
    "a mask for allowed ids": (
        lambda: SamplingParams(allowed_token_ids=[0, 1, 1, 0]),
        "allowed_token_ids: expected each id once, got some repeatedly; of a mask take the ids, "
        "mask.nonzero().flatten().tolist()",
    ),
    "a bias that comes later": (
        lambda: SamplingParams(logit_bias={1: 1.0}).logit_bias.update({7: 1000.0}),
        "a request is frozen; make another by dataclasses.replace",
    ),
    "ids to stop at": (
        lambda: SamplingParams(stop_token_ids=[2]),
        "stop_token_ids has no effect without min_tokens, because it names the ids that min_tokens "
        "holds back; end the text yourself when one of them is drawn",
    ),
    "a request put into the listing of a batch": (
        lambda: operator.setitem(batch_of().requests, 0, SamplingParams()),
        "'tuple' object does not support item assignment",
    ),
    "one prompt in place of one per row": (
        lambda: SamplingBatch.from_params([SamplingParams()], vocab_size=V, prompt_token_ids=[5]),
        "prompt_token_ids[0]: expected a sequence of token ids, got 5; a batch takes one per row, "
        "such as [[5, 6], []]",
    ),
    "a field for update": (
        lambda: batch_of().update(0, temperature=0.3),
        "update: expected a whole SamplingParams, got temperature=0.3; pass "
        "dataclasses.replace(batch.requests[0], temperature=0.3)",
    ),
    "a device that is not here": (
        lambda: SamplingBatch.from_params([], vocab_size=V, device="cuda:99"),
        "device: torch has no 'cuda:99' here (",
    ),
    "a device of torch that is not installed": (
        lambda: SamplingBatch.from_params([], vocab_size=V, device="hpu"),
        "device: torch has no 'hpu' here (",
    ),
    "half a top_k on the host": (
        lambda: of_columns(top_k=torch.tensor([2, 3]), host={"top_k": [2.5, 3]}),
        "host: expected numbers of top_k, got [2.5, 3]",
    ),
    "a temperature that is written to a selection": (
        written,
        "selection.temperature: is a copy of the batch's, so nothing reads what was written to it; "
        "write batch.temperature[slots] = values",
    ),
    "names in a set": (
        lambda: engine_rows().arrange({"a"}, lambda _: None),  # type: ignore[arg-type, return-value]
        "names: expected a list of the rows' names, got {'a'}",
    ),
    "a name of no request": (
        lambda: engine_rows().arrange(["a"], lambda _: None),  # type: ignore[arg-type, return-value]
        "load: expected an EngineRequest of 'a', got None",
    ),
    "a recorded prompt that is flat": (
        lambda: recorded([5, 6]),
        "prompt_token_ids[0]: expected a sequence of token ids, got 5; a batch takes one per row, "
        "such as [[5, 6], []]",
    ),
    "a recorded prompt of no ids": (
        lambda: recorded([[0.5], []]),
        "prompt_token_ids[0]: expected token ids, got 0.5",
    ),
    "tokens of other rows": (
        lambda: batch_of(frequency_penalty=1).append(torch.zeros(3, dtype=torch.int64)),
        "token_ids: expected the tokens of 2 rows, as the batch has, got 3 rows",
    ),
    "a mask of rows that left": (
        with_stale_mask,
        "batch.forced_token_ids: rows of the batch joined, left, moved or changed since it was "
        "assigned; assign it anew, or None",
    ),
    "min_tokens without the ids it holds back": (
        lambda: request(min_tokens=2),
        "min_tokens=2 has no effect without the ids it holds back; give them in stop_token_ids, "
        "the end-of-sequence id among them",
    ),
    "an update without the tokens so far": (
        lambda: batch_of(frequency_penalty=1).update(0, SamplingParams(frequency_penalty=2)),
        "output_token_ids: expected the tokens so far of row 0, which penalties, bad_words and "
        "min_tokens refer to; pass [] if there are none",
    ),
    "more requests than rows": (
        lambda: batch_of().add(SamplingParams()),
        "params: 3 rows exceed max_rows=2; drop rows, or build the batch with a larger max_rows",
    ),
    "one request for all rows": (
        lambda: SamplingBatch.from_params(SamplingParams(seed=1), vocab_size=V),  # type: ignore[arg-type]
        "params: expected a list of SamplingParams, one per row, got a single one; pass "
        "[params] * B, or params.fork(B) if it has a seed",
    ),
    "a sampler that comes late": (
        late,
        "batch: tokens were appended before a sampler of VocabShard(start=0, stop=20) first saw "
        "it, so their counts are not known there; call batch.prepare(shard) before the first "
        "append, or build a new batch with output_token_ids=",
    ),
    "tokens that nobody appended": (
        two_steps,
        "batch: a step at later positions, and no token was appended since the last one, so "
        "penalties, bad_words and min_tokens do not see it; call batch.append(out.token_ids) "
        "after each step, and let a drafter draw of copy.copy(batch) and append its drafts to that",
    ),
    "a selection of rows that moved": (
        moved,
        "batch: requests joined, left, moved or changed since this selection was made; call "
        "batch.select again",
    ),
    "a mask by slot for a verification": (
        verified,
        "batch.forced_token_ids: has a row per slot, but a verification needs one per position; "
        "assign one to the selection",
    ),
    "a mask of other rows": (
        lambda: forced([3, 9, 4, 5]),
        "batch.forced_token_ids: expected a row for each of the 2 rows of the step, got 4; assign "
        "another",
    ),
    "requests in a set": (
        lambda: SamplingBatch.from_params({SamplingParams(seed=1)}, vocab_size=V),  # type: ignore[arg-type]
        "params: expected a list of SamplingParams, one per row, got set",
    ),
    "an order in a set": (
        lambda: batch_of().permute({1, 0}),  # type: ignore[arg-type]
        "order: expected a list, got a set, which has no order",
    ),
    "slots in a set": (
        lambda: slots_of().put({0, 1}, [request()] * B),  # type: ignore[arg-type]
        "slots: expected a list, got a set, which has no order",
    ),
    "a bad word in a set": (
        lambda: request(bad_words=[{5, 6}]),
        "bad_words: expected sequences of token ids, such as [[5, 6]], got {5, 6} among them; "
        "words of text are the tokenizer's to encode",
    ),
    "ids to report in a set": (
        lambda: request(logprob_token_ids={5, 6}),
        "logprob_token_ids: expected a sequence of token ids, got {5, 6}",
    ),
    "tokens so far in a set": (
        lambda: batch_of(frequency_penalty=1).update(
            0,
            request(frequency_penalty=1),
            output_token_ids={5, 6},  # type: ignore[arg-type]
        ),
        "output_token_ids[0]: expected a sequence of token ids, got {5, 6}; a batch takes one per "
        "row, such as [[5, 6], []]",
    ),
    "a row that is a text": (
        lambda: batch_of().drop("0"),  # type: ignore[arg-type]
        "rows: expected rows in [0, 2), got '0'",
    ),
    "a row that leaves twice": (
        lambda: batch_of().drop([0, 0]),
        "rows: expected each row once, got [0, 0]",
    ),
    "an update of a row that is not there": (
        lambda: batch_of().update(9, request()),
        "row: expected rows in [0, 2), got [9]",
    ),
    "a row that is none": (
        lambda: batch_of().drop(None),  # type: ignore[arg-type]
        "rows: expected rows in [0, 2), got None",
    ),
    "fewer slots than none": (
        lambda: SamplingBatch.of_slots(-1, vocab_size=V),
        "slots: expected an int from 0 to 1048576, got -1",
    ),
    "a name among others": (
        lambda: request(ties=np.array(["exact", "keep"])),
        "ties: expected one of exact, keep, got array(['exact', 'keep'], dtype='<U5')",
    ),
    "seeds for no batch": (
        lambda: sampler_over().draw_seeds(None),  # type: ignore[arg-type]
        "batch: expected a SamplingBatch, got NoneType; see SamplingBatch.from_params",
    ),
    "a batch by its name": (
        lambda: SamplingBatch([], vocab_size=V),  # type: ignore[arg-type]
        "SamplingBatch: is not built by its name, got []; call SamplingBatch.from_params(params, "
        "vocab_size=…), from_tensors or of_slots",
    ),
    "drafts of rows without a seed": (
        lambda: batch_of(seed=None)._with_drafts(torch.zeros(B, 1, dtype=torch.int64)),
        "batch: rows without a seed; draw them first, see draw_seeds",
    ),
}

# -- samplers ----------------------------------------------------------------------------------

GIVE = "give it to each request, SamplingParams({}=…)"
STRIDED = torch.ones(D, B).T
"""Hidden states whose last axis is not contiguous."""


def changed() -> object:
    """Take a step of a screened sampler whose weight was made greater."""
    weight = WEIGHT.clone()
    sampler = LMHeadSampler(weight, screening="int8", max_rows=4)
    weight.mul_(3)
    return sampler(HIDDEN, batch_of(), 0)


def with_weight(change: Callable[[torch.Tensor], object]) -> object:
    """Take a step after the weight of the sampler was changed."""
    weight = WEIGHT.clone()
    sampler = sampler_over(weight)
    change(weight)
    return sampler(HIDDEN, batch_of(), 0)


def on_a_cpu_alone() -> object:
    """Ask for kernels in a process without the interpreter of Triton."""
    with mock.patch.object(construction, "interpreted", return_value=False):
        return sampler_over(backend="triton")


def step_of(sampler: LMHeadSampler) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a step as a function of the hidden states."""
    batch = batch_of()
    return lambda hidden_states: sampler(hidden_states, batch, 0).token_ids


def traced() -> object:
    """Trace a step as TorchScript does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(step_of(sampler_over()), HIDDEN)


def made_up() -> object:
    """Build a sampler where tensors have shapes alone."""
    with FakeTensorMode():
        return LMHeadSampler(torch.ones(V, D))


def refused(
    function: Callable[..., object], name: str, sampler: LMHeadSampler | None = None
) -> None:
    """Call a function with a name that it does not have, beside those that it needs."""
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    right = {"self": sampler, "sampler": sampler, "lm_head_weight": WEIGHT}
    function(**{each: right.get(each) for each in [*needed, name]})


UNREAD: dict[tuple[Any, str], str] = {
    (LMHeadSampler, "softcap"): "did you mean logit_softcap?",
    (LMHeadSampler, "process_group"): "did you mean group?",
    (LMHeadSampler, "generator"): "give each request seed=, an int of 64 bits",
    (LMHeadSampler.__call__, "generator"): "give each request seed=, an int of 64 bits",
    (LMHeadSampler.__call__, "temperature"): GIVE.format("temperature"),
    (LMHeadSampler.sample_logits, "top_p"): GIVE.format("top_p"),
    (verify, "seed"): GIVE.format("seed"),
    (verify, "draft_probs"): "pass draft_logits=, the drafter's logits before temperature",
    (verify_logits, "position"): "did you mean positions?",
    (sample_draft, "temperature"): GIVE.format("temperature"),
    (sample, "seed"): GIVE.format("seed"),
}
"""By function and a name that it has no argument of, the way out."""
MAKERS = (LMHeadSampler, sample)
"""Functions that need no sampler."""
READS_NUMBERS = ", and this call reads them; make it outside, or inside torch.compile"


SAMPLERS: dict[str, tuple[Callable[[], object], str]] = {
    **{
        f"{name} for {of.__qualname__}": (
            lambda of=of, name=name: refused(of, name),
            f"{name}: not an argument of {of.__qualname__}; {way_out}",
        )
        for (of, name), way_out in UNREAD.items()
        if of in MAKERS
    },
    "a module without a weight": (
        lambda: LMHeadSampler(torch.nn.ReLU()),
        "lm_head_weight: expected a tensor [V_local, D], or a module with one as its weight, got "
        "ReLU()",
    ),
    "a model for a weight": (
        lambda: LMHeadSampler(Model()),
        "lm_head_weight: expected a tensor [V_local, D], or a module with one as its weight, got "
        "Model; pass its "
        ".lm_head.weight, and bias=its .lm_head.bias",
    ),
    "a head that is wrapped": (
        lambda: LMHeadSampler(torch.nn.DataParallel(torch.nn.Linear(D, V, bias=False))),
        "lm_head_weight: expected a tensor [V_local, D], or a module with one as its weight, got "
        "DataParallel( (module): Linear(in_features=4, out_features=20, bias=False) ); pass its "
        ".module.weight",
    ),
    "a head that is quantised as it runs": (
        lambda: LMHeadSampler(QuantisedHead()),
        "lm_head_weight: expected a tensor [V_local, D], or a module with one as its weight, got "
        "QuantisedHead(); a quantised head makes its logits itself: pass them to sample_logits of "
        "a sampler over torch.empty(V_local, 0)",
    ),
    "a bias of another dtype": (
        lambda: LMHeadSampler(WEIGHT, bias=torch.zeros(V).double()),
        "bias: expected fp32, bf16 or fp16 [20] on cpu, one value per row of lm_head_weight, got "
        "torch.float64 (20,) on cpu; convert it with .to(weight.device, torch.float32)",
    ),
    "a bias without the padding of its weight": (
        lambda: LMHeadSampler(WEIGHT, vocab_size=V - 2, bias=torch.zeros(V - 2)),
        "bias: expected fp32, bf16 or fp16 [20] on cpu, one value per row of lm_head_weight, got "
        "torch.float32 (18,) on cpu; a padded weight needs a padded bias, or pass the rows without "
        "padding",
    ),
    "a column for a bias": (
        lambda: LMHeadSampler(WEIGHT, bias=torch.zeros(V, 2)[:, 0]),
        "bias: expected contiguous values, got strides (2,); call .contiguous()",
    ),
    "a transposed weight": (
        lambda: LMHeadSampler(WEIGHT.T),
        "lm_head_weight: expected [V_local, D] with a contiguous last axis, got (4, 20) with "
        "strides (1, 4); call .contiguous(), or pass .T of it if it is [D, V_local]",
    ),
    "a weight [D, V]": (
        lambda: LMHeadSampler(WEIGHT.T.contiguous())(HIDDEN, batch_of(), 0),
        "hidden_states: expected D = 20 columns as lm_head_weight has, got torch.float32 (2, 4) on "
        "cpu; logits go to sample_logits; or lm_head_weight is [D, V_local]: build the sampler of "
        "lm_head_weight.T.contiguous()",
    ),
    "one process with too few rows": (
        lambda: LMHeadSampler(WEIGHT, vocab_size=V + 1),
        "lm_head_weight: rank 0 needs 21 rows for its shard VocabShard(start=0, stop=21), got 20; "
        "name the rows that it has by shard=, or pass .T.contiguous() of it if it is [D, V_local]",
    ),
    "a weight without numbers": (
        lambda: LMHeadSampler(torch.nn.Linear(D, V, device="meta")),
        "lm_head_weight: is on the meta device, so it has no numbers; build the sampler after the "
        "weights are loaded",
    ),
    "rows that are mapped": (
        lambda: torch.vmap(step_of(sampler_over()), out_dims=None)(HIDDEN.unsqueeze(0)),
        "hidden_states: has no numbers of its own inside a transform of torch.func, such as vmap"
        + READS_NUMBERS,
    ),
    "a batch that is built inside a transform": (
        lambda: torch.func.grad(lambda _: batch_of())(HIDDEN),
        "batch: has no numbers of its own inside a transform of torch.func, such as vmap"
        + READS_NUMBERS,
    ),
    "a call that torch records": (
        lambda: make_fx(step_of(sampler_over()))(HIDDEN),
        "hidden_states: has no numbers of its own inside make_fx" + READS_NUMBERS,
    ),
    "a call that an older torch records": (
        traced,
        "hidden_states: has no numbers of its own inside torch.jit.trace" + READS_NUMBERS,
    ),
    "a weight that is made up": (
        made_up,
        "lm_head_weight: has no numbers of its own inside FakeTensorMode" + READS_NUMBERS,
    ),
    "a scale in a tensor": (
        lambda: LMHeadSampler(WEIGHT, logit_scale=torch.tensor(2.0)),  # type: ignore[arg-type]
        "logit_scale: expected a finite fp32 number > 0, got torch.float32 () on cpu; give "
        "float(…) of it",
    ),
    "a scale beyond fp32": (
        lambda: LMHeadSampler(WEIGHT, logit_scale=1e300),
        "logit_scale: expected a finite fp32 number > 0, got 1e+300",
    ),
    "a soft-cap that is 0 in fp32": (
        lambda: LMHeadSampler(WEIGHT, logit_softcap=1e-60),
        "logit_softcap: expected None or a finite fp32 number > 0, got 1e-60",
    ),
    "a sparse weight": (
        lambda: LMHeadSampler(WEIGHT.to_sparse()),
        "lm_head_weight: expected a dense tensor, got one of layout torch.sparse_coo; pass "
        "lm_head_weight.to_dense()",
    ),
    "a weight that is two": (
        lambda: LMHeadSampler(TwoTensor(WEIGHT, WEIGHT)),
        "lm_head_weight: expected a tensor with its numbers in its own memory, got a TwoTensor "
        "without memory; pass a plain tensor of these numbers",
    ),
    "fewer rows of a weight": (
        lambda: with_weight(lambda weight: setattr(weight, "data", weight.data[:10])),
        "lm_head_weight: expected torch.float32 (20, 4) on cpu with strides (4, 1), as the sampler "
        "was built over, got torch.float32 (10, 4) on cpu with strides (4, 1); build a new "
        "LMHeadSampler over it",
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
    "an output under another name": (
        lambda: getattr(sampler_over()(HIDDEN, batch_of(), 0), "tokens"),  # noqa: B009
        "SampleOutput has no 'tokens'; it has token_ids, status, seeds, logprobs, kept",
    ),
    "a typing error of an attribute": (
        lambda: setattr(batch_of(), "forced_tokens_ids", torch.tensor([3, 9])),
        "forced_tokens_ids: not an attribute of SamplingBatch; did you mean forced_token_ids?",
    ),
    "an 8-bit copy of no weight": (
        lambda: LMHeadSampler(torch.empty(V, 0), screening="int8"),
        'screening: "int8" needs a weight of 1 to 131072 columns, lm_head_weight has 0; leave it '
        "out",
    ),
    "an 8-bit copy of too many columns": (
        lambda: LMHeadSampler(torch.empty(V, 2**17 + 1), screening="int8"),
        'screening: "int8" needs a weight of 1 to 131072 columns, lm_head_weight has 131073; leave '
        "it out",
    ),
    "an 8-bit copy without a kernel": (
        lambda: LMHeadSampler(WEIGHT, screening="int8", backend="torch"),
        'screening: "int8" needs backend "triton" or "numba", got "torch": use backend="auto"',
    ),
    "an 8-bit copy of another weight": (
        changed,
        "lm_head_weight: changed after the sampler had made its 8-bit copy of it, so screened "
        "tokens could be wrong; call sampler.refresh() on every rank",
    ),
    "kernels without a GPU": (
        on_a_cpu_alone,
        'backend: "triton" needs a GPU, lm_head_weight is on cpu; use backend="auto", or set '
        "TRITON_INTERPRET=1 before Python starts",
    ),
    "a bias that came later": (
        lambda: LMHeadSampler(WEIGHT).refresh(bias=torch.zeros(V)),
        "bias: the sampler was built without; build a new one",
    ),
    "another kind of weight": (
        lambda: LMHeadSampler(WEIGHT).refresh(WEIGHT.bfloat16()),
        "lm_head_weight: expected torch.float32 (20, 4) on cpu with strides (4, 1), as the sampler "
        "was built over, got torch.bfloat16 (20, 4) on cpu with strides (4, 1); build a new "
        "LMHeadSampler over it",
    ),
    "all positions of prompts": (
        lambda: sampler_over().prompt_logprobs(HIDDEN.unsqueeze(0), torch.zeros(1, B).long()),
        "hidden_states: expected a tensor [B, 4], got torch.float32 (1, 2, 4) on cpu; a step takes "
        "the last position, hidden_states[:, -1], and prompt_logprobs all, "
        "hidden_states.flatten(0, 1)",
    ),
    "hidden states for no weight": (
        lambda: sampler_over(torch.empty(V, 0))(HIDDEN, batch_of(), 0),
        "hidden_states: this sampler has no weight, lm_head_weight is [20, 0]; call sample_logits, "
        "or build it over the LM head",
    ),
    "no sampler for drafts": (
        lambda: sample_draft(None, torch.ones(B, V), batch_of(), 0, 0),  # type: ignore[arg-type]
        "sampler: expected an LMHeadSampler, got None",
    ),
    "a batch for the sampler of a verification": (
        lambda: verify(batch_of(), torch.ones(B, 1, D), torch.zeros(B, 0).long(), batch_of(), 0),  # type: ignore[arg-type]
        "sampler: expected an LMHeadSampler, got SamplingBatch(2 rows of at most 2, vocab_size=20, "
        "on cpu)",
    ),
    "no sampler for a verification of logits": (
        lambda: verify_logits(None, torch.ones(B, 1, V), torch.zeros(B, 0).long(), batch_of(), 0),  # type: ignore[arg-type]
        "sampler: expected an LMHeadSampler, got None",
    ),
    "an output for a status": (
        lambda: sampler_over().count_failed([0, 1]),  # type: ignore[arg-type]
        "status: expected a tensor [B] of int32 on cpu, of an output of a call, got [0, 1]",
    ),
    "a sampler for a module": (
        lambda: sampler_over().forward(HIDDEN, batch_of(), 0),  # type: ignore[attr-defined]
        "LMHeadSampler has no forward; call it as sampler(hidden_states, batch, positions)",
    ),
    "a method of a module": (
        lambda: sampler_over().eval(),  # type: ignore[attr-defined]
        "LMHeadSampler has no eval; it is no module, and follows the weight that it was given",
    ),
}

# -- steps -------------------------------------------------------------------------------------


POSITIONS = torch.zeros(B, dtype=torch.int64)


def _over(ids: torch.Tensor) -> SampleOutput:
    """Return an output whose tokens are written over `ids`."""
    return SampleOutput(token_ids=ids, status=ids.int(), seeds=ids.clone())


@torch.inference_mode()
def _of_inference_mode() -> SampleOutput:
    ids = torch.zeros(B, dtype=torch.int64)
    return SampleOutput(token_ids=ids, status=ids.int(), seeds=ids.clone())


def inside_a_step(sampler: LMHeadSampler) -> object:
    """Take a step whose hidden states take another one, whatever torch does with them."""

    class Stepping(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **named: Any) -> Any:
            tokens(sampler, position=1)
            return super().__torch_function__(*args, **named)

    return sampler(HIDDEN.as_subclass(Stepping), batch_of(), 0)


def freed_temperatures() -> SamplingBatch:
    batch = batch_of()
    free_memory(batch.temperature)
    return batch


def drafts_of(sampler: LMHeadSampler) -> list[Draft]:
    """Return drafts of two rows, and of one."""
    columns = len(sampler.shard)
    first = Draft(torch.zeros(2).long(), torch.ones(2, columns), 0, "coupled", torch.zeros(2))
    second = Draft(torch.zeros(1).long(), torch.ones(1, columns), 1, "coupled", torch.ones(1))
    return [first, second]


STEPS: dict[str, tuple[Callable[[LMHeadSampler], object], str]] = {
    "seeds of another dtype in other memory": (
        lambda sampler: tokens(sampler, moved_to("seed", torch.tensor([1, 2]).int())),
        "batch.seed: stays in its place, and got other memory, as by batch.seed.data = …, which "
        "nothing reads: torch.int32 (2,) on cpu; write batch.seed[:] = values",
    ),
    "more temperatures in other memory": (
        lambda sampler: tokens(sampler, moved_to("temperature", torch.ones(3))),
        "batch.temperature: stays in its place, and got other memory, as by batch.temperature.data "
        "= …, which nothing reads: torch.float32 (3,) on cpu; write batch.temperature[:] = values",
    ),
    "temperatures that were freed": (
        lambda sampler: tokens(sampler, freed_temperatures()),
        "batch.temperature: its storage has 0 of 12 bytes; give it its numbers back before the "
        "call, as FSDP's summon_full_params does",
    ),
    "drafts of other rows": (
        lambda sampler: verify(sampler, torch.ones(1, 3, D), drafts_of(sampler), batch_of(), 0),
        "draft_token_ids[1]: expected a draft of 2 rows, as the first is, got one of 1; draft "
        "every row each time, and give lengths= to verify",
    ),
    "a step in the middle of another": (
        inside_a_step,
        "sampler: this call began in the middle of another one of this thread, as in the handler "
        "of a signal; make it after that one has returned",
    ),
    **{
        f"{name} for {of.__qualname__}": (
            lambda sampler, of=of, name=name: refused(of, name, sampler),
            f"{name}: not an argument of {of.__qualname__}; {way_out}",
        )
        for (of, name), way_out in UNREAD.items()
        if of not in MAKERS
    },
    "a list for a batch": (
        lambda sampler: sampler(HIDDEN, [SamplingParams()] * B, 0),
        "batch: expected a SamplingBatch, got list; see SamplingBatch.from_params",
    ),
    "an output that was made under inference mode": (
        lambda sampler: sampler(HIDDEN, batch_of(), 0, out=_of_inference_mode()),
        "out.token_ids: expected a tensor that can be written to, got one made under "
        "torch.inference_mode; pass the output of an earlier call",
    ),
    "an output where the positions are": (
        lambda sampler: sampler(HIDDEN, batch_of(), POSITIONS, out=_over(POSITIONS)),
        "out.token_ids: expected memory of its own, got some that positions has; pass the output "
        "of an earlier call",
    ),
    "an output where the batch has its seeds": (
        lambda sampler: sampler(HIDDEN, batch := batch_of(), 0, out=_over(batch.seed)),
        "out.token_ids: expected memory of its own, got some that batch has; pass the output of "
        "an earlier call",
    ),
    "a batch of another vocabulary": (
        lambda sampler: sampler(HIDDEN, SamplingBatch.from_params([], vocab_size=V + 1), 0),
        "batch: expected vocab_size 20 as the sampler has, got 21",
    ),
    "a batch built under another default device": (
        lambda sampler: sampler(HIDDEN, under_meta(), 0),
        "batch: expected tensors on cpu, got meta; build it with device='cpu'",
    ),
    "another number of rows": (
        lambda sampler: sampler(torch.ones(3, D), batch_of(), 0),
        "batch: expected 3 rows, as hidden_states or logits have, got 2; pass one SamplingParams "
        "per row",
    ),
    "more rows than there is room for": (
        lambda sampler: sampler(torch.ones(5, D), SamplingBatch.from_params([], vocab_size=V), 0),
        "hidden_states: 5 rows × 1 samples exceed max_rows=4; build the sampler with a larger "
        "max_rows",
    ),
    "slots without a request": (
        lambda sampler: sampler(HIDDEN, slots_of(), 0),
        "batch: slots [1] have no request; name the slots of the step by batch.select, or drop "
        "these",
    ),
    "a selection of other rows": (
        lambda sampler: sampler(HIDDEN, batch_of().select(torch.tensor([1])), 0),
        "batch: expected 2 rows, as hidden_states or logits have, got a selection of 1 slots; pad "
        "slots with -1",
    ),
    "tensors that are made up": (
        lambda sampler: sampler(FakeTensorMode().from_tensor(HIDDEN), batch_of(), 0),
        "hidden_states: has no numbers of its own inside FakeTensorMode" + READS_NUMBERS,
    ),
    "a step without a batch": (
        lambda sampler: sampler(HIDDEN),  # type: ignore[call-arg]
        "LMHeadSampler.__call__() missing 2 required positional arguments: 'batch' and "
        "'positions'; call it as LMHeadSampler.__call__(hidden_states, batch, positions, *, "
        "num_samples=…, out=…)",
    ),
    "a step whose batch is None": (
        lambda sampler: sampler(HIDDEN, None, 0),  # type: ignore[arg-type]
        "batch: expected a SamplingBatch, got NoneType; see SamplingBatch.from_params",
    ),
    "hidden states as a DTensor": (
        lambda sampler: sampler(SHARDED, batch_of(), 0),
        "hidden_states: got a DTensor; pass the whole of it, the same on every rank, "
        "hidden_states.full_tensor()",
    ),
    "drafted logits as a DTensor": (
        lambda sampler: sample_draft(sampler, SHARDED, batch_of(), 0, 0),
        "draft_logits: got a DTensor; pass its part on this rank, draft_logits.to_local()",
    ),
    "hidden states of NumPy": (
        lambda sampler: sampler(np.ones((B, 100)), batch_of(), 0),
        "hidden_states: expected a tensor [B, 4], got ndarray array([[1., 1., 1., 1., 1., 1., 1., "
        "1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., …",
    ),
    "hidden states of another dtype": (
        lambda sampler: sampler(HIDDEN.bfloat16(), batch_of(), 0),
        "hidden_states: expected torch.float32 on cpu like lm_head_weight, got torch.bfloat16 "
        "(2, 4) on cpu; convert with .to(lm_head_weight)",
    ),
    "hidden states of whole sequences": (
        lambda sampler: sampler(torch.ones(B, 3, D), batch_of(), 0),
        "hidden_states: expected a tensor [B, 4], got torch.float32 (2, 3, 4) on cpu; a step "
        "takes the last position, hidden_states[:, -1], and prompt_logprobs all, "
        "hidden_states.flatten(0, 1)",
    ),
    "hidden states of one row": (
        lambda sampler: sampler(HIDDEN[0], batch_of(), 0),
        "hidden_states: expected a tensor [B, 4], got torch.float32 (4,) on cpu; one row is "
        "hidden_states.unsqueeze(0)",
    ),
    "no positions": (
        lambda sampler: sampler(HIDDEN, batch_of(), None),  # type: ignore[arg-type]
        "positions: expected an int or an int64 tensor [2] on cpu, got None; a position is "
        "the index, in its sequence, of the token being generated: the number of tokens before it",
    ),
    "a draft of coupled verification": (
        lambda sampler: verify(
            sampler,
            torch.ones(B, 2, D),
            torch.zeros(B, 1, dtype=torch.int64),
            batch_of(),
            0,
            draft_logits=torch.zeros(B, 1, V),
        ),
        'draft_logits: method="coupled" looks at no draft probabilities; leave it out, or choose '
        '"rejection" or "block"',
    ),
    "sparse hidden states": (
        lambda sampler: sampler(HIDDEN.to_sparse(), batch_of(), 0),
        "hidden_states: expected a dense tensor, got one of layout torch.sparse_coo; pass "
        "hidden_states.to_dense()",
    ),
    "hidden states that are two": (
        lambda sampler: sampler(TwoTensor(HIDDEN, HIDDEN), batch_of(), 0),
        "hidden_states: expected a tensor with its numbers in its own memory, got a TwoTensor "
        "without memory; pass a plain tensor of these numbers",
    ),
    "sparse positions": (
        lambda sampler: sampler(HIDDEN, batch_of(), torch.tensor([3, 4]).to_sparse()),
        "positions: expected a dense tensor, got one of layout torch.sparse_coo; pass "
        "positions.to_dense()",
    ),
    "a grammar that was freed": (
        lambda sampler: sampler(HIDDEN, masked("grammar_bitmask", free_memory), 0),
        "batch.grammar_bitmask: its storage has 0 of 8 bytes; give it its numbers back before the "
        "call, as FSDP's summon_full_params does",
    ),
    "a grammar of another width": (
        lambda sampler: sampler(HIDDEN, masked("grammar_bitmask", lambda m: m.resize_(B, 2)), 0),
        "batch.grammar_bitmask: expected a tensor [B, 1] of int32 on cpu, got torch.int32 (2, 2) "
        "on cpu",
    ),
    "forced ids that were freed": (
        lambda sampler: sampler(HIDDEN, masked("forced_token_ids", free_memory), 0),
        "batch.forced_token_ids: its storage has 0 of 16 bytes; give it its numbers back before "
        "the call, as FSDP's summon_full_params does",
    ),
    "kinds that can be read once": (
        lambda sampler: sampler.warm_up(iter(["plain"])),  # type: ignore[arg-type]
        "kinds: expected a list or a tuple, got <list_iterator object at ",
    ),
    "one number of rows for several": (
        lambda sampler: sampler.warm_up(["plain"], rows=2),  # type: ignore[arg-type]
        "rows: expected a list or a tuple, got 2",
    ),
    "strided hidden states": (
        lambda sampler: sampler(STRIDED, batch_of(), 0),
        "hidden_states: expected a contiguous last axis, got strides (1, 2); call .contiguous()",
    ),
    "strided logits": (
        lambda sampler: sampler.sample_logits((sampler.weight @ HIDDEN.T).T, batch_of(), 0),
        "local_logits: expected a contiguous last axis, got strides (1, 2); call .contiguous()",
    ),
    "a prompt without its next token": (
        lambda sampler: sampler.prompt_logprobs(HIDDEN, torch.tensor([1, -1])),
        "next_token_ids: expected ids in [0, 20), got -1; leave out the positions whose next "
        "token is not known",
    ),
    "more drafts than there is room for": (
        lambda sampler: verify(
            sampler, torch.ones(B, 3, D), torch.zeros(B, 2).long(), batch_of(), 0
        ),
        "hidden_states: 2 rows × 3 positions exceed max_rows=4; build the sampler with a larger "
        "max_rows",
    ),
}

# -- ranks that differ -------------------------------------------------------------------------


def _peer_of_many(sampler: LMHeadSampler, rank: int) -> object:
    with mock.patch.object(peer, "MAX_WORLD_SIZE", 1):
        return LMHeadSampler(half(rank), exchange="peer")


def _appended_on_one(sampler: LMHeadSampler, rank: int) -> object:
    batch = batch_of(presence_penalty=1)
    sampler(HIDDEN, batch, 0)
    if rank == 0:
        batch.append(torch.tensor([1, 2]))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            return sampler(HIDDEN, batch, 1)
        finally:  # the rank that forgot is told what to do, and no other
            assert sum("no token was appended" in str(each.message) for each in warned) == rank


def sharded(axis: int = 0) -> Any:
    """Return the weight as a DTensor."""
    return distribute_tensor(WEIGHT, init_device_mesh("cpu", (2,)), [Shard(axis)])


OWN_ROWS = (
    "; pass each rank its own rows, lm_head_weight[shard.start : shard.stop] with shard = "
    "VocabShard.even(vocab_size, rank, world_size)"
)
NO_SHARD = (
    "lm_head_weight: expected a shard of the 20 rows of the vocabulary, but every rank holds at "
    "least as many"
)
SAME_ROWS = "lm_head_weight: rank 0 and rank 1 hold the same {} rows"
SAME = "must be the same on every rank"


def _sliced(sampler: LMHeadSampler, rank: int) -> None:
    """Build samplers over weights, and heads without one, that are sliced as they should be."""
    shard = VocabShard.even(V, rank, 2)
    for rows in (half(rank), torch.zeros(V // 2, D), torch.cat([half(rank), half(0)[:rank]])):
        LMHeadSampler(rows, vocab_size=V)
    LMHeadSampler(half(rank))
    for columns in (V // 2, V // 2 + 1):
        LMHeadSampler(torch.empty(columns, 0), shard=shard)


class _Unready(torch.nn.Module):
    """A head whose weight raises an error that is about no argument."""

    @property
    def weight(self) -> torch.Tensor:
        raise OSError("its file is not there")


class _Unseen:
    """An object that raises an error when its class is asked for."""

    @property
    def __class__(self) -> type:
        raise OSError("its file is not there")


def sample_half(
    rank: int, params: Any = (), *, hidden_states: Any = HIDDEN, **options: Any
) -> None:
    """Sample in one call over this rank's half of the weight, by default for requests of B rows."""
    params = [request(seed=1)] * B if params == () else params
    sample(hidden_states, half(rank), params, positions=0, vocab_size=V, **options)


def half_or(rank: int, other: Callable[[], object]) -> LMHeadSampler:
    """Build a sampler, on rank 1 over something else than its half of the weight."""
    return LMHeadSampler(other() if rank else half(rank), vocab_size=V, backend="torch")  # type: ignore[arg-type]


def half_logits(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return logits over this rank's half of the vocabulary."""
    return (HIDDEN @ half(rank).T - 1).to(dtype)


TOGETHER: dict[str, tuple[Callable[[LMHeadSampler, int], object], str]] = {
    **{
        f"a warm-up with other {name}": (
            lambda sampler, rank, changes=changes: sampler.warm_up(
                **{"kinds": ["plain"], "rows": [1, 2], **(changes if rank else {})}
            ),
            "call: every rank must make the same call, got rank 0: warm_up of rows [1, 2], "
            f"num_samples None, num_drafts 0, kinds ['plain'], rank 1: warm_up of {told}",
        )
        for name, changes, told in (
            (
                "kinds",
                {"kinds": ["top_k"]},
                "rows [1, 2], num_samples None, num_drafts 0, kinds ['top_k']",
            ),
            ("rows", {"rows": [1]}, "rows [1], num_samples None, num_drafts 0, kinds ['plain']"),
            (
                "draws",
                {"num_samples": 2},
                "rows [1, 2], num_samples 2, num_drafts 0, kinds ['plain']",
            ),
            (
                "drafts",
                {"num_drafts": 1},
                "rows [1, 2], num_samples None, num_drafts 1, kinds ['plain']",
            ),
        )
    },
    "a prompt of other hidden states": (
        lambda sampler, rank: LMHeadSampler(half(rank), backend="torch").prompt_logprobs(
            HIDDEN + rank, torch.tensor([1, 2])
        ),
        "hidden_states: must be the same on every rank, by digest; look for a missing all-reduce "
        "or broadcast before the LM head, got ",
    ),
    "one call with draws of no kind on one rank": (
        lambda sampler, rank: sample_half(rank, num_samples=0 if rank else 2),
        "rank 1: num_samples: expected an int from 1 to 1048576, got 0",
    ),
    "one call with an id of no token on one rank": (
        lambda sampler, rank: sample_half(rank, [request(allowed_token_ids=[V * rank])] * B),
        "rank 1: allowed_token_ids: expected ids in [0, 20), got 20",
    ),
    "one call with requests of no kind on one rank": (
        lambda sampler, rank: sample_half(rank, None if rank else [request()] * B),
        "rank 1: params: expected ",
    ),
    "one call with an argument that it does not have on one rank": (
        lambda sampler, rank: sample_half(rank, **({"top_p": 0.9} if rank else {})),
        "rank 1: top_p: not an argument of sample; give it to each request, "
        "SamplingParams(top_p=…)",
    ),
    "one call with a number for hidden states on one rank": (
        lambda sampler, rank: sample_half(rank, hidden_states=HIDDEN[0, 0] if rank else HIDDEN),
        "rank 1: hidden_states: expected a tensor [B, 4], got ",
    ),
    "a weight that cannot be read on one rank": (
        lambda sampler, rank: half_or(rank, _Unready),
        "rank 1: its file is not there",
    ),
    "a weight whose class cannot be asked for on one rank": (
        lambda sampler, rank: half_or(rank, _Unseen),
        "rank 1: its file is not there",
    ),
    "a weight without a shape on one rank": (
        lambda sampler, rank: half_or(rank, torch.nn.UninitializedParameter),
        "rank 1: Can't access the shape of an uninitialized ",
    ),
    "a step inside torch.compile on one rank": (
        lambda sampler, rank: (
            torch.compile(tokens_and_all, backend="eager") if rank else tokens_and_all
        )(sampler, batch_of()),
        f"batch: read from: {SAME}; step inside torch.compile on every rank, or on none, got rank "
        "0: its requests, rank 1: a graph of torch.compile",
    ),
    "a selection on one rank": (
        lambda sampler, rank: sampler(
            HIDDEN, batch_of().select(torch.tensor([0, 1])) if rank else batch_of(), 0
        ),
        f"batch: taken: {SAME}, got rank 0: whole, rank 1: by slot",
    ),
    "logits of other dtypes": (
        lambda sampler, rank: sampler.sample_logits(
            half_logits(rank, (torch.bfloat16, torch.float16)[rank]), batch_of(), 0
        ),
        "call: every rank must make the same call, got rank 0: step from torch.bfloat16 logits, "
        "rank 1: step from torch.float16 logits",
    ),
    "other numbers of rows of logits": (
        lambda sampler, rank: sampler.sample_logits(
            half_logits(rank, torch.float32)[: 1 + rank],
            SamplingBatch.from_params([request(seed=1)] * (1 + rank), vocab_size=V),
            0,
        ),
        f"local_logits rows: {SAME}, got rank 0: 1, rank 1: 2",
    ),
    "drafts by logits of other dtypes": (
        lambda sampler, rank: verify(
            sampler,
            torch.ones(B, 2, D),
            torch.zeros(B, 1).long(),
            batch_of(),
            0,
            method="rejection",
            draft_logits=half_logits(rank, (torch.bfloat16, torch.float32)[rank]).unsqueeze(1),
        ),
        "call: every rank must make the same call, got rank 0: verify rejection by torch.bfloat16 "
        "logits, rank 1: verify rejection by torch.float32 logits",
    ),
    "requests with other temperatures": (
        lambda sampler, rank: sampler(HIDDEN, batch_of(temperature=0.5 + 0.25 * rank), 0),
        f"batch: row 0: temperature: {SAME}, got rank 0: 0.5, rank 1: 0.75",
    ),
    "a rank that skipped a step": (
        lambda sampler, rank: sampler(HIDDEN, batch_of(), torch.tensor([3, 4 + rank])),
        f"positions: row 1: {SAME}; a rank that skipped a step has others, got rank 0: 4, rank 1: "
        "5",
    ),
    "tokens appended on one rank alone": (
        _appended_on_one,
        f"tokens so far: row 0: {SAME}, by digest; every rank appends the same tokens as often, "
        "got ",
    ),
    "the whole weight on every rank": (
        lambda sampler, rank: LMHeadSampler(WEIGHT, vocab_size=V),
        NO_SHARD + OWN_ROWS,
    ),
    "the weight twice": (
        lambda sampler, rank: LMHeadSampler(WEIGHT.repeat(2, 1), vocab_size=V),
        NO_SHARD + OWN_ROWS,
    ),
    "all columns of a head without a weight": (
        lambda sampler, rank: LMHeadSampler(
            torch.empty(V, 0), vocab_size=V, shard=VocabShard.even(V, rank, 2)
        ),
        NO_SHARD + OWN_ROWS,
    ),
    "all columns of a head without a weight and no vocabulary size": (
        lambda sampler, rank: LMHeadSampler(torch.empty(V, 0), shard=VocabShard.even(V, rank, 2)),
        NO_SHARD + OWN_ROWS,
    ),
    "the whole weight and no vocabulary size": (
        lambda sampler, rank: LMHeadSampler(WEIGHT),
        SAME_ROWS.format(V) + OWN_ROWS,
    ),
    "the whole weight beside a shard": (
        lambda sampler, rank: LMHeadSampler(WEIGHT, shard=VocabShard.even(V, rank, 2)),
        SAME_ROWS.format(V) + OWN_ROWS,
    ),
    "the first half on every rank": (
        lambda sampler, rank: LMHeadSampler(half(0), vocab_size=V),
        SAME_ROWS.format(V // 2) + OWN_ROWS,
    ),
    "weights that are sliced": (_sliced, ""),
    "a head without a weight and no vocabulary size": (
        lambda sampler, rank: LMHeadSampler(torch.empty(10, 0)),
        "lm_head_weight: that of rank 0 has rows that are all alike, as before it is loaded, so "
        "its rows do not show where the vocabulary ends; pass vocab_size= or shard=",
    ),
    "rows that end in zeros, and no vocabulary size": (
        lambda sampler, rank: LMHeadSampler(torch.cat([half(rank), torch.zeros(rank, 4)])),
        "lm_head_weight: that of rank 1 ends in a row of zeros, as padding does, so its rows do "
        "not show where the vocabulary ends; pass vocab_size= or shard=",
    ),
    "padding behind the rows of every rank": (
        lambda sampler, rank: LMHeadSampler(torch.cat([half(rank), half(0)[:2]]), vocab_size=V),
        "lm_head_weight: the ranks' 12, 12 rows are 20 ids in two ways, ids 0 to 10, 10 to 20 "
        "with padding behind the rows of each rank, or ids 0 to 12, 12 to 20 with padding at the "
        "end; pass shard=VocabShard.even(vocab_size, rank, world_size), or "
        "VocabShard.padded(vocab_size, rank, world_size, multiple=24) as Megatron and vLLM pad",
    ),
    "rows that are the ids in another way than evenly": (
        lambda sampler, rank: LMHeadSampler(WEIGHT.roll(-11 * rank, 0)[: 11 - rank], vocab_size=V),
        "lm_head_weight: the ranks' 11, 10 rows are 20 ids in two ways, ids 0 to 10, 10 to 20 "
        "with padding behind the rows of each rank, or ids 0 to 11, 11 to 20 with padding at the "
        "end; pass shard=VocabShard.even(vocab_size, rank, world_size) or the shards of the "
        "second reading",
    ),
    "exchange='peer' without a kernel": (
        lambda sampler, rank: LMHeadSampler(half(rank), exchange="peer", backend="torch"),
        'exchange: "peer" is not possible here: rank 0: backend "torch" has no kernel that writes '
        "to peers; use a GPU, or the interpreter with TRITON_INTERPRET=1; rank 1: backend "
        '"torch" has no kernel that writes to peers; use a GPU, or the interpreter with '
        'TRITON_INTERPRET=1; or use exchange="collective"',
    ),
    "more ranks than peer takes": (
        _peer_of_many,
        'exchange: "peer" takes up to 1 ranks, got 2; use exchange="collective"',
    ),
    "a shard on one rank alone": (
        lambda sampler, rank: LMHeadSampler(half(rank), shard=None if rank else VocabShard(0, 10)),
        "shard: give it on every rank or on none, got ",
    ),
    "a shard beside a DTensor": (
        lambda sampler, rank: LMHeadSampler(sharded(), shard=VocabShard(0, V)),
        "rank 0: shard: lm_head_weight is a DTensor whose rows on this rank are "
        "VocabShard(start=0, stop=10), got VocabShard(start=0, stop=20); leave shard= out; rank "
        "1: ",
    ),
    "a group beside a DTensor": (
        lambda sampler, rank: LMHeadSampler(sharded(), group="alone"),
        "rank 0: group: lm_head_weight is a DTensor over ranks [0, 1], axis 0 of its mesh, got "
        "'alone'; leave group= out; rank 1: ",
    ),
    "columns of a DTensor": (
        lambda sampler, rank: LMHeadSampler(sharded(axis=1)),
        "rank 0: lm_head_weight: expected Shard(0) on one axis of the mesh and Replicate() on all "
        "others, so that each rank of that axis holds rows of its own; got a DTensor placed "
        "(Shard(dim=1),); redistribute it, or pass a plain tensor with shard= and group=; rank 1: ",
    ),
}
