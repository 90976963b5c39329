"""Steps from hidden states to tokens: tpsample's, and what engines do with whole logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks import baselines
from benchmarks.problem import Problem, WrongToken
from benchmarks.serving.trace import Request
from benchmarks.whole_logits import all_gather
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard
from tpsample.cli.model import Model
from tpsample.distributed import Job


class Candidate(ABC):
    """One way to draw the tokens of a step, at temperature 1.

    Attributes:
        name, kind: in the results.
    """

    name: str
    kind: str

    @abstractmethod
    def begin(self) -> None:
        """Forget the requests of an earlier round."""

    @abstractmethod
    def arrange(self, order: Sequence[int], joining: Sequence[Request]) -> None:
        """Let rows leave, stay and join, as in `SamplingBatch.arrange`."""

    @abstractmethod
    def step(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """Return int64 tokens [n] of the arranged rows. Collective."""

    @abstractmethod
    def check(self, problem: Problem, token_ids: Tensor) -> None:
        """See that the tokens of a step were right.

        Raises:
            WrongToken: they were not.
        """


class TPSample(Candidate):
    """`LMHeadSampler` over this rank's shard."""

    name, kind = "tpsample", "tpsample"

    def __init__(self, model: Model, job: Job, slots: int) -> None:
        shard = VocabShard.even(model.lm_head_weight.shape[0], job.rank, job.world_size)
        weight = model.lm_head_weight[shard.start : shard.stop]
        self.vocab_size, self.device = model.lm_head_weight.shape[0], job.device
        self.slots = slots
        self.sampler = LMHeadSampler(
            weight, shard=shard, vocab_size=self.vocab_size, max_rows=slots
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


class AllGather(Candidate):
    """Local logits, an all-gather, and a sampler of whole logits on every rank, equally seeded."""

    kind = "baseline"

    def __init__(self, model: Model, job: Job) -> None:
        self.name = f"all-gather + {baselines.RACE}" if job.world_size > 1 else baselines.RACE
        self.vocab_size, self.world_size = model.lm_head_weight.shape[0], job.world_size
        shard = VocabShard.even(self.vocab_size, job.rank, job.world_size)
        self.width = len(VocabShard.even(self.vocab_size, 0, job.world_size))
        self.part = model.lm_head_weight.new_zeros(self.width, model.lm_head_weight.shape[1])
        self.part[: len(shard)] = model.lm_head_weight[shard.start : shard.stop]
        self.sample = baselines.compiled(baselines.softmax_race, self.part.device)

    def begin(self) -> None:
        torch.manual_seed(0)

    def arrange(self, order: Sequence[int], joining: Sequence[Request]) -> None:
        pass  # all rows are alike, and draw from one generator

    def step(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        return self.sample(self.logits(hidden_states))

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Whole logits [n, V]. Collective."""
        local = hidden_states @ self.part.T
        if self.world_size == 1:
            return local
        parts = local.new_empty(self.world_size, *local.shape)
        all_gather(parts.view(-1, self.width), local)
        return parts.transpose(0, 1).reshape(len(local), -1)[:, : self.vocab_size]

    def check(self, problem: Problem, token_ids: Tensor) -> None:
        """Its noise is its own, so its logits are compared. Collective."""
        exact = problem.hidden_states.double() @ problem.weight.double().T
        error = (self.logits(problem.hidden_states) - exact).abs().amax()
        if not float(error) <= 0.02 * float(exact.abs().amax()):
            raise WrongToken(f"{self.name}: logits differ from the product by {float(error):.3g}")
        if bool(((token_ids < 0) | (token_ids >= self.vocab_size)).any()):
            raise WrongToken(f"{self.name}: a token is outside the vocabulary")
