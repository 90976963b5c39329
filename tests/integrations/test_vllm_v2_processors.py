"""Custom logits processors of vLLM's runner V2: right by absolute ids on shards, or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support import vllm_fakes as fakes
from tests.support.ranks import run_ranks, same_on_ranks
from tests.support.vllm_fakes import V
from tests.support.vllm_steps import HIDDEN, PROMPTS, REQUESTS, WEIGHT, rows_of, step_v2, v2
from tpsample import SamplingBatch, VocabShard, reference
from tpsample.integrations.vllm_params import to_params
from tpsample.integrations.vllm_v2_processors import V2Processors, custom_processors


class OfVllm:
    """One of vLLM's own, which the adapter does not call."""

    __module__ = "vllm.v1.worker.gpu.sample.penalties"


class Scales:
    """Halves the logits of the slots that ask for it."""

    slots = (1, 3)

    def apply(self, logits: torch.Tensor, context: Any) -> torch.Tensor:
        wanted = torch.isin(context.expanded_idx_mapping, torch.tensor(self.slots))
        assert len(context.pos) == len(context.input_ids) == len(logits)
        return torch.where(wanted.unsqueeze(1), logits / 2, logits)


class Bans:
    """Forbids every third id of its own vocabulary, in place."""

    def apply(self, logits: torch.Tensor, context: Any) -> torch.Tensor:
        assert logits.shape[1] == V
        logits[:, ::3] = -torch.inf
        logits[:, 100] += 1.5
        return logits


class Lifts:
    """Lifts the ids of a prompt with a penalty."""

    def apply(self, logits: torch.Tensor, context: Any) -> torch.Tensor:
        logits[:, 4:7] = 3 * logits[:, 4:7].abs()
        return logits


class Softmaxes:
    def apply(self, logits: torch.Tensor, context: Any) -> torch.Tensor:
        return 20 * logits.softmax(dim=1)


class Best:
    """Adds to the best id alone, which is of one rank."""

    def apply(self, logits: torch.Tensor, context: Any) -> torch.Tensor:
        best = logits.argmax(dim=1, keepdim=True)
        return logits.scatter_add(1, best, torch.full((len(logits), 1), 9.0))


def serving(processors: list[Any], group: Any = "alone", **config: Any) -> Any:
    """A runner with processors, whose requests all ask for them."""
    runner = v2(group=group, fused=False, **config)
    own = runner.sampler._own
    own.logits_processors = [OfVllm(), *processors]
    own.needs_logits_processing = np.ones(runner.max_num_reqs, dtype=bool)
    its = runner.sampler.steps.head.kept.sampler
    runner.sampler.processors = V2Processors(own, SimpleNamespace, its)
    return runner


def defined(names: str, processors: list[Any], hidden: torch.Tensor) -> list[int]:
    """The oracle's tokens behind prompts: controls, then processors, then all else."""
    params = [to_params(REQUESTS[name], V, "raw_logprobs") for name in names]
    prompts = [PROMPTS[name] for name in names]
    batch = SamplingBatch.from_params(params, vocab_size=V, prompt_token_ids=prompts)
    logits = reference.processed_logits(reference.logits(hidden, WEIGHT), batch)
    slots = torch.tensor([list(REQUESTS).index(name) + 1 for name in names])
    context = SimpleNamespace(expanded_idx_mapping=slots, pos=slots, input_ids=slots)
    for processor in processors:
        logits = processor.apply(logits, context)
    plain = batch._view_of(len(names))._replace(controls=None)
    at = torch.tensor([len(prompt) for prompt in prompts])
    found: list[int] = reference.sample(logits, plain, at).token_ids.tolist()
    return found


def test_processors_are_those_that_are_not_vllms():
    own = SimpleNamespace(logits_processors=[OfVllm(), its := Scales()])
    assert custom_processors(own) == [its]


@pytest.mark.parametrize(
    "its", [[Scales(), Bans()], [Softmaxes()], [Best()]], ids=["two", "softmax", "best"]
)
def test_one_rank_has_any_processor_behind_penalties(its):
    runner, names = serving(its), "cadb"
    out = step_v2(runner, list(names), rows_of(names))
    assert out.sampled_token_ids[:, 0].tolist() == defined(names, its, rows_of(names))
    assert defined(names, its, rows_of(names)) != defined(names, [], rows_of(names))


def test_penalties_count_once_before_a_processor():
    for hidden in HIDDEN:
        out = step_v2(serving([Lifts()]), ["c"], hidden.unsqueeze(0))
        assert out.sampled_token_ids[0].tolist() == defined("c", [Lifts()], hidden.unsqueeze(0))


def test_rows_without_a_processor_and_those_that_are_compared_are_as_ever():
    runner, names = serving([Bans()]), "cadb"
    runner.sampler._own.needs_logits_processing[:] = False
    out = step_v2(runner, list(names), rows_of(names))
    assert out.sampled_token_ids[:, 0].tolist() == defined(names, [], rows_of(names))
    for compared, its in ((True, []), (False, [Bans()])):
        runner = serving([Bans()])
        with runner.sampler.steps.head.kept.given(torch.clone, compared=compared):
            out = step_v2(runner, list(names), rows_of(names))
        assert out.sampled_token_ids[:, 0].tolist() == defined(names, its, rows_of(names))


def _two_ranks() -> list[int]:
    runner = serving([Scales(), Bans()], None, shard=VocabShard.even(V, dist.get_rank(), 2))
    out = step_v2(runner, list("cadb"), rows_of("cadb"))
    found: list[int] = out.sampled_token_ids[:, 0].tolist()
    return found


def test_two_ranks_have_processors_that_index_absolute_ids():
    assert same_on_ranks(2, _two_ranks) == defined("cadb", [Scales(), Bans()], rows_of("cadb"))


def _refused() -> list[str]:
    said = []
    for its in (Softmaxes(), Best()):
        runner = serving([its], None, shard=VocabShard.even(V, dist.get_rank(), 2))
        try:
            step_v2(runner, list("cadb"), rows_of("cadb"))
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_processor_that_looks_at_other_ranks_ids_is_refused_by_name():
    for said in run_ranks(2, _refused):
        for name, told in zip(("Softmaxes", "Best"), said, strict=True):
            assert told.startswith(f"--logits-processors: {name} computes a logit from those of")
            assert "--tensor-parallel-size 1" in told


def test_the_fakes_head_multiplies_where_a_processor_wants_logits():
    assert not serving([Bans()]).sampler.steps.head.fused
    assert fakes.head_of(fakes.runner()).fused
