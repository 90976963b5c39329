"""Statistics shared by the tests: does a set of draws follow a softmax?"""

import numpy as np
import torch

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams

LONE_CELLS = 64
MIN_EXPECTED = 50


def cells_of(probabilities: np.ndarray, draws: int) -> np.ndarray:
    """A cell number per token: the likeliest tokens alone, the rest pooled by decade.

    Cells that would expect fewer than 50 draws are merged with the next likelier one; no token is
    ever left out, so a tail that is drawn too rarely or too often shows.
    """
    order = np.argsort(-probabilities, kind="stable")
    decade = np.floor(np.log10(np.maximum(probabilities[order], 1e-300))).astype(int)
    rank = np.arange(len(order))
    label = np.where(rank < LONE_CELLS, rank, LONE_CELLS - decade)
    edges = np.flatnonzero(np.diff(label, prepend=label[0] - 1))
    expected = np.add.reduceat(probabilities[order], edges) * draws
    cell, cells, total = 0, np.empty(len(edges), int), 0.0
    for i, mass in enumerate(expected):
        cells[i] = cell
        total += mass
        if total >= MIN_EXPECTED:
            cell, total = cell + 1, 0.0
    if total:
        cells[cells == cell] = max(cell - 1, 0)
    result = np.empty(len(order), int)
    result[order] = np.repeat(cells, np.diff([*edges, len(order)]))
    return result


def chi_squared(tokens: np.ndarray, law: np.ndarray) -> float:
    """p-value of draws under a law, pooled cells; 0 if a token was drawn that it does not have."""
    from scipy.special import chdtrc  # here, because every process of a run would import it

    possible = law > 0
    if not possible[tokens].all():
        return 0.0
    cells = np.zeros(len(law), int)
    cells[possible] = cells_of(law[possible], len(tokens))
    expected = np.bincount(cells[possible], weights=law[possible]) * len(tokens)
    observed = np.bincount(cells[tokens], minlength=len(expected))
    assert len(expected) > 1, "one cell tests nothing"
    expected *= observed.sum() / expected.sum()
    return float(chdtrc(len(expected) - 1, ((observed - expected) ** 2 / expected).sum()))


def chi_squared_p(token_ids: torch.Tensor, logits: torch.Tensor, temperature: float) -> float:
    """p-value of the draws under softmax(logits / temperature)."""
    law = torch.softmax(logits.double() / temperature, dim=0)
    return chi_squared(token_ids.numpy(), law.numpy())


def draw(
    logits: torch.Tensor, draws: int, *, temperature: float = 1.0, seed: int = 1, **sampler_kwargs
) -> torch.Tensor:
    """`draws` tokens of one logits row [V], through an `LMHeadSampler`.

    The head is [V, 1] and the hidden state 1, so the logits are exact; positions count up.
    """
    rows = 512
    sampler = LMHeadSampler(
        logits.float().unsqueeze(1), max_rows=rows, backend="torch", **sampler_kwargs
    )
    params = SamplingParams(temperature=temperature, seed=seed)
    batch = SamplingBatch.from_params([params] * rows, vocab_size=len(logits))
    hidden_states = torch.ones(rows, 1)
    steps = [
        sampler(hidden_states, batch, torch.arange(start, start + rows)).token_ids
        for start in range(0, draws, rows)
    ]
    return torch.cat(steps)[:draws]
