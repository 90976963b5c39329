"""The definition of the correct token in plain PyTorch, with whole logits, no ranks and no tiles.

Everything else in this package must return these tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tpsample.agreement.arguments import checked_head
from tpsample.core import word
from tpsample.core.checks import (
    check_int,
    check_num_samples,
    check_tensor,
    describe,
    fits,
    positions_tensor,
    read_positions,
)
from tpsample.core.masses import masses, masses_and_moments
from tpsample.core.order import ABOVE_ALL, least_word, mass_limit, order_words
from tpsample.core.row_noise import GREEDY_BELOW, RowNoise, SeedSource, safe_temperature
from tpsample.core.rules import ENDING, TOP_K, TOP_P
from tpsample.core.score import Head, logits_tile, score, score_tile
from tpsample.core.spread import spread_of, spread_sums
from tpsample.core.tensors import readable
from tpsample.core.vocab_shard import VocabShard
from tpsample.noise import row_stream, tile_noise
from tpsample.output import Logprobs, SampleOutput
from tpsample.request.controls.apply import StepControls
from tpsample.request.filters import RowFilters
from tpsample.request.plan import BatchView
from tpsample.request.row_filter import KEEP_TIES, behind
from tpsample.request.step_batch import StepBatch, require_batch

NEAR_TIE = 4e-5
"""How far the noise of a token may be from that of another device, whose log2 is another."""

_SUM_ERROR = 2.0**-28
"""How far a sum in fp32 may be from the exact one, per term and unit of the largest logit.

A tensor core truncates its accumulator every 16 terms, by half of 2^-23 of it. Products of fp32,
which are added one by one and rounded to nearest, stay below."""

_COLDEST = 0.1
"""Below this temperature no more is allowed: the score of a logit grows with 1 / T."""


def logits(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> Tensor:
    """Return fp32 logits [B, V] of hidden_states [B, D] and lm_head_weight [V, D].

        softcap · tanh(scale · product / softcap) + bias

    The product is summed in float64 and rounded once. All tensors are floating-point; `bias` is [V]
    and the scale and the soft-cap those that a sampler takes.

    Raises:
        ValueError: an argument is not as described.
    """
    _check_matrix("lm_head_weight", lm_head_weight, "VD")
    _check_matrix("hidden_states", hidden_states, "BD")
    rows, width = lm_head_weight.shape
    if hidden_states.shape[1] != width or hidden_states.device != lm_head_weight.device:
        turned = "; if lm_head_weight is [D, V], pass lm_head_weight.T"
        raise ValueError(
            f"hidden_states: expected D = {width} columns on {lm_head_weight.device} as "
            f"lm_head_weight [V, D] has, got {describe(hidden_states)}"
            f"{turned if hidden_states.shape[1] == rows else ''}"
        )
    if bias is not None:
        of_rows = ", one value per row of lm_head_weight"
        check_tensor("bias", bias, (), (rows,), lm_head_weight.device, of_rows)
    head = checked_head(Head(logit_scale, logit_softcap))
    return logits_tile(hidden_states.double(), lm_head_weight, bias, head)


def processed_logits(logits: Tensor, batch: StepBatch | BatchView) -> Tensor:
    """Apply constraints, biases and penalties in the order of `tpsample.request.controls.tables`.

    Args:
        logits: [B, V], raw, of any floating dtype.
        batch: B rows; its tokens so far are read, not changed.

    Returns:
        fp32 [B, V].
    """
    controls = _checked(logits, batch).controls
    if controls is None:
        return logits.float()
    return StepControls.of(controls, VocabShard(0, batch.vocab_size)).apply(logits.float(), 0)


def scores(
    logits: Tensor,
    batch: StepBatch | BatchView,
    positions: Tensor | int,
    *,
    sample: int = 0,
) -> Tensor:
    """Return fp32 scores [B, V], base 2. A row's token is their argmax, the lowest of equal ids.

        random row    fma(logit, log2 e / T, -L(seed, position, sample, token id))
        greedy row    logit, both of the processed logits

    Two devices may differ in the last bits of L and of a logit. So they differ in a token only
    where the two best scores of the row lie within `near_tie`. Arguments are those of `sample`.
    """
    sample = check_int("sample", sample, 0, 2**20 - 1)
    row_noise = _row_noise(logits, batch, positions, 1)
    stream = row_stream(row_noise.seed.unsqueeze(1), row_noise.positions.unsqueeze(1), sample)
    noise = tile_noise(stream, 0, batch.vocab_size)
    return score(processed_logits(logits, batch), noise, row_noise)


def near_tie(logits: Tensor, temperature: Tensor, hidden_size: int) -> Tensor:
    """Return how near two scores [B] are that a GPU and a CPU may take one for the other.

        4e-5 + 2^-28 · D · max(1, |largest logit|) · log2 e / T       T at least 0.1; greedy: 1

    The first part is the noise's, for any accuracy of log2 that a GPU documents. The second is the
    error of a fp32 sum of D products, whose partial sums are about as large as the logits that win.

    Args:
        logits: [B, V], raw.
        temperature: fp32 [B].
        hidden_size: D; 0 where the caller computed the logits.
    """
    largest = logits.masked_fill(~logits.isfinite(), -torch.inf).amax(dim=1).abs()
    largest = largest.masked_fill(largest == torch.inf, 0).clamp(min=1)
    scale = math.log2(math.e) / temperature.clamp(min=_COLDEST)
    random = temperature >= GREEDY_BELOW
    return NEAR_TIE + _SUM_ERROR * hidden_size * largest * scale.where(random, 1.0)


def kept_mask(logits: Tensor, batch: StepBatch | BatchView) -> Tensor:
    """Return which tokens the filters leave to be drawn, bool [B, V].

    The rules are in `tpsample.core.order`. A row without filters, and a greedy row, keeps every
    token that is not masked (-inf); a row with a NaN keeps none, and neither does a row in which no
    token `can_be_drawn`.

    Args:
        logits: [B, V], raw, of any floating dtype.
        batch: B rows.

    Raises:
        ValueError: shapes that do not match, or a vocabulary over 2^20.
    """
    view = _checked(logits, batch)
    logits = processed_logits(logits, view)
    kept = (logits > -torch.inf) & ~logits.isnan().any(dim=1, keepdim=True)
    kept &= can_be_drawn(logits, view).any(dim=1, keepdim=True)
    filters = view.plan.filters
    if filters is not None:
        index = filters.row_index
        temperature, random = safe_temperature(view.temperature[index])
        filtered = kept_rows(logits[index], temperature, filters)
        kept[index] &= filtered | ~random.unsqueeze(1)
    return kept


def can_be_drawn(logits: Tensor, batch: BatchView) -> Tensor:
    """Return which processed logits make a score above -inf, bool [B, V].

    One that is below fp32 once it is multiplied by log2 e / T does not, as if it were masked.
    """
    return logits * RowNoise(batch.temperature, batch.seed, batch.seed, 1).scale > -torch.inf


def kept_rows(logits: Tensor, temperature: Tensor, filters: RowFilters) -> Tensor:
    """Return the kept set of each filtered row, bool [F, V], by sorting its logits.

    Args:
        logits: fp32 [F, V] of the filtered rows.
        temperature: fp32 [F].
    """
    top_k, top_p, keep_ties = (
        filters.column(name).unsqueeze(1) for name in (TOP_K.name, TOP_P.name, KEEP_TIES)
    )
    words = order_words(logits)
    order = words.argsort(dim=1, descending=True)
    logits, words = logits.gather(1, order), words.gather(1, order)

    rank = torch.arange(logits.shape[1], device=logits.device)
    kth = logits.gather(1, (top_k - 1))
    in_top_k = (rank < top_k) | (keep_ties & (logits == kth))
    kept = {TOP_K.name: in_top_k}
    whole = _WholeRows(logits, words, temperature)
    for rule in ENDING:
        assert rule.end is not None
        kept[rule.name] = words >= rule.end(whole, filters.column(rule.name)).unsqueeze(1)
    in_total = logits > -torch.inf
    for name, by_rule in kept.items():
        in_total &= by_rule | filters.column(behind(name)).unsqueeze(1)
    mass = masses(logits, logits[:, :1], temperature.unsqueeze(1))
    total = (mass * in_total).sum(dim=1, keepdim=True)
    before = mass.cumsum(dim=1) - mass
    # With ties="keep" only greater logits count as before a token, as for the first of its equals.
    before[:, 1:].masked_fill_(keep_ties & (logits[:, 1:] == logits[:, :-1]), 0)
    before = before.cummax(dim=1).values
    by_all = torch.stack([before < mass_limit(total, top_p), *kept.values()]).all(dim=0)
    return torch.zeros_like(by_all).scatter_(1, order, by_all)


@dataclass(frozen=True)
class _WholeRows:
    """`tpsample.core.rules.FilteredRows` of sorted rows of whole logits.

    Attributes:
        logits, words: fp32 and int64 [F, V], descending.
        temperature: fp32 [F].
    """

    logits: Tensor
    words: Tensor
    temperature: Tensor

    def least_word(self, y: Tensor, temperature: Tensor) -> Tensor:
        return least_word(self.logits[:, 0], temperature, y)

    def total_mass(self) -> Tensor:
        return self._masses().sum(dim=1)

    def total_moment(self) -> tuple[Tensor, Tensor]:
        mass, moment = self._weights()
        return mass.sum(dim=1), moment.sum(dim=1)

    def least_of_mass(self, limit: Tensor) -> Tensor:
        reaches = (self._masses() >= limit.unsqueeze(1)) & (self.logits > -torch.inf)
        least = self.words.where(reaches, ABOVE_ALL).amin(dim=1)
        return least.where(limit > 0, word.LOWEST_DRAWABLE)

    def spread(self) -> Tensor:
        return spread_of(spread_sums(self.logits, self.logits[:, 0]))

    def _masses(self) -> Tensor:
        return self._weights()[0]

    def _weights(self) -> tuple[Tensor, Tensor]:
        top, temperature = self.logits[:, :1], self.temperature.unsqueeze(1)
        mass, moment = masses_and_moments(self.logits, top, temperature)
        unmasked = self.logits > -torch.inf
        return mass * unmasked, moment * unmasked


def sample(
    logits: Tensor,
    batch: StepBatch | BatchView,
    positions: Tensor | int,
    *,
    num_samples: int | None = None,
) -> SampleOutput:
    """Sample from whole logits, on the CPU or a GPU. The token is the best score in `kept_mask`.

    Args:
        logits: [B, V], raw, of any floating dtype.
        batch: B rows.
        positions: int64 [B] or one int: absolute position of the token being generated.
        num_samples: independent draws per row; sample 0 is the draw without it.

    Returns:
        Tokens, status, seeds, and logprobs if rows ask for them.

    Raises:
        ValueError: shapes that do not match, a vocabulary over 2^20, or a position below 0, which
            is looked at on a CPU.
    """
    _check_logits(logits, batch)
    if isinstance(batch, StepBatch):
        batch = batch._for_rows(logits.shape[0])
        batch._draw_seeds(SeedSource())
    batch = _checked(logits, batch)
    row_noise = _row_noise(logits, batch, positions, check_num_samples(num_samples))
    vocab = torch.arange(logits.shape[1], dtype=torch.int64, device=logits.device)
    processed = processed_logits(logits, batch)
    seen = kept_mask(logits, batch) | processed.isnan()
    best = torch.stack(
        [
            word.pack(score_tile(processed, 0, row_noise, s), vocab).where(seen, 0).amax(dim=1)
            for s in range(row_noise.num_samples)
        ],
        dim=1,
    )
    token_ids, status = word.decode(best)
    out = SampleOutput(
        token_ids=token_ids.squeeze(1) if num_samples is None else token_ids,
        status=status.amax(dim=1),
        seeds=batch.seed.clone(),
    )
    if batch.plan.logprobs is not None:
        out.logprobs = logprobs(logits, batch, out.token_ids)
    if batch._undrawn_rows is not None:
        out.fill_skipped(*batch._undrawn_rows)
    return out


def logprobs(logits: Tensor, batch: StepBatch | BatchView, token_ids: Tensor) -> Logprobs:
    """Return the logprobs of the rows of `batch` that ask for them, by float64 log-softmax.

    Those of a sampler are computed from integer masses, and lie within 5e-7 of these (MASSES.md).

    The top N are the first N of the total order; those outside the kept set have -inf in the
    processed modes. A row of the raw modes with a NaN has none, also where a mask removes the NaN.
    Logits of +inf share all of the probability.

    Args:
        logits: [B, V], raw, of any floating dtype.
        token_ids: int64 [B] or [B, num_samples], the tokens drawn; a -1 makes its row's values NaN.

    Raises:
        ValueError: shapes that do not match, an id of V or more, or no row asks for logprobs.
    """
    batch = _checked(logits, batch)
    shape = (batch.rows, "num_samples")[: 1 + (getattr(token_ids, "ndim", 1) == 2)]
    check_tensor("token_ids", token_ids, (torch.int64,), shape, logits.device)
    if readable(logits.device) and token_ids.numel() and token_ids.max() >= batch.vocab_size:
        raise ValueError(
            f"token_ids: expected ids below V = {batch.vocab_size}, got {int(token_ids.max())}; a "
            "row without a token has -1"
        )
    rows = batch.plan.logprobs
    if rows is None:
        raise ValueError("batch: no row asks for logprobs")
    processed, as_logits = rows.processed.unsqueeze(1), rows.as_logits.unsqueeze(1)
    kept = kept_mask(logits, batch)[rows.row_list]
    final = processed_logits(logits, batch)[rows.row_list]
    logits = torch.where(processed, final, logits.float()[rows.row_list])
    temperature, _ = safe_temperature(batch.temperature[rows.row_list].unsqueeze(1))
    shown = torch.where(processed, (logits.double() / temperature).where(kept, -torch.inf), logits)
    forced = shown == torch.inf
    peaks = torch.where(forced, 0.0, -torch.inf)
    log_softmax = torch.where(forced.any(dim=1, keepdim=True), peaks, shown).log_softmax(dim=1)
    values = torch.where(as_logits, shown, log_softmax)
    entropies = -(log_softmax.exp() * log_softmax).nan_to_num(0.0).sum(dim=1)

    drawn = token_ids[rows.row_list].view(len(rows.row_list), -1)
    if rows.asks is not None:
        drawn = drawn.where(rows.asks.unsqueeze(1), word.NO_TOKEN)
    listed = order_words(logits).argsort(dim=1, descending=True)[:, : rows.top]
    wanted = torch.arange(rows.top, device=logits.device) < rows.top_of.unsqueeze(1)
    listed = listed.where(wanted, word.NO_TOKEN)
    ids = torch.cat([drawn, listed, rows.chosen], dim=1)
    has_values = (drawn >= 0).all(dim=1) & ~logits.isnan().any(dim=1)
    ids = ids.where(has_values.unsqueeze(1), word.NO_TOKEN)
    safe = ids.clamp(min=0)
    ranks = torch.stack(
        [(shown >= shown.gather(1, one)).sum(dim=1) for one in safe.split(1, dim=1)], dim=1
    )
    reported = Logprobs(
        token_ids=ids,
        values=values.gather(1, safe).where(ids >= 0, torch.nan),
        ranks=ranks.where(ids >= 0, 0),
        entropies=entropies.where(has_values, torch.nan),
    )
    whole = Logprobs.none(batch.rows, ids.shape[1], ids.device).put(rows.row_index, reported)
    whole.num_chosen = rows.chosen.shape[1]
    return whole


def _row_noise(
    logits: Tensor,
    batch: StepBatch | BatchView,
    positions: Tensor | int,
    num_samples: int,
) -> RowNoise:
    batch = _checked(logits, batch)
    positions = positions_tensor(positions, logits.shape[0], logits.device)
    read_positions(positions, batch)
    return RowNoise(batch.temperature, batch.seed, positions, num_samples)


def _checked(logits: Tensor, batch: StepBatch | BatchView) -> BatchView:
    _check_logits(logits, batch)
    return batch._view_of(logits.shape[0])


def _check_logits(logits: Tensor, batch: StepBatch | BatchView) -> None:
    """Check logits before the batch, which has as many rows, is blamed for theirs."""
    _check_matrix("logits", logits, "BV")
    require_batch(batch)
    if logits.shape[1] != batch.vocab_size or batch.vocab_size > word.MAX_VOCAB_SIZE:
        raise ValueError(
            f"logits: expected V = {batch.vocab_size} columns as in batch.vocab_size, at most "
            f"{word.MAX_VOCAB_SIZE}, got {logits.shape[1]}"
        )


def _check_matrix(name: str, value: object, shape: str) -> None:
    """Raise a ValueError unless a value is a floating-point tensor of two axes, by their names."""
    if isinstance(value, Tensor) and fits(value, (), shape, value.device):
        return
    way_out = f"; pass torch.tensor({name})"
    if isinstance(value, Tensor):
        of_axes = {1: f"; one row is {name}.unsqueeze(0)"}
        if name != "lm_head_weight":
            of_axes[3] = f"; pass those of the last position, {name}[:, -1]"
        way_out = of_axes.get(value.ndim, "")
    raise ValueError(
        f"{name}: expected a floating-point tensor [{', '.join(shape)}], "
        f"got {describe(value)}{way_out}"
    )
