"""Time and memory of a trainer's scores over kept sets, beside scores out of all logits.

The bundled model writes texts. A set has the n likeliest ids of a row, as top_k keeps them, and a
token is drawn from it. Each way computes log-probabilities of the drawn tokens, entropies, and the
gradients of hidden states and of the weight:

    tpsample, sparse gradient      `kept_logprobs`; the weight's gradient has rows of listed ids
    tpsample, dense gradient       the same with rows of all ids
    all logits                     fp32 [N, V], masked to the sets, then a log_softmax
    all logits, 256 rows at once   the same by parts, whose logits are computed again backwards

The scores and the gradients of all ways are compared before they are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.lab.allocations import peak_bytes
from benchmarks.lab.harness import Benchmark, Run
from benchmarks.lab.problem import DTYPES
from benchmarks.lab.results import Row, View, row, with_ratios
from benchmarks.questions.screen_candidates import PROMPTS
from tpsample.cli.model import Model, load
from tpsample.core.order import order_words
from tpsample.training import KeptTokens, kept_logprobs

SIZES = (1, 8, 82, 2048)
"""Ids of each set."""
ROWS, TEXTS, TEMPERATURE, AT_ONCE = 2048, 8, 1.0, 256
OURS, DENSE = "tpsample, sparse gradient", "tpsample, dense gradient"
Scores = tuple[Tensor, Tensor]
"""Log-probabilities and entropies, [N] each."""


@dataclass(frozen=True)
class Tokens:
    """Drawn tokens, each with the set that it was drawn from, and what their scores start from.

    Attributes:
        states: [N, D], hidden states.
        weight: [V, D], of the LM head.
        sets: int64 [N, n].
        drawn: int64 [N, 1].
    """

    states: Tensor
    weight: Tensor
    sets: Tensor
    drawn: Tensor


@torch.no_grad()
def written(model: Model, rows: int) -> Iterator[Tokens]:
    """Yield the tokens of texts that a model writes, drawn from sets of each size."""
    weight = model.lm_head.weight.detach()
    whole, device = weight.float(), weight.device
    generator = torch.Generator(device).manual_seed(1)
    draw = partial(torch.multinomial, num_samples=1, generator=generator)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for prompt in PROMPTS:
        feed, cache = torch.tensor([model.prompt_token_ids(prompt)] * TEXTS, device=device), None
        for _ in range(-(-rows // (len(PROMPTS) * TEXTS))):
            trunk = model.causal_lm.base_model(feed, past_key_values=cache, use_cache=True)
            states, cache = trunk.last_hidden_state[:, -1], trunk.past_key_values
            logits = states.float() @ whole.T
            ids = order_words(logits).topk(min(SIZES[-1], len(weight))).indices
            found.append((states, ids, logits.gather(1, ids)))
            feed = draw((logits / TEMPERATURE).softmax(dim=1))
    states, ids, logits = (torch.cat(each)[:rows] for each in zip(*found, strict=True))
    for size in SIZES:
        drawn = draw((logits[:, :size] / TEMPERATURE).softmax(dim=1))
        yield Tokens(states, weight, ids[:, :size], ids.gather(1, drawn))


def over_sets(sparse: bool, states: Tensor, weight: Tensor, sets: Tensor, drawn: Tensor) -> Scores:
    """Return the scores of tpsample."""
    rows, size = sets.shape
    offsets = torch.arange(rows + 1, device=sets.device) * size
    kept = KeptTokens(offsets, sets.flatten(), torch.zeros_like(sets[:, 0], dtype=torch.bool))
    given = states, weight, drawn[:, 0], kept, TEMPERATURE
    logprobs, entropies = kept_logprobs(*given, group="alone", sparse=sparse)
    return logprobs, entropies


def all_logits(states: Tensor, weight: Tensor, sets: Tensor, drawn: Tensor) -> Scores:
    """Return the scores that a softmax over masked logits has."""
    logits = (states @ weight.T).float()
    outside = torch.ones_like(logits, dtype=torch.bool).scatter_(1, sets, False)
    logits = logits.masked_fill_(outside, -torch.inf).div_(TEMPERATURE).log_softmax(dim=1)
    entropies = -(logits.exp() * logits.masked_fill(outside, 0.0)).sum(dim=1)
    return logits.gather(1, drawn)[:, 0], entropies


def by_parts(states: Tensor, weight: Tensor, sets: Tensor, drawn: Tensor) -> Scores:
    """Return the scores of `all_logits`, by parts of the rows."""
    each = zip(*(its.split(AT_ONCE) for its in (states, sets, drawn)), strict=True)
    parts = [checkpoint(all_logits, x, weight, *its, use_reentrant=False) for x, *its in each]
    logprobs, entropies = map(torch.cat, zip(*parts, strict=True))
    return logprobs, entropies


WAYS: dict[str, Callable[..., Scores]] = {
    OURS: partial(over_sets, True),
    DENSE: partial(over_sets, False),
    "all logits": all_logits,
    f"all logits, {AT_ONCE} rows at once": by_parts,
}


def scored(way: Callable[..., Scores], tokens: Tokens) -> dict[str, Tensor]:
    """Return the scores of a way, and the gradients of a sum of them with random factors."""
    states, weight = (each.detach().requires_grad_() for each in (tokens.states, tokens.weight))
    logprobs, entropies = scores = way(states, weight, tokens.sets, tokens.drawn)
    generator = torch.Generator().manual_seed(2)
    factors = [torch.randn(len(each), generator=generator).to(each) for each in scores]
    of_states, of_weight = torch.autograd.grad(scores, (states, weight), factors)
    its = {"logprobs": logprobs.detach(), "entropies": entropies.detach()}
    return its | {"gradient of states": of_states, "gradient of weight": of_weight}


def compare(tokens: Tokens) -> None:
    """Compare scores and gradients of all ways with those of the first.

    Raises:
        AssertionError: they differ by more than the rounding of logits.
    """
    first: dict[str, Tensor] = {}
    most = max(1e-4, 32 * torch.finfo(tokens.weight.dtype).eps)
    for name, way in WAYS.items():
        its = {part: each.to_dense().double() for part, each in scored(way, tokens).items()}
        first = first or its
        for part, each in its.items():
            differs, right = each - first[part], first[part]
            far = differs.norm() / (1 + right.norm()) if right.ndim > 1 else differs.abs().max()
            if not far <= most:
                raise AssertionError(f"{name}: {part} differ by {float(far):.3g}, above {most:.3g}")


def rows(run: Run) -> Iterator[list[Row]]:
    """Yield time and memory of all ways at each size of sets."""
    model = load(None, run.job, DTYPES[run.dtype])
    run.note(
        f"Hidden states and head of the bundled model, which writes {TEXTS} texts each for "
        f"{len(PROMPTS)} prompts at T {TEMPERATURE}. A set has the likeliest ids of its row. One "
        "rank has the whole head. All ways have the same scores and gradients, but for the "
        "rounding of logits, which all logits have in the dtype of the weights at first.",
        "A time is of scores, entropies and gradients together. Peak memory is the most that a way "
        "holds at once beside what it was given. Gradients count, buffers of BLAS do not. The "
        "gradients of all logits and a dense one of tpsample have every row of the weight. A "
        "sparse one has a row of each different id that the sets list.",
    )
    for tokens in written(model, len(PROMPTS) * TEXTS if run.tiny else ROWS):
        compare(tokens)
        ways = {name: partial(scored, way, tokens) for name, way in WAYS.items()}
        times = run.time(ways, own=ways, eager=ways)
        count, size = tokens.sets.shape
        point: Row = {"shape": f"bundled model in {run.dtype}", "mode": f"{size} per set"}
        point |= {"batch": count, "ids": size, "different_ids": len(tokens.sets.unique())}
        kinds = {name: "tpsample" if name in (OURS, DENSE) else "baseline" for name in ways}
        found = with_ratios([row(name, kinds[name], times[name], **point) for name in ways])
        for each in found:
            each["peak_bytes"] = peak_bytes(ways[each["candidate"]], run.device)
            each["times_as_long"] = each["median_us"] / found[0]["median_us"]
            each["times_the_memory"] = each["peak_bytes"] / found[0]["peak_bytes"]
        yield found


BENCHMARK = Benchmark(
    "training",
    "What do a trainer's scores over kept sets cost, beside all logits?",
    [
        View("time", "Time, scores and gradients", x="ids", x_label="ids of a set"),
        View("", f"Time ÷ that of {OURS}", x="ids", y="times_as_long"),
        View("memory", "Peak memory", x="ids", y="peak_bytes", x_label="ids of a set"),
        View("", f"Peak memory ÷ that of {OURS}", x="ids", y="times_the_memory"),
        View("", "Different ids that all sets list together", x="ids", y="different_ids",
             where={"candidate": OURS}),
    ],
    rows,
    by_default=False,
)  # fmt: skip
