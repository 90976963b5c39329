"""Distance of the emitted law to the target against the number of samples, beside direct draws.

A correct verification comes as close as direct draws from the target do, for any drafter; a biased
one stops getting closer. One biased on purpose is among the curves to show it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.lab.harness import Benchmark, Run
from benchmarks.lab.results import Row, View
from tpsample import SamplingBatch, reference
from tpsample.noise import tile_noise
from tpsample.speculative import laws
from tpsample.speculative import reference as speculative
from tpsample.speculative.checks import Method
from tpsample.speculative.streams import DOMAIN_DRAFT, stream

VOCAB_SIZE = 256
SEEDS, TINY_SEEDS = 2**16, 2**9
CHUNK = 2**10
NUM_DRAFTS = 2
DIRECT, PLANTED = "direct", "planted: recovery from p"
DRAFTS = ("uniform", "anti-ranked", "near the target")
METHODS: tuple[Method, ...] = ("coupled", "rejection", "block")
LOG2_E = 1.4426950408889634


def target_logits() -> Tensor:
    """Return the logits of a Zipf law over shuffled ids, fp32 [V]."""
    rank = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    return -1.1 * (1 + rank).double().log().float()


def draft_logits(kind: str, target: Tensor) -> Tensor:
    """Return the drafter's logits, fp32 [V]."""
    if kind == "uniform":
        return torch.zeros_like(target)
    if kind == "anti-ranked":
        return -target
    noise = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    return target + 0.5 * noise


def verified_tokens(kind: str, method: Method, seeds: Tensor) -> Tensor:
    """Return the first two tokens of each seed, int64 [2 B], of one verification of two drafts.

    A plain draw is the second where it emits a single token.
    """
    target, rows = target_logits(), len(seeds)
    draft = draft_logits(kind, target)
    drafts = []
    for index in range(NUM_DRAFTS):
        streams = stream(seeds.unsqueeze(1), torch.tensor([[index]]), index, DOMAIN_DRAFT)
        noise = tile_noise(streams, 0, VOCAB_SIZE, 10)
        drafts.append((draft.double() * LOG2_E - noise.double()).argmax(dim=1))
    batch = SamplingBatch.over(temperature=torch.ones(rows), seed=seeds, vocab_size=VOCAB_SIZE)
    out = speculative.verify(
        target.expand(rows, NUM_DRAFTS + 1, -1),
        torch.stack(drafts, dim=1),
        batch,
        0,
        method=method,
        draft=None if method == "coupled" else draft.expand(rows, NUM_DRAFTS, -1),
    )
    tokens = out.token_ids[:, :2]
    return torch.where(tokens >= 0, tokens, direct_tokens(seeds)[:, 1:]).flatten()


def direct_tokens(seeds: Tensor) -> Tensor:
    """Return two plain draws per seed, at positions that no verification looks at, int64 [B, 2]."""
    batch = SamplingBatch.over(
        temperature=torch.ones(len(seeds)), seed=seeds, vocab_size=VOCAB_SIZE
    )
    logits = target_logits().expand(len(seeds), -1)
    draws = [reference.sample(logits, batch, position).token_ids for position in (70, 71)]
    return torch.stack(draws, dim=1)


def distances(tokens: Tensor) -> list[tuple[int, float]]:
    """Return (samples, total variation to the target) at powers of 2."""
    law = target_logits().double().softmax(dim=0)
    found = []
    count = 2**8
    while count <= len(tokens):
        frequency = torch.bincount(tokens[:count], minlength=VOCAB_SIZE).double() / count
        found.append((count, float((frequency - law).abs().sum() / 2)))
        count *= 2
    return found


def rows(run: Run) -> Iterator[Row]:
    """Yield the distance at each number of samples, of each method and drafter."""
    run.note(
        f"The first two tokens of every seed, two drafts per verification, V = {VOCAB_SIZE}, a "
        "Zipf law, by the definition over full logits (`tpsample.speculative.reference`). The "
        "shards differ from it in no bit. A position that a verification does not reach is drawn "
        "plainly. Counts hold on any machine.",
    )
    chunks = torch.arange(TINY_SEEDS if run.tiny else SEEDS).split(CHUNK)
    direct = distances(torch.cat([direct_tokens(seeds).flatten() for seeds in chunks]))
    for method in METHODS:
        curves = {DIRECT: direct}
        for kind in DRAFTS:
            curves[kind] = _verified(kind, method, chunks)
        if method == "rejection":
            curves[PLANTED] = _planted(chunks)
        for name, points in curves.items():
            for count, distance in points:
                point: Row = {"shape": method, "batch": count, "candidate": name}
                kind = "gathered" if name == DIRECT else "tpsample"
                yield {**point, "kind": kind, "total_variation": distance}


def _verified(kind: str, method: Method, chunks: tuple[Tensor, ...]) -> list[tuple[int, float]]:
    return distances(torch.cat([verified_tokens(kind, method, seeds) for seeds in chunks]))


def _planted(chunks: tuple[Tensor, ...]) -> list[tuple[int, float]]:
    """Return the curve of a rejection that recovers from the target itself, which is wrong."""
    true_residual = laws.residual
    try:
        laws.residual = lambda coefficient, p, q: coefficient * p
        return _verified("uniform", "rejection", chunks)
    finally:
        laws.residual = true_residual


BENCHMARK = Benchmark(
    "speculative_convergence",
    "How close is the emitted law to the target after n samples, beside direct draws?",
    [
        View(
            *("convergence", "Total variation to the target, by method"),
            x="batch",
            y="total_variation",
            x_label="samples",
        )
    ],
    rows,
    by_default=False,
)
