"""Verification by the ratio of the laws p and q: token by token, or the longest prefix that passes.

hidden states → the target's local logits → both laws → where the row stops → residual → token

    rejection   a = the number of drafts before the first with u q(x) >= p(x)
    block       c_0 = 1,  c_i = min(1, c_(i-1) · p(x_i) / q(x_i))      the prefix's coefficient
                s_i = Σ_v max(c_i · p_v - q_v, 0)                      after the prefix
                a   = the largest i with u_i < s_i / (s_i + 1 - c_i)   or 0

p and q of s_i are the laws after x_1 … x_i. Where there is no draft q = 0 and s_i = c_i, so the
test of the last draft is u < c. After the accepted drafts comes a draw from the residual, at c = 1
or at c_a, by Gumbel-max:

    argmax over v of log2 max(c · p_v - q_v, 0) - L_v        L the noise of the recovery domain

Where there was no draft this is a draw from the target: the bonus token. With both rules the tokens
follow the target's law at every position, whatever the draft (Leviathan et al., arXiv 2211.17192;
Chen et al., arXiv 2302.01318). A block accepts no fewer drafts in expectation (Sun et al., arXiv
2403.10444).

Accepting, recovering and drafting must be independent of each other and of token noise, so each has
its own domain word in the counter of the row stream. The `sample` word of the counter is the index
of the position within its verification. A position that a verification looked at and did not reach
is verified again by the next one, under a smaller index and so with fresh numbers. It needs them,
because the stopping place of a block already depended on the old ones.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from tpsample.core import word
from tpsample.core.order import order_words
from tpsample.filters.finish import kept_sets_of, logprobs_of, shard_logits
from tpsample.noise import row_stream, tile_noise
from tpsample.output import SampleOutput, VerifyOutput, reached
from tpsample.ranks.ranks import Ranks
from tpsample.request.plan import BatchView
from tpsample.request.step import Inputs
from tpsample.sampler import LMHeadSampler
from tpsample.speculative.drawn_drafts import OTHER_LAW, drawn_drafts
from tpsample.speculative.laws import Laws

DOMAIN_ACCEPT, DOMAIN_RECOVERY, DOMAIN_DRAFT = 0x61636370, 0x72637672, 0x64726674

SUM_UNIT = 2.0**-60
"""Residuals are summed as multiples of this, so that the order of summation does not matter."""


def accept_tokenwise(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    """Return int64 [B], how many drafts are accepted, each with probability min(1, p / q).

    Args:
        p, q: float64 [B, K + 1], both laws at the draft; q = 0 where there is none.
        u: float64 [B, K + 1], the uniforms.
    """
    return leading((u * q < p) & (q > 0))


def coefficients(p: Tensor, q: Tensor) -> Tensor:
    """Return c_0 … c_K, float64 [B, K + 1]; 0 behind a position without a draft.

    Args:
        p, q: float64 [B, K + 1], both laws at the draft of each position.
    """
    chain = [torch.ones_like(p[:, 0])]
    for i in range(p.shape[1] - 1):
        ratio = torch.where(q[:, i] > 0, p[:, i] / q[:, i], 0.0)
        chain.append((chain[-1] * ratio).clamp(max=1))
    return torch.stack(chain, dim=1)


def accept_block(coefficient: Tensor, sums: Tensor, u: Tensor) -> Tensor:
    """Return int64 [B], how many drafts are accepted.

    Args:
        coefficient, sums: float64 [B, K + 1], c_i and s_i.
        u: float64 [B, K + 1]; u_i is that of position i - 1, whose draft ends the prefix.
    """
    passed = u[:, :-1] * (sums + 1 - coefficient)[:, 1:] < sums[:, 1:]
    length = torch.arange(coefficient.shape[1], device=u.device)
    return (F.pad(passed, (1, 0)) * length).amax(dim=1)


def stop_block(laws: Laws, u: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return where each row stops, int64 [B], and its residual's coefficient, float64 [B].

    Collective: one sum.
    """
    coefficient = coefficients(laws.p, laws.q)
    units = torch.zeros_like(laws.drafts)
    for _, residual in laws.residual_tiles(coefficient):
        units += (residual / SUM_UNIT).round().to(torch.int64).sum(dim=2)
    sums = ranks.sum_integers(units).double() * SUM_UNIT
    # A position without a law has no draft, so c alone enters its test.
    sums = torch.where(laws.status == word.Status.OK, sums, coefficient)
    stop = accept_block(coefficient, sums, u)
    return stop, coefficient.gather(1, stop.unsqueeze(1)).squeeze(1)


def uniforms(seed: Tensor, positions: Tensor, num_positions: int) -> Tensor:
    """Return u in (0, 1) for each position to verify: odd multiples of 2^-53, float64
    [B, num_positions].

    Args:
        seed: int64 [B].
        positions: int64 [B], absolute position of each row's first token.
    """
    index = torch.arange(num_positions, device=seed.device)
    at = seed.unsqueeze(1), positions.unsqueeze(1) + index, index
    high, low, *_ = row_stream(*at, domain=DOMAIN_ACCEPT)
    bits = (high << 20) | (low >> 12)
    return (2 * bits + 1).double() * 2.0**-53


def position_of_rows(positions: Tensor, num_positions: int) -> Tensor:
    """Return int64 [B · num_positions], the absolute position of each row to verify.

    Args:
        positions: int64 [B], those of each request's first.
    """
    index = torch.arange(num_positions, device=positions.device)
    return (positions.unsqueeze(1) + index).flatten()


def leading(accepted: Tensor) -> Tensor:
    """Return int64 [B], how many of bool [B, K + 1] are true before the first that is not."""
    return accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)


def emit(drafts: Tensor, num_accepted: Tensor, token_ids: Tensor) -> Tensor:
    """Return int64 [B, K + 1]: the accepted drafts, the token [B] after them, then anything."""
    return drafts.scatter(1, num_accepted.unsqueeze(1), token_ids.unsqueeze(1))


def verify_by_ratio(
    sampler: LMHeadSampler,
    inputs: Inputs,
    drafts: Tensor,
    batch: BatchView,
    positions: Tensor,
    *,
    block: bool,
    draft: Tensor | None,
) -> VerifyOutput:
    """Verify token by token, or as a block. Collective.

    The local logits come from the sampler's backend, on a GPU from the LM-head kernel. The laws are
    plain PyTorch, tile by tile, on every device.

    Args:
        inputs: hidden states or logits of [B, K + 1] rows.
        drafts: int64 [B, K + 1], -1 where there is none.
        batch: the rows after each of their drafts.
        positions: int64 [B].
        block: whether drafts are accepted as a block.
        draft: [B, K, V_local], the drafter's logits; None if the drafts were certain.
    """
    num_rows, width = drafts.shape
    batch = batch._replace(plan=batch.plan.storing_every_row)
    # A draw of every row, because it tells the row's status.
    out, at = SampleOutput.empty(batch.seed, None), position_of_rows(positions, width)
    step = sampler.pipeline.begin(inputs, batch, at, out)
    sampler.exchange.finish(out, batch.seed)
    stored, ranks = shard_logits(step, sampler.shard, sampler.backend), sampler.ranks
    laws = Laws.of(stored, batch, drafts, draft, out.status.view(num_rows, width), ranks)
    if draft is not None and drawn_drafts(sampler).are_of_another_law(laws, batch):
        warnings.warn(OTHER_LAW, stacklevel=4)

    seed = batch.seed[::width].clone()  # the output is a value
    u = uniforms(seed, positions, width)
    if block:
        stop, coefficient = stop_block(laws, u, ranks)
    else:
        stop, coefficient = accept_tokenwise(laws.p, laws.q, u), torch.ones_like(u[:, 0])

    noise = row_stream(seed, positions + stop, stop, domain=DOMAIN_RECOVERY)
    token = recovered(laws.at(stop), coefficient, noise, ranks)
    verified = VerifyOutput.of(stop, emit(drafts, stop, token), laws.status, seed)
    if batch.plan.logprobs is not None:
        verified.logprobs = logprobs_of(stored, batch, ranks, verified.token_ids.flatten())
    verified.kept = kept_sets_of(stored, batch, ranks, reached(stop, width).flatten())
    return verified


def recovered(laws: Laws, coefficient: Tensor, stream: tuple[Tensor, ...], ranks: Ranks) -> Tensor:
    """Return the tokens, int64 [B], -1 where the status is not OK. Collective: one gather.

    Args:
        laws: at one position of each row.
        coefficient: float64 [B].
        stream: row stream of each row, int64 [B] tensors.
    """
    best = torch.zeros_like(laws.drafts)
    streams = tuple(r.view(-1, 1, 1) for r in stream)
    for first_id, residual in laws.residual_tiles(coefficient.unsqueeze(1)):
        noise = tile_noise(streams, first_id, residual.shape[2])
        words = order_words(recovery_scores(residual, noise), first_id)
        best = best.maximum(words.amax(dim=2))
    token_ids, _ = word.decode(ranks.gather_integers(best).amax(dim=0))
    return token_ids.where(laws.status == word.Status.OK, word.NO_TOKEN).squeeze(1)


def recovery_scores(residual: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 scores, rounded once; -inf where the residual is 0."""
    return (residual.log2() - noise.double()).float()
