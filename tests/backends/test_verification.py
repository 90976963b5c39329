"""The stages of a verification, by each backend against the definition: equal integers."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import pytest
import torch
from torch import Tensor

from tests.support.filtered import kinds_of_logits
from tests.support.twins import require_same
from tpsample import SampleOutput
from tpsample.backends import room_of
from tpsample.backends.torch_.verification import Verification
from tpsample.core import word
from tpsample.core.row_noise import RowNoise, safe_temperature

FIRST, WIDTH, K = 6, 1137, 3
"""The shard begins within a group of four, and ends within a block."""
TEMPERATURES = (1.0, 0.0, 0.3, 3.0, 1e-4, 2.0)


def logits_of(rows: int, generator: torch.Generator) -> Tensor:
    """fp32 [rows, WIDTH]: each kind in turn, with noise, and some that are no numbers."""
    kinds = [kind[:WIDTH] for kind in kinds_of_logits().values()]
    found = torch.stack([kinds[i % len(kinds)] for i in range(rows)])
    found += torch.randn(found.shape, generator=generator) * (torch.arange(rows) % 3 > 0)[:, None]
    found[3, 40] = math.nan
    found[5, 100:] = -math.inf
    found[8] = -math.inf
    found[9, [7, 700]] = math.inf
    return found


def problem(backend: str, block: bool, law: torch.dtype | None, width: int = WIDTH) -> Verification:
    """Drafts of 12 rows on one of several ranks."""
    generator = torch.Generator().manual_seed(8)
    num_rows, positions = 12, K + 1
    logits = logits_of(num_rows * positions, generator)[:, :width].contiguous()
    temperature = torch.tensor(TEMPERATURES * 2).repeat_interleave(positions)
    seed, at = torch.arange(num_rows) * 2**58, 2**33 + 7 * torch.arange(num_rows)
    places = (at.unsqueeze(1) + torch.arange(positions)).flatten()
    rows = room_of(backend).passes(
        logits=logits,
        raw=logits,
        first_id=FIRST,
        vocab_size=FIRST + WIDTH + 5,
        temperature=safe_temperature(temperature)[0],
        noise=RowNoise(temperature, seed.repeat_interleave(positions), places, 1),
    )
    drafts = torch.randint(0, FIRST + width + 5, (num_rows, positions), generator=generator)
    likely = logits.view(num_rows, positions, -1).nan_to_num(-1e9)
    if width:
        drafts = drafts.where(
            torch.rand(drafts.shape, generator=generator) < 0.3, FIRST + likely.argmax(dim=2)
        )
    lengths = torch.arange(num_rows) % (K + 2)
    drafts = drafts.where(torch.arange(positions) < lengths.clamp(max=K).unsqueeze(1), -1)
    draft = None
    if law is not None:
        whole = logits_of(num_rows * K, generator)[:, :width].view(num_rows, K, -1)
        draft = whole.to(law).transpose(0, 1).contiguous().transpose(0, 1)  # by draft, then by row
    if draft is not None and width:  # a draft that its drafter cannot have drawn
        drafts[5, 0], draft[5, 0, 11] = FIRST + 11, -math.inf
    status = torch.zeros(num_rows, positions, dtype=torch.int32)
    status[2, 1:], status[7] = 1, 2
    sampled = torch.where(status == 0, 7, -1)
    drafts[3], sampled[3] = -1, -1  # padding
    its = drafts, sampled, status, seed, at
    return room_of(backend).verification(rows, draft, *its, block)


@pytest.mark.parametrize("width", [1, 2, 5, 40])
@pytest.mark.parametrize("with_undrawn", [False, True])
def test_drafted_rows(width, with_undrawn):
    """Drafts end at the first that is no id, and an undrawn row has none."""
    drafts = torch.randint(-1, 12, (9, width - 1), generator=torch.Generator().manual_seed(width))
    undrawn = torch.arange(9) % 4 == 1 if with_undrawn else None
    given = drafts, undrawn, torch.arange(9) * 7 + 2**40, 11
    expected = room_of("torch").drafted_rows(*given)
    require_same(room_of("triton").drafted_rows(*given), expected)
    assert expected[1].view(9, width)[2].tolist() == [2**40 + 14 + i for i in range(width)]
    for row, own in enumerate(expected[0].tolist()):
        ends = [i for i, id_ in enumerate(drafts[row].tolist()) if not 0 <= id_ < 11]
        ended = 0 if with_undrawn and row % 4 == 1 else min(ends, default=width - 1)
        assert own == drafts[row, :ended].tolist() + [-1] * (width - ended)


@pytest.mark.parametrize("width", [1, 3, 40])
def test_coupled_outputs(width):
    """The drafts that are the tokens drawn, one token more, and the status and seed of the row."""
    generator = torch.Generator().manual_seed(width)
    tokens = torch.randint(0, 2, (9, width), generator=generator)
    drafts = torch.randint(0, 2, (9, width), generator=generator)
    drafts[4], tokens[5] = tokens[4], -1
    drafts[5], drafts[:, -1] = -1, -1
    status = torch.arange(9 * width, dtype=torch.int32)
    out = SampleOutput(tokens.flatten(), status, torch.arange(9 * width) + 100)
    expected = room_of("torch").coupled_output(drafts, out)
    require_same(room_of("triton").coupled_output(drafts, out), expected)
    assert expected.num_accepted[4] == width - 1 and expected.num_accepted[5] == 0
    for row, accepted in enumerate(expected.num_accepted.tolist()):
        assert drafts[row, :accepted].equal(tokens[row, :accepted])
        assert drafts[row, accepted] != tokens[row, accepted] or drafts[row, accepted] < 0
        assert expected.token_ids[row, : accepted + 1].equal(tokens[row, : accepted + 1])
        assert (expected.token_ids[row, accepted + 1 :] == -1).all()
        assert expected.status[row] == status[row * width + accepted]
        assert expected.seeds[row] == 100 + row * width


@pytest.mark.parametrize("law", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [False, True], ids=["rejection", "block"])
@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_every_stage_finds_the_integers_of_the_definition(backend, block, law):
    """The other rank has less of everything, except of some rows."""
    its, plain = (problem(name, block, law) for name in (backend, "torch"))
    own = plain.tops()
    require_same(its.tops(), own)
    other = (own - (40 << word.TOKEN_BITS)).clamp(min=0)
    other[::4] = own[::4] + (1 << word.TOKEN_BITS)
    tops = torch.stack([own, other])
    laws = plain.laws(tops)
    require_same(its.laws(tops), laws)

    cut = laws.cut.clone()
    cut[::3] = cut[::3].maximum(own[::3, : K + 1] - (1 << 42))  # of rows with filters
    laws = replace(laws, cut=cut)
    sums = plain.sums(laws)
    require_same(its.sums(laws), sums)

    sums = 2 * sums
    wanted, places = plain.accept(laws, sums)
    for found, expected in zip(its.accept(laws, sums), (wanted, places), strict=True):
        require_same(found, expected)
    assert len(places.index.unique()) > 2
    good = (laws.status == 0).gather(1, places.index)
    found, expected = its.residuals(wanted, places), plain.residuals(wanted, places)
    require_same(found * good, expected * good)
    assert (expected[0] > 0).any()

    gathered = torch.stack([expected, expected.flip(1)]) * good
    require_same(its.output(wanted, places, gathered), plain.output(wanted, places, gathered))


@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_an_empty_shard_finds_nothing(backend):
    its = problem(backend, True, torch.float32, width=0)
    tops = its.tops()
    assert not tops.any()
    laws = its.laws(torch.stack([tops, tops]))
    sums = its.sums(laws)
    assert sums.shape == (4, 12, K + 1) and not sums.any()
    assert not its.residuals(*its.accept(laws, sums)).any()
    assert len(astuple(laws)) == 5
