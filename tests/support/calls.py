"""Every collective call, and the constructor: right arguments, wrong ones, and those that ranks
compare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tpsample import (
    LMHeadSampler,
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    VocabShard,
    sample_draft,
    verify,
    verify_logits,
)

V, D, B, K, MAX_ROWS = 10, 4, 2, 1, 8
SHARD = V // 2


def params_of(**changes: Any) -> list[SamplingParams]:
    return [SamplingParams(**{"seed": 1 + row, **changes}) for row in range(B)]


def batch_of(vocab_size: int = V, rows: list[SamplingParams] | None = None) -> SamplingBatch:
    rows = params_of() if rows is None else rows
    return SamplingBatch.from_params(rows, vocab_size=vocab_size)


@dataclass(frozen=True)
class Argument:
    """An argument of a call on two ranks.

    Attributes:
        right: its value.
        wrong: values that are refused whatever the other rank passes.
        other: a value that is right by itself, but not beside `right` on the other rank.
        told: how the error of that begins; "" if ranks do not compare the argument.
    """

    right: Any
    wrong: tuple[Any, ...]
    other: Any = None
    told: str = ""


def _batches(**other: Any) -> Argument:
    wrong = (None, [SamplingParams()], batch_of(V + 1), batch_of(rows=params_of()[:1]))
    (name,) = other
    return Argument(batch_of(), wrong, batch_of(rows=params_of(**other)), f"batch: row 0: {name}")


def _twice(integers: torch.Tensor) -> SampleOutput:
    """Return an output whose tokens and seeds are one tensor."""
    return SampleOutput(token_ids=integers, status=integers.int(), seeds=integers)


_POSITIONS = Argument(
    3, (None, 1.0, -1, True, torch.zeros(B + 1).long(), torch.zeros(B)), 4, "positions"
)
_DRAFTED = {
    "draft_token_ids": Argument(
        torch.zeros(B, K).long(),
        (None, torch.zeros(B, K), torch.zeros(B).long(), [[1], [2]]),
        torch.ones(B, K).long(),
        "draft_token_ids",
    ),
    "batch": _batches(top_k=3),
    "positions": _POSITIONS,
    "method": Argument("block", ("typical", None, "coupled"), "rejection", "call"),
    "draft_logits": Argument(
        torch.zeros(B, K, SHARD),
        (torch.zeros(B, K, V), "draft", torch.zeros(B, K, SHARD).long()),
        None,
        "call",
    ),
    "lengths": Argument(
        torch.tensor([K] * B),
        ([K] * B, torch.zeros(B), torch.zeros(B + 1).long(), torch.zeros(B, 1).long()),
        torch.tensor([0] * B),
        "draft_token_ids",
    ),
}
CALLS: dict[str, dict[str, Argument]] = {
    "step": {
        "hidden_states": Argument(
            torch.ones(B, D),
            (
                None,
                torch.zeros(D),
                torch.zeros(B, D + 1),
                torch.zeros(B, D).bfloat16(),
                torch.zeros(D, B).T,
                torch.zeros(5, D),
            ),
        ),
        "batch": _batches(top_k=3),
        "positions": _POSITIONS,
        "num_samples": Argument(None, (0, True, 5, "2"), 2, "num_samples"),
        "out": Argument(
            None,
            (
                SampleOutput.empty(torch.zeros(1).long(), None),
                SampleOutput.empty(torch.zeros(B).long(), 1),
                _twice(torch.zeros(B).long()),
                "out",
            ),
        ),
    },
    "verify": {
        "hidden_states": Argument(
            torch.ones(B, K + 1, D),
            (
                None,
                torch.ones(B, K + 2, D),
                torch.ones(B, K + 1, D).bfloat16(),
                torch.ones(B, D, K + 1).transpose(1, 2),
            ),
        ),
        **_DRAFTED,
    },
    "verify_logits": {
        "local_logits": Argument(
            torch.zeros(B, K + 1, SHARD),
            (
                None,
                torch.zeros(B, K + 2, SHARD),
                torch.zeros(B, K + 1, V),
                torch.zeros(B, K + 1, SHARD).double(),
            ),
        ),
        "head_applied": Argument(True, (None, "yes")),
        **_DRAFTED,
    },
    "sample_draft": {
        "draft_logits": Argument(
            torch.zeros(B, SHARD),
            (None, torch.zeros(B, V), torch.zeros(B), torch.zeros(B, SHARD).long()),
        ),
        "batch": _batches(temperature=0.5),
        "positions": _POSITIONS,
        "index": Argument(0, (0.5, "a", 2**70, -1, None, True), 1, "index"),
        "method": Argument("rejection", ("typical", None), "block", "call"),
    },
    "prompt_logprobs": {
        "hidden_states": Argument(
            torch.ones(3, D),
            (None, torch.ones(3, D + 1), torch.ones(3), torch.ones(3, D).half()),
        ),
        "next_token_ids": Argument(
            torch.tensor([1, 2, 3]),
            (None, torch.tensor([1, 2, V]), torch.tensor([1, 2, -1]), torch.ones(3)),
            torch.tensor([1, 2, 4]),
            "next_token_ids",
        ),
        "top": Argument(1, (-1, 1.0, None, V + 1), 2, "top"),
    },
    "sample_logits": {
        "local_logits": Argument(
            torch.zeros(B, SHARD),
            (
                None,
                torch.zeros(B, V),
                torch.zeros(SHARD),
                torch.zeros(B, SHARD).double(),
                torch.zeros(5, SHARD),
                torch.zeros(SHARD, B).T,
            ),
        ),
        "batch": _batches(top_k=3),
        "positions": _POSITIONS,
        "num_samples": Argument(2, (0, 1.0), 3, "num_samples"),
        "head_applied": Argument(False, (None, 1)),
        "out": Argument(None, (1, SampleOutput.empty(torch.zeros(B).long(), 3))),
    },
}
CONSTRUCTOR: dict[str, Argument] = {
    "lm_head_weight": Argument(
        torch.zeros(SHARD, D),
        (
            None,
            torch.zeros(SHARD),
            torch.zeros(SHARD, D, dtype=torch.int64),
            torch.zeros(SHARD, D, dtype=torch.float64),
            torch.zeros(D, SHARD).T,
            torch.zeros(2, D),
        ),
        torch.zeros(SHARD, D + 1),
        "hidden_size",
    ),
    "vocab_size": Argument(V, (0, -1, 2**20 + 1, 2.5, "10", True), V - 1, "vocab_size"),
    "shard": Argument(
        None, ((0, 5), VocabShard(0, 6), VocabShard(8, 13)), VocabShard(4, 9), "shard"
    ),
    "group": Argument(None, ("world", 3)),
    "bias": Argument(
        None,
        (
            torch.zeros(SHARD - 1),
            torch.zeros(SHARD, dtype=torch.int64),
            [0.0] * SHARD,
            torch.zeros(SHARD, 1),
        ),
        torch.zeros(SHARD),
        "bias",
    ),
    "logit_scale": Argument(1.0, (0, -1.0, float("nan"), "1", None), 2.0, "logit_scale"),
    "logit_softcap": Argument(None, (0.0, -30.0, float("inf"), "30"), 30.0, "logit_softcap"),
    "max_rows": Argument(512, (0, -4, 1.5, 2**20 + 1), 128, "max_rows"),
    "exchange": Argument("collective", ("nccl", None, 1), "p2p", "exchange"),
    "chunks": Argument(1, (0, 65, 1.0), 2, "chunks"),
    "backend": Argument("torch", ("cuda", None), "triton", "backend"),
    "screening": Argument(None, ("fp8", True, 8)),  # it may differ between ranks
    "on_failed": Argument(-1, (-2, 1.0, None, 2**20), 3, "on_failed"),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "step": LMHeadSampler.__call__,
    "verify": verify,
    "verify_logits": verify_logits,
    "sample_draft": sample_draft,
    "prompt_logprobs": LMHeadSampler.prompt_logprobs,
    "sample_logits": LMHeadSampler.sample_logits,
}


def call(sampler: LMHeadSampler, name: str, **changes: Any) -> Any:
    """Make a call with right arguments, but for some."""
    if name == "LMHeadSampler":
        shard = VocabShard.even(V, dist.get_rank(), 2)
        right = {argument: each.right for argument, each in CONSTRUCTOR.items()}
        return LMHeadSampler(**right | {"shard": shard} | changes)
    with torch.inference_mode(False):  # as a caller makes a batch before it steps
        right = {argument: copy.deepcopy(each.right) for argument, each in CALLS[name].items()}
    return FUNCTIONS[name](sampler, **right | changes)


def head_of(rank: int) -> torch.Tensor:
    weight = torch.randn(V, D, generator=torch.Generator().manual_seed(1))
    return weight[SHARD * rank : SHARD * (rank + 1)].clone()


def sampler_of(exchange: str = "collective", **arguments: Any) -> LMHeadSampler:
    """This rank's sampler; of two, each has half of the head."""
    backend = "triton" if exchange == "peer" else "torch"
    how = {"exchange": exchange, "backend": backend, "max_rows": MAX_ROWS}
    return LMHeadSampler(head_of(dist.get_rank()), **how | arguments)


def step(sampler: LMHeadSampler, batch: SamplingBatch | None = None) -> list[int]:
    batch = batch or batch_of()
    return sampler(torch.ones(batch.rows, D), batch, 0).token_ids.tolist()


def outcome(function: Callable[[], Any]) -> tuple[str, str]:
    """The kind and the text of what a call raised."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing raised", ""
