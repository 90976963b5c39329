"""Importance ratios of a rollout before the first update, with and without its kept sets.

Two groups of texts per prompt are drawn with top_p and top_k. A trainer then scores every token by
the same weights, so each ratio of probabilities is 1 but for what differs in between:

    replayed     over the set that the filters kept      the law that the token was drawn from
    all ids      over the whole vocabulary               the same logits without the filters

once from the hidden states of the rollout, and once from hidden states that the trainer computes
anew. The trainer computes whole texts at a time, whose sums have another order. Every rank has the
whole trunk, and its rows of the head. Ranks' scores are compared with those over the whole head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.lab.harness import Benchmark, Run
from benchmarks.lab.problem import DTYPES
from benchmarks.lab.results import Row, View
from benchmarks.questions.screen_candidates import PROMPTS
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, seed_of
from tpsample.cli.model import Model, load
from tpsample.training import KeptTokens, kept_logprobs

TEMPERATURE, TOP_P, TOP_K, GROUP, TOKENS = 1.0, 0.8, 2000, 4, 16
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 0.999, 1.001, 1.01, 1.1, 1.5, 2.0, 10.0)
"""Of the bins of ratios; the first bin has all below, under the name 0.01."""


@dataclass
class Rollout:
    """The tokens of some texts, step by step.

    Attributes:
        inputs: int64 [B, L], prompt and drawn tokens but the last.
        drawn: int64 [T · B], the tokens, a step's after the other.
        logprobs: float64 [T · B], those of the sampler.
        states: [T · B, D], the hidden states that they were drawn from.
        kept: their sets.
    """

    inputs: Tensor
    drawn: Tensor
    logprobs: Tensor
    states: Tensor
    kept: KeptTokens


@torch.inference_mode()
def roll_out(model: Model, sampler: LMHeadSampler, prompt: int, tokens: int) -> Rollout:
    """Draw a group of texts that go on from one prompt."""
    asked = {"temperature": TEMPERATURE, "top_p": TOP_P, "top_k": TOP_K}
    params = [
        SamplingParams(
            **asked,  # type: ignore[arg-type]
            seed=seed_of(1, prompt, sample),
            logprobs=0,
            logprobs_mode="processed_logprobs",
        )
        for sample in range(GROUP)
    ]
    batch = SamplingBatch.from_params(params, vocab_size=sampler.vocab_size, kept_cap=TOP_K)
    feed = torch.tensor([model.prompt_token_ids(PROMPTS[prompt])] * GROUP)
    inputs, cache, steps = [feed], None, []
    for position in range(feed.shape[1], feed.shape[1] + tokens):
        trunk = model.causal_lm.base_model(feed, past_key_values=cache, use_cache=True)
        states, cache = trunk.last_hidden_state, trunk.past_key_values
        out = sampler(states[:, -1].contiguous(), batch, position)
        assert out.logprobs is not None and out.kept is not None
        kept = KeptTokens.of_step(out.kept)
        steps.append((out.token_ids, out.logprobs.values[:, 0], states[:, -1], kept))
        feed = out.token_ids.unsqueeze(1)
        inputs.append(feed)
    drawn, logprobs, states_of, sets = zip(*steps, strict=True)
    numbers = torch.cat(inputs[:-1], dim=1), torch.cat(drawn), torch.cat(logprobs)
    return Rollout(*numbers, torch.cat(states_of), KeptTokens.cat(sets))


@torch.inference_mode()
def anew(model: Model, rollout: Rollout, tokens: int) -> Tensor:
    """Return the hidden states [T · B, D] that a trainer computes of whole texts."""
    states = model.causal_lm.base_model(rollout.inputs, use_cache=False).last_hidden_state
    return states[:, -tokens:].transpose(0, 1).flatten(0, 1)


def facts(ratios: Tensor) -> dict[str, float]:
    """Return what a page says of ratios of probabilities."""
    outside = ((ratios < 0.9) | (ratios > 1.1)).double().mean()
    return {
        "mean": ratios.mean().item(),
        "least": ratios.min().item(),
        "most": ratios.max().item(),
        "exactly_1_percent": 100 * (ratios == 1).double().mean().item(),
        "outside_percent": 100 * outside.item(),
    }


def rows(run: Run) -> Iterator[list[Row]]:
    """Yield the facts and the histogram of each dtype, source of hidden states and way to score."""
    job, tokens = run.job, 4 if run.tiny else TOKENS
    run.note(
        f"The bundled model, {len(PROMPTS)} prompts, {GROUP} texts each of {tokens} tokens; "
        f"T {TEMPERATURE}, top_p {TOP_P}, top_k {TOP_K}. Ratios of the trainer's probability of a "
        "token to the sampler's, before any update. Counts, no times: they hold on any machine of "
        "the same trunk. Tokens, log-probabilities and scores of all ranks together equal those of "
        "one rank with the whole head, bit for bit."
    )
    for dtype in ("fp32", "bf16"):
        model = load(None, job, DTYPES[dtype])
        weight = model.lm_head.weight.detach()
        shard = VocabShard.even(len(weight), job.rank, job.world_size)
        own = weight[shard.start : shard.stop]
        whole: dict[str, Any] = {"vocab_size": len(weight), "max_rows": GROUP}
        with LMHeadSampler(own, **whole) as sampler:
            rollouts = [roll_out(model, sampler, each, tokens) for each in range(len(PROMPTS))]
        with LMHeadSampler(weight, group="alone", **whole) as sampler:
            for prompt, its in enumerate(rollouts):
                other = roll_out(model, sampler, prompt, tokens)
                if not (its.drawn.equal(other.drawn) and its.logprobs.equal(other.logprobs)):
                    raise AssertionError(f"{dtype}, prompt {prompt}: ranks draw otherwise than one")
        found: dict[tuple[str, str], list[Tensor]] = {}
        for its in rollouts:
            none = KeptTokens.from_lists([None] * len(its.drawn))
            for source, states in (("rollout's", its.states), ("anew", anew(model, its, tokens))):
                for way, kept in (("replayed", its.kept), ("all ids", none)):
                    given = states.clone(), own, its.drawn, kept, TEMPERATURE
                    scores = kept_logprobs(*given, shard=shard).logprobs
                    alone = kept_logprobs(given[0], weight, *given[2:], group="alone").logprobs
                    if not torch.equal(scores, alone):
                        raise AssertionError(f"{dtype}, {way}: ranks score otherwise than one")
                    found.setdefault((source, way), []).append((scores - its.logprobs).exp())
        sizes = torch.cat([its.kept.sizes for its in rollouts]).double()
        for (source, way), parts in found.items():
            ratios = torch.cat(parts)
            point: Row = {
                "shape": f"{dtype}, hidden states {source}",
                "world_size": job.world_size,
                "batch": len(ratios),
                "kind": "tpsample",
                "candidate": way,
                "mean_size": sizes.mean().item(),
            }
            bins = torch.bucketize(ratios, torch.tensor(EDGES, dtype=ratios.dtype), right=True)
            shares = 100 * bins.bincount(minlength=len(EDGES) + 1).double() / len(ratios)
            yield [
                {**point, **facts(ratios), "of": "all"},
                *(
                    {**point, "of": "bin", "ratio": edge, "percent": share}
                    for edge, share in zip((0.01, *EDGES), shares.tolist(), strict=True)
                ),
            ]


_NUMBERS = {
    "mean": "Mean ratio",
    "least": "Least ratio",
    "most": "Largest ratio",
    "exactly_1_percent": "Tokens with a ratio of exactly 1, %",
    "outside_percent": "Tokens outside of 0.9 to 1.1, %",
    "mean_size": "Ids that a set has, mean",
}
BENCHMARK = Benchmark(
    "replay",
    "How far from 1 are importance ratios, with and without the kept sets of the rollout?",
    [
        View("ratios", "Tokens by ratio, %, from this ratio to the next", x="ratio", y="percent",
             where={"of": "bin"}),
        *(View("", title, x="world_size", y=y, where={"of": "all"})
          for y, title in _NUMBERS.items()),
    ],
    rows,
    by_default=False,
)  # fmt: skip
