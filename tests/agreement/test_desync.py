"""Ranks that sampled differently are found, and named: planted faults, one of each kind."""

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import Case, own_sampler
from tests.support.ranks import same_on_ranks
from tpsample import Desync, LMHeadSampler, RankMismatch, SamplingParams
from tpsample.agreement.desync import step_digest
from tpsample.agreement.step import FIRST_STEPS
from tpsample.core.digest import mix

CULPRIT = 2


def _other_seed(case: Case, sampler: LMHeadSampler) -> None:
    case.params[0] = SamplingParams(seed=4711)


def _other_position(case: Case, sampler: LMHeadSampler) -> None:
    """Give this rank the positions of one that skipped a step."""
    case.positions.data = case.positions + 1  # in place would be in every process


def _flipped_bit(case: Case, sampler: LMHeadSampler) -> None:
    """A bit of a received word, of the token id or of the score, after the exchange."""
    collect = sampler.exchange.collect

    def flipped(rows: int) -> torch.Tensor:
        words = collect(rows)
        words[:, 1] ^= 1 << 3
        return words

    sampler.exchange.collect = flipped


FAULTS = {
    "seed": ("peer", _other_seed),
    "position": ("peer", _other_position),
    "flipped bit": ("collective", _flipped_bit),
}


def _plant(case: Case, exchange: str, plant, culprits: tuple[int, ...]) -> list[tuple]:
    found = []
    sampler = own_sampler(case.weight, exchange=exchange)
    for step in range(3):
        if dist.get_rank() in culprits and step == 2:
            plant(case, sampler)
        sampler(case.hidden_states, case.batch, case.positions)
        try:
            sampler.compare()
            found.append(())
        except Desync as error:
            found.append((error.ranks, str(error)))
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_its_rank_named(fault):
    exchange, plant = FAULTS[fault]
    *before, last = same_on_ranks(3, _plant, Case.make(40, 3), exchange, plant, (CULPRIT,))
    assert not any(before)
    assert last[0] == (CULPRIT,) and f"rank {CULPRIT}: " in last[1]


def test_without_a_majority_all_are_named():
    *_, last = same_on_ranks(2, _plant, Case.make(40, 3), "collective", _flipped_bit, (1,))
    assert last[0] == (0, 1)


def _on_demand(case: Case) -> str:
    sampler = own_sampler(case.weight, exchange="collective")
    sampler.compare()  # nothing sampled yet
    sampler(case.hidden_states, case.batch, case.positions, num_samples=2)
    sampler.compare()
    if dist.get_rank() == 0:
        _flipped_bit(case, sampler)
    sampler(case.hidden_states, case.batch, case.positions)
    with pytest.raises(Desync) as error:
        sampler.compare()
    return str(error.value)


def test_on_demand_the_last_step_is_compared():
    assert same_on_ranks(3, _on_demand, Case.make(40, 3)).startswith("ranks 0 sampled")


def _missing_all_reduce(case: Case, exchange: str) -> tuple[tuple[int, ...], str]:
    """One rank passes hidden states of its own, from the second step on."""
    rank = dist.get_rank()
    own = case.hidden_states.clone()
    own[1, 0] += rank == CULPRIT
    sampler = own_sampler(case.weight, exchange=exchange)
    for _ in range(FIRST_STEPS):  # which compare by themselves
        sampler(case.hidden_states, case.batch, case.positions)
    sampler.compare(case.hidden_states)
    sampler(own, case.batch, case.positions)
    sampler.compare()  # the tokens are the same
    with pytest.raises(Desync) as error:
        sampler.compare(own)
    found = tuple(error.value.ranks), str(error.value)
    sampler.compare(case.hidden_states)
    sampler.compare(case.hidden_states.bfloat16()[:1])
    if exchange == "collective":  # where ranks meet on the host
        with pytest.raises(RankMismatch, match="call: every rank must make the same call"):
            sampler.compare(own if rank else None)
    with pytest.raises(ValueError, match=r"hidden_states: expected a tensor \[B, D\] of any float"):
        sampler.compare(case.hidden_states.long())
    return found


@pytest.mark.parametrize("exchange", ["collective", "peer"])
def test_ranks_with_other_hidden_states_are_found_and_named(exchange):
    ranks, text = same_on_ranks(3, _missing_all_reduce, Case.make(40, 3), exchange)
    assert ranks == (CULPRIT,)
    assert text.startswith(f"ranks {CULPRIT} were given other hidden states; every rank must ")
    assert f"rank {CULPRIT}: " in text


def test_the_digest_sees_every_bit_of_every_value():
    generator = torch.Generator().manual_seed(0)
    values = [torch.randint(0, 2**62, (5,), generator=generator) for _ in range(3)]
    seen = {int(step_digest(*values))}
    for which in range(3):
        for bit in range(63):
            values[which][3] ^= 1 << bit
            seen.add(int(step_digest(*values)))
            values[which][3] ^= 1 << bit
    assert len(seen) == 1 + 3 * 63
    swapped = [value[[1, 0, 2, 3, 4]] for value in values]
    assert int(step_digest(*swapped)) not in seen


def test_mix_is_splitmix64():
    """The first outputs of SplitMix64 seeded with 1234567, as its reference code prints them."""
    mask = 2**64 - 1
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + golden * n) & mask for n in (1, 2, 3)]
    signed = torch.tensor([s - 2**64 if s >> 63 else s for s in states])
    assert [x & mask for x in mix(signed).tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
