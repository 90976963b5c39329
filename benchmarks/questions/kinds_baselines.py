"""Ways to make a call from stored logits in plain PyTorch, several where several may be fastest.

A way returns all that the call returns, but for entropies. It keeps tokens first, then draws, then
looks up whatever else is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.lab.baselines import mask_kept, softmax_race, sort_kept, topk_kept, within

Way = Callable[[Tensor], list[Tensor]]
"""Maps whole logits [rows, V] to the tokens [rows, S], and to whatever else is asked for."""
Selection = tuple[Tensor, Tensor | None]
"""Logits of candidates, -inf where a filter drops one, and their ids; None stands for all ids."""

FIRST = 1024
"""How many logits a way looks at before it sorts all."""


def race(logits: Tensor, _: int) -> Tensor:
    """Draw one sample by exponential clocks."""
    return softmax_race(logits).unsqueeze(1)


def multinomial(logits: Tensor, samples: int) -> Tensor:
    """Draw several samples by torch.multinomial."""
    return logits.softmax(dim=1).multinomial(samples, replacement=True)


def inverse(logits: Tensor, samples: int) -> Tensor:
    """Draw by one uniform number per sample, which is looked up in the sums of probabilities."""
    sums = logits.softmax(dim=1).cumsum(dim=1)
    at = torch.rand(len(sums), samples, device=sums.device) * sums[:, -1:]
    return torch.searchsorted(sums, at, right=True).clamp(max=sums.shape[1] - 1)


DRAWS = {"race": race, "inverse CDF": inverse}
SEVERAL_DRAWS = {"multinomial": multinomial, "inverse CDF": inverse}


def of_step(
    fields: dict[str, Any], samples: int, kept_cap: int, prompt: Tensor, output: Tensor
) -> dict[str, Way]:
    """Return the ways to take a step of requests with these fields, by name.

    Args:
        kept_cap: of the kept sets; 0 asks for none.
        prompt, output: int64 [B, n], the tokens before the step.
    """
    temperature, count = fields.get("temperature", 1.0), fields.get("logprobs")
    processed = "logprobs_mode" in fields
    draws = DRAWS if samples == 1 else SEVERAL_DRAWS
    if not temperature:
        draws = {"argmax": lambda logits, _: logits.argmax(dim=1, keepdim=True)}

    def way(logits: Tensor, keep: Callable[[Tensor], Selection], draw: Any) -> list[Tensor]:
        if temperature or count is not None:
            logits = logits.float()
        if "repetition_penalty" in fields:
            logits = _penalised(logits, fields, prompt, output)
        kept, ids = keep(logits if temperature in (0.0, 1.0) else logits / temperature)
        index = draw(kept, samples)
        found = [index if ids is None else ids.gather(1, index)]
        if count is not None and processed and ids is not None:
            found += logprobs(kept, index, kept[:, :count], ids[:, :count])
        elif count is not None:
            first, places = logits.topk(count, dim=1)
            found += logprobs(logits, found[0], first, places)
        if kept_cap and ids is not None:
            found += kept_sets(kept, ids, kept_cap)
        return found

    return {
        " + ".join(filter(None, (kept_by, drawn_by))): partial(way, keep=keep, draw=draw)
        for kept_by, keep in _selections(fields).items()
        for drawn_by, draw in draws.items()
    }


def _selections(fields: dict[str, Any]) -> dict[str, Callable[[Tensor], Selection]]:
    """Return the ways to find what the filters of requests keep, by name."""
    filters = {name: fields[name] for name in ("top_k", "top_p", "min_p") if name in fields}
    if not filters:
        return {"": lambda logits: (logits, None)}
    if fields.get("filter_order") == "joint":
        return {"topk": partial(_first, count=fields["top_k"], top_p=fields["top_p"])}
    found: dict[str, Callable[[Tensor], Selection]] = {"sort": partial(sort_kept, **filters)}
    if "top_k" in filters:
        found["topk"] = partial(topk_kept, **filters)
    elif "top_p" in filters:
        found[f"topk {FIRST} or sort"] = partial(_first_or_sort, top_p=fields["top_p"])
    else:
        found["mask"] = lambda logits: (mask_kept(logits, fields["min_p"]), None)
    return found


def _first(logits: Tensor, count: int, top_p: float) -> Selection:
    """Keep those of the largest logits that have top_p of the mass of all."""
    total = logits.logsumexp(dim=1, keepdim=True)
    logits, ids = logits.topk(min(count, logits.shape[1]), dim=1)
    return within(logits, top_p, (logits - total).exp()), ids


def _first_or_sort(logits: Tensor, top_p: float) -> Selection:
    """Sort all logits only if the largest ones of a row have too little mass."""
    kept, ids = _first(logits, FIRST, top_p)
    return sort_kept(logits, top_p=top_p) if (kept[:, -1] > -torch.inf).any() else (kept, ids)


def _penalised(logits: Tensor, fields: dict[str, Any], prompt: Tensor, output: Tensor) -> Tensor:
    """Change logits by penalties and a bias; only those of tokens before are looked at."""
    by, seen = fields["repetition_penalty"], torch.cat([prompt, output], dim=1)
    own = logits.gather(1, seen)
    logits.scatter_(1, seen, torch.where(own > 0, own / by, own * by))
    logits.scatter_(1, output, logits.gather(1, output) - fields["presence_penalty"])
    for token, bias in fields["logit_bias"].items():
        logits[:, token] += bias
    return logits


def logprobs(logits: Tensor, at: Tensor, first: Tensor, ids: Tensor) -> list[Tensor]:
    """Return logprobs and ranks at places [rows, 1], and the logprobs of the first with their ids.

    Args:
        first, ids: [rows, N], the largest logits.
    """
    total, own = logits.logsumexp(dim=1, keepdim=True), logits.gather(1, at)
    return [own - total, (logits >= own).sum(dim=1), first - total, ids]


def kept_sets(logits: Tensor, ids: Tensor, cap: int) -> list[Tensor]:
    """Return sizes, ids and log-masses of what is kept; rows of more than `cap` list nothing."""
    sizes = (logits > -torch.inf).sum(dim=1)
    part = logits[:, :cap]
    listed = (part > -torch.inf) & (sizes <= cap).unsqueeze(1)
    masses = part - logits.logsumexp(dim=1, keepdim=True)
    return [sizes, ids[:, : part.shape[1]][listed], masses[listed]]


def of_prompt(came: Tensor, count: int) -> dict[str, Way]:
    """Return the way to the logprobs of tokens [rows, 1] that came."""

    def way(logits: Tensor) -> list[Tensor]:
        logits = logits.float()
        return logprobs(logits, came, *logits.topk(count, dim=1))

    return {"topk": way}


def of_verification(drafts: Tensor, method: str) -> dict[str, Way]:
    """Return the ways to verify drafts [B, K] that were certain, of logits [B · (K + 1), V].

    Of certain drafts a block needs no other sums than a rejection does, so one way stands for both.
    Plain draws at all positions stand beside it for "coupled".
    """
    num_rows, count = drafts.shape
    each = torch.arange(num_rows, device=drafts.device)

    def rejected(logits: Tensor, draw: Any) -> list[Tensor]:
        logits = logits.float()
        total = logits.logsumexp(dim=1).view(num_rows, -1)[:, :count]
        rows = logits.view(num_rows, count + 1, -1)
        own = rows[:, :count].gather(2, drafts.unsqueeze(2)).squeeze(2) - total
        accepted = (
            (torch.rand(num_rows, count, device=own.device) < own.exp()).cumprod(dim=1).sum(dim=1)
        )
        left = rows[each, accepted]
        stop = accepted < count
        left[each[stop], drafts[each[stop], accepted[stop]]] = -torch.inf
        return [draw(left, 1), accepted]

    def coupled(logits: Tensor, draw: Any) -> list[Tensor]:
        tokens = draw(logits.float(), 1).view(num_rows, count + 1)
        return [tokens, (tokens[:, :count] == drafts).cumprod(dim=1).sum(dim=1)]

    ways = {"rejection": rejected} | ({"every position": coupled} if method == "coupled" else {})
    return {
        f"{name} + {drawn_by}": partial(way, draw=draw)
        for name, way in ways.items()
        for drawn_by, draw in DRAWS.items()
    }
