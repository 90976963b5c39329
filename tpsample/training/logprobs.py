"""Log-probability and entropy of drawn tokens over their kept sets, with gradients.

    x_u      logit of id u: soft-cap(scale · h · w_u)
    y_u      (x_u - max x) / T, the maximum over the row's set S
    q_u, m_u masses and moments of `tpsample.core.masses`, Z = Σ q_u over S
    logprob  y_v - ln(Z / 2^40)                                v the drawn token
    entropy  ln(Z / 2^40) + ln 2 · Σ m_u / Z

    ∂ logprob / ∂ x_u = (1[u = v] - p_u) / T                   p_u = e^(y_u) · 2^40 / Z
    ∂ entropy / ∂ x_u = -p_u (ln p_u + entropy) / T

These are `processed_logprobs` of a step: equal hidden states and weights give equal bits, whatever
the number of ranks here or there. Each rank computes the logits of the ids that it holds. Rows that
kept every id are taken some at a time, and none of their logits is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tpsample.backends.torch_.pairs import slices
from tpsample.backends.torch_.passes import tile_elements
from tpsample.backends.torch_.room import Room
from tpsample.core.checks import is_batch
from tpsample.core.masses import LN2, TOP_MASS, masses_and_moments
from tpsample.core.order import below_top
from tpsample.core.score import Head
from tpsample.training.kept_tokens import KeptTokens
from tpsample.training.products import logits_of, slopes, sums_in, tile_products
from tpsample.training.shards import HeadRanks

AT_ONCE = 2**22
"""Logits that a rank has at once of rows that kept every id: 32 MB of float64."""


class KeptLogprobs(NamedTuple):
    """The scores of N drawn tokens, the same on every rank.

    Attributes:
        logprobs: float64 [N], of the drawn tokens; NaN where a logit of the row is no number.
        entropies: float64 [N], of the distributions over the sets.
    """

    logprobs: Tensor
    entropies: Tensor


@dataclass(frozen=True)
class Scored:
    """The arguments of a score without gradients: all but hidden states and weight.

    Attributes:
        ranks: who holds the rows of the LM head.
        head: from products to logits.
        token_ids: int64 [N].
        kept: the sets.
        temperature: fp32 [N].
        sparse: whether the weight's gradient has the rows of listed ids alone.
        room: the backend that multiplies and adds.
    """

    ranks: HeadRanks
    head: Head
    token_ids: Tensor
    kept: KeptTokens
    temperature: Tensor
    sparse: bool
    room: Room

    def callers(self) -> list[Tensor]:
        """Return the caller's tensors that autograd can save, to notice later writes to them."""
        sets = [getattr(self.kept, field.name) for field in fields(self.kept)]
        given = [self.token_ids, self.temperature, *sets]
        return [tensor for tensor in given if not tensor.is_inference()]

    def row_of(self) -> Tensor:
        """Return int64 [T], the row of each listed id."""
        rows = torch.arange(len(self.token_ids), device=self.token_ids.device)
        return rows.repeat_interleave(self.kept.sizes)

    def owned(self) -> tuple[Tensor, Tensor]:
        """Return which listed ids this rank holds, as indices, and their rows of its weight."""
        own = self.ranks.owns(self.kept.token_ids).nonzero().flatten()
        return own, self.kept.token_ids[own] - self.ranks.shard.start

    def whole_parts(self) -> tuple[Tensor, ...]:
        """Return the rows that kept every id, in parts that are the same on every rank."""
        of_rank = -(-self.ranks.vocab_size // self.ranks.ranks.world_size)
        rows = self.kept.whole.nonzero().flatten()
        return rows.split(max(1, AT_ONCE // of_rank)) if len(rows) else ()


class KeptLogprobsFunction(torch.autograd.Function):
    """Scores with gradients for hidden states [N, D] and this rank's weight [V_local, D]."""

    @staticmethod
    def forward(
        ctx: Any, hidden_states: Tensor, weight: Tensor, scored: Scored
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies, float64 [N]."""
        row_of, ids = scored.row_of(), scored.kept.token_ids
        own, weight_rows = scored.owned()
        products = scored.room.pair_products(hidden_states, row_of[own], weight, weight_rows)
        own_logits = logits_of(products, scored.head)
        logits = _from_owner(own_logits, own, len(ids), scored.ranks)
        rows = hidden_states.new_empty(len(hidden_states), dtype=torch.float64)
        top = torch.full_like(rows, -torch.inf, dtype=logits.dtype)
        top.scatter_reduce_(0, row_of, logits, "amax")
        temperature = scored.temperature
        weights = masses_and_moments if logits.dtype == torch.float32 else _smooth_masses
        of_tokens = logits, top[row_of], temperature[row_of]
        below, listed = below_top(*of_tokens), torch.stack(weights(*of_tokens), dim=-1)
        sums = listed.new_zeros(len(rows), 2).index_add_(0, row_of, listed)
        drawn = torch.zeros_like(rows)
        is_drawn = ids == scored.token_ids[row_of]
        drawn[row_of[is_drawn]] = below[is_drawn]
        for part in scored.whole_parts():
            tile = tile_products(hidden_states[part], weight[: len(scored.ranks.shard)])
            tile = logits_of(tile, scored.head)
            or_none = F.pad(tile, (1, 0), value=-torch.inf)  # where a rank holds no rows
            top[part] = scored.ranks.largest(or_none.amax(dim=1))
            pair = weights(tile, top[part, None], temperature[part, None])
            sums[part] = scored.ranks.sum(torch.stack([x.sum(dim=1) for x in pair], dim=-1))
            own, column = _owned_tokens(scored, part)
            drawn_logits = _from_owner(tile[own, column], own, len(part), scored.ranks)
            drawn[part] = below_top(drawn_logits, top[part], temperature[part])
        total = sums.double()
        log_total = (total[:, 0] / TOP_MASS).log()
        is_number = top.isfinite()
        values = (drawn - log_total).where(is_number, torch.nan)
        entropies = (log_total + LN2 * (total[:, 1] / total[:, 0])).where(is_number, torch.nan)
        ctx.save_for_backward(
            *(hidden_states, weight, products, top, log_total, entropies), *scored.callers()
        )
        ctx.scored = scored
        return values, entropies

    @staticmethod
    def backward(ctx: Any, of_values: Tensor, of_entropies: Tensor) -> tuple[Any, ...]:
        """Return the gradients of hidden states, summed over ranks, and of this rank's weight."""
        of_head, error = ctx.scored.ranks, None
        saved: tuple[Tensor, ...] = ()
        with of_head.ranks.during(f"the backward of kept_logprobs number {of_head.number}"):
            try:
                saved = _saved(ctx, of_values, of_entropies)
            except RuntimeError as wrong:
                error = wrong
            of_head.compare_upstream((of_values, of_entropies), KeptLogprobs._fields, error)
            return KeptLogprobsFunction._gradients(ctx, saved, of_values, of_entropies)

    @staticmethod
    def _gradients(
        ctx: Any, saved: tuple[Tensor, ...], of_values: Tensor, of_entropies: Tensor
    ) -> tuple[Any, ...]:
        hidden_states, weight, products, top, log_total, entropies, *_ = saved
        scored: Scored = ctx.scored
        for_hidden, for_weight, _ = ctx.needs_input_grad
        temperature, ranks, room = scored.temperature, scored.ranks, scored.room

        def of_products(products: Tensor, row: Tensor, is_drawn: Tensor) -> Tensor:
            """Return the gradients of products, whose rows `row` names."""
            logits = logits_of(products, scored.head)
            log_p = below_top(logits, top[row], temperature[row]) - log_total[row]
            p = log_p.exp()
            spread = torch.where(p > 0, p * (log_p + entropies[row]), 0.0)
            grads = of_values[row] * (is_drawn.double() - p) - of_entropies[row] * spread
            return grads / temperature[row].double() * slopes(products, scored.head)

        row_of, ids = scored.row_of(), scored.kept.token_ids
        own, weight_rows = scored.owned()
        rows, is_drawn = row_of[own], ids[own] == scored.token_ids[row_of[own]]
        grads = of_products(products, rows, is_drawn)
        to_hidden = None
        if for_hidden:  # contiguous, because kernels and ranks add to rows, however these lie
            to_hidden = weight.new_zeros(hidden_states.shape, dtype=torch.float64)
            ends = _ends(rows, len(to_hidden))
            room.add_weighted_rows(to_hidden, ends, grads, weight, weight_rows)

        whole_parts, size = scored.whole_parts(), weight.shape[1]
        every = torch.arange(len(weight), device=weight.device)
        used = every if whole_parts else weight_rows.unique()
        used_index, order = torch.searchsorted(used, weight_rows).sort(stable=True)
        grads, rows, ends = grads[order], rows[order], _ends(used_index, len(used))
        num_rows = len(used) if scored.sparse else len(weight)
        to_weight = weight.new_zeros(num_rows if for_weight else 0, size)
        # Some rows of the weight at a time, because float64 of all would take 8 bytes a number.
        at_once = AT_ONCE if whole_parts else tile_elements(weight.device)
        for part in slices(len(used) if for_weight or whole_parts else 0, size, at_once):
            block = weight.new_zeros(part.stop - part.start, size, dtype=torch.float64)
            ends_of_block = ends[part.start : part.stop + 1]
            room.add_weighted_rows(block, ends_of_block, grads, hidden_states, rows)
            of_part = weight[part][: max(0, len(ranks.shard) - part.start)]
            for whole in whole_parts:
                tile = tile_products(hidden_states[whole], of_part)
                own, column = _owned_tokens(scored, whole)
                is_drawn = torch.zeros_like(tile, dtype=torch.bool)
                inside = (column >= part.start) & (column < part.stop)
                is_drawn[own[inside], column[inside] - part.start] = True
                of_tile = of_products(tile, whole.unsqueeze(1), is_drawn)
                of_tile = of_tile.to(sums_in(weight))
                if to_hidden is not None:
                    to_hidden[whole] += of_tile @ of_part.to(of_tile.dtype)
                block[: len(of_part)] += of_tile.T @ hidden_states[whole].to(of_tile.dtype)
            if for_weight:
                to_weight[part if scored.sparse else used[part]] = block.to(weight.dtype)
        if to_hidden is not None:
            to_hidden = ranks.sum(to_hidden).to(hidden_states.dtype)
        if not for_weight:
            return to_hidden, None, None
        if scored.sparse:
            to_weight = torch.sparse_coo_tensor(
                used.unsqueeze(0), to_weight, weight.shape, is_coalesced=True,
                check_invariants=False,
            )  # fmt: skip
        return to_hidden, to_weight, None


def _saved(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that forward saved.

    Raises:
        RuntimeError: one was written to, or a batch of gradients or second derivatives is wanted.
    """
    if any(map(is_batch, gradients)):
        raise RuntimeError(
            "kept_logprobs takes no batch of gradients in backward; leave out is_grads_batched and "
            "vectorize, or call backward for each"
        )
    if torch.is_grad_enabled():  # once_differentiable would leave second ones out in silence
        raise RuntimeError(
            "kept_logprobs has no second derivatives; call backward without create_graph=True"
        )
    saved: tuple[Tensor, ...] = ctx.saved_tensors
    return saved


def _ends(index: Tensor, count: int) -> Tensor:
    """Return int64 [count + 1], where each number below `count` ends in an ascending index."""
    return torch.searchsorted(index, torch.arange(count + 1, device=index.device))


def _from_owner(own: Tensor, index: Tensor, count: int, ranks: HeadRanks) -> Tensor:
    """Return [count] numbers, bit for bit, each from the one rank that has it. Collective."""
    kind = torch.int32 if own.dtype == torch.float32 else torch.int64
    bits = torch.zeros(count, dtype=torch.int64, device=own.device)
    bits[index] = own.view(kind).long()
    return ranks.sum(bits).to(kind).view(own.dtype)


def _owned_tokens(scored: Scored, part: Tensor) -> tuple[Tensor, Tensor]:
    """Return which drawn tokens of some rows this rank holds, as indices, and their columns."""
    token_ids = scored.token_ids[part]
    own = scored.ranks.owns(token_ids).nonzero().flatten()
    return own, token_ids[own] - scored.ranks.shard.start


def _smooth_masses(logits: Tensor, top: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `masses_and_moments` rounds, float64, for gradients by small differences."""
    below = below_top(logits, top, temperature)
    mass = below.exp() * TOP_MASS
    return mass, (-mass * below / LN2).where(mass > 0, 0.0)
