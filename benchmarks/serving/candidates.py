"""Steps from hidden states to tokens: tpsample's, and what engines do with whole logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.lab import baselines, whole_logits
from benchmarks.lab.problem import Problem, WrongToken
from benchmarks.serving.trace import Request
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard
from tpsample.cli.model import Model
from tpsample.distributed import Job


class Candidate(Protocol):
    """One way to draw the tokens of a step, at temperature 1.

    Attributes:
        name, kind: in the results.
    """

    name: str
    kind: str

    def begin(self) -> None:
        """Forget the requests of an earlier round."""

    def arrange(self, order: Sequence[int], joining: Sequence[Request]) -> None:
        """Let rows leave, stay and join, as in `SamplingBatch.arrange`."""

    def step(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """Return int64 tokens [n] of the arranged rows. Collective."""

    def check(self, problem: Problem, token_ids: Tensor) -> None:
        """See that the tokens of a step were right.

        Raises:
            WrongToken: they were not.
        """


class TPSample:
    """`LMHeadSampler` over this rank's shard."""

    name = kind = "tpsample"

    def __init__(self, model: Model, job: Job, slots: int) -> None:
        self.vocab_size, self.device, self.slots = len(model.lm_head_weight), job.device, slots
        shard = VocabShard.even(self.vocab_size, job.rank, job.world_size)
        self.sampler = LMHeadSampler(
            model.lm_head_weight[shard.start : shard.stop],
            shard=shard,
            vocab_size=self.vocab_size,
            max_rows=slots,
        )
        self.begin()

    def begin(self) -> None:
        self.batch: SamplingBatch | None = None

    def arrange(self, order: Sequence[int], joining: Sequence[Request]) -> None:
        params = [SamplingParams(temperature=1.0, seed=each.seed) for each in joining]
        if self.batch is not None:
            self.batch.arrange(order, params)
        else:
            self.batch = SamplingBatch.from_params(
                params, vocab_size=self.vocab_size, device=self.device, max_rows=self.slots
            )

    def step(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        assert self.batch is not None
        return self.sampler(hidden_states, self.batch, positions).token_ids

    def check(self, problem: Problem, token_ids: Tensor) -> None:
        problem.check(token_ids)


class AllGather:
    """Local logits, an all-gather, and a sampler of whole logits on every rank, equally seeded."""

    kind = "baseline"

    def __init__(self, model: Model, job: Job) -> None:
        self.name = f"all-gather + {baselines.RACE}" if job.world_size > 1 else baselines.RACE
        self.way = whole_logits.AllGather(model.lm_head_weight, job.rank, job.world_size)
        self.sample = baselines.compiled(baselines.softmax_race, job.device)

    def begin(self) -> None:
        torch.manual_seed(0)

    def arrange(self, order: Sequence[int], joining: Sequence[Request]) -> None:
        """Nothing is kept: all rows are alike, and draw from one generator."""

    def step(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        return self.way.tokens(hidden_states, self.sample)

    def check(self, problem: Problem, token_ids: Tensor) -> None:
        """Compare its logits, since its noise is its own. Collective."""
        exact = problem.hidden_states.double() @ problem.weight.double().T
        error = float((self.way.logits(problem.hidden_states) - exact).abs().amax())
        if not error <= 0.02 * float(exact.abs().amax()):
            raise WrongToken(f"{self.name}: logits differ from the product by {error:.3g}")
        if bool(((token_ids < 0) | (token_ids >= problem.vocab_size)).any()):
            raise WrongToken(f"{self.name}: a token is outside the vocabulary")
