"""Interpreted kernels: the tokens of the torch backend and of the oracle, tile and shard aside."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from tests.support import oracle
from tests.support.cases import Case, uneven_shards
from tests.support.local_step import step, tile
from tpsample import SampleOutput, SamplingParams, Status, VocabShard, noise, reference
from tpsample.backends.triton_.kernels import head
from tpsample.backends.triton_.tile_table import Tile
from tpsample.core.score import Head
from tpsample.reference import NEAR_TIE

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TILES = [tile(16, 4, 16), tile(128, 8, 64), tile(512, 16, 32)]
INF, NAN = math.inf, math.nan


def name(value) -> str:
    """Readable test ids."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return "x".join(str(x) for x in (value.block_v, value.block_b, value.block_d))


def integers(case: Case) -> Case:
    """The case with small integers, whose products and sums are exact in every order."""
    hidden_states, weight = (
        (2 * x.float()).round().clamp(-8, 8).to(x.dtype) for x in (case.hidden_states, case.weight)
    )
    return dataclasses.replace(case, hidden_states=hidden_states, weight=weight)


def tokens_are_the_oracles(out: SampleOutput, case: Case, logits: torch.Tensor) -> None:
    """The status and tokens of `reference.sample`, near-ties between the two best scores aside."""
    num_samples = out.token_ids.shape[1] if out.token_ids.ndim == 2 else None
    expected = reference.sample(logits, case.batch, case.positions, num_samples=num_samples)
    assert out.status.tolist() == expected.status.tolist()
    tokens, wanted = (x.view(len(logits), -1) for x in (out.token_ids, expected.token_ids))
    for row, sample in (tokens != wanted).nonzero().tolist():
        scores = reference.scores(logits, case.batch, case.positions, sample=sample)
        best, second = scores[row].topk(2).values.tolist()
        assert best - second < NEAR_TIE, (
            f"row {row}, sample {sample}: token {tokens[row, sample]}, the oracle says "
            f"{wanted[row, sample]} with {best} to {second}"
        )


def both_backends(case: Case, block: Tile, logits=None, shards=None, **how):
    """Outputs of the kernel and of its twin, after both were checked against the oracle."""
    if logits is None:
        logits = reference.logits(case.hidden_states, case.weight)
    kernel = step(case, shards, backend="triton", tile=block, **how)
    twin = step(case, shards, backend="torch", block_v=block.block_v + 1, **how)
    for out in (kernel, twin):
        tokens_are_the_oracles(out, case, logits)
    return kernel, twin


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("block", TILES, ids=name)
def test_small_integers_give_identical_tokens(block, dtype):
    case = integers(Case.make(8 * block.block_v + 5, 6, 40, dtype))
    kernel, twin = both_backends(case, block)
    expected = case.oracle().token_ids.tolist()
    assert kernel.token_ids.tolist() == twin.token_ids.tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("block", TILES, ids=name)
def test_real_values_give_the_oracles_tokens(block, dtype):
    both_backends(Case.make(8 * block.block_v + 3, 6, 40, dtype), block)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64])
def test_batch_sizes_and_a_hidden_size_that_no_block_divides(rows):
    case = integers(Case.make(301, rows, 41))
    both_backends(case, tile(256, 16, 32), shards=uneven_shards(301, 2))


@pytest.mark.parametrize("backend", ["torch", "numba", "triton"])
def test_shards_agree(backend):
    """They give the oracle's tokens, bit for bit, however the vocabulary is cut."""
    case = Case.make(203, 8)
    expected = case.oracle()
    for world_size in (1, 2, 3, 4, 8):
        even = [VocabShard.even(case.vocab_size, r, world_size) for r in range(world_size)]
        for shards in (even, uneven_shards(case.vocab_size, world_size)):
            out = step(case, [s for s in shards if len(s)], backend=backend)
            assert out.token_ids.tolist() == expected.token_ids.tolist(), f"shards {shards}"
            assert out.status.tolist() == expected.status.tolist(), f"shards {shards}"


@pytest.mark.parametrize("start", [1, 2, 3, 5])
def test_a_shard_may_start_inside_a_quad(start):
    case = integers(Case.make(71, 4))
    cut = [VocabShard(0, start), VocabShard(start, 38), VocabShard(38, 71)]
    both_backends(case, TILES[0], shards=cut)


def test_a_column_beside_its_shard_is_no_candidate():
    """It repeats the first or last row of the shard, here the only ones that can win."""
    case = Case.make(70, 16)
    case.hidden_states.fill_(1.0)
    case.weight.fill_(-8.0)
    case.weight[[7, 69]] = 0.0
    both_backends(case, tile(64, 16, 16), shards=[VocabShard(0, 7), VocabShard(7, 70)])


@pytest.mark.parametrize("backend", ["torch", "numba", "triton"])
def test_padding_is_never_seen(backend):
    """Rows behind a shard that would win, or poison, every row of the batch change nothing."""
    case = Case.make(203, 8)
    expected = case.oracle().token_ids.tolist()
    toward = 1e6 * case.hidden_states[:1].float().sign()
    for filling in (toward, -toward, torch.full_like(toward, float("nan"))):
        for shards in (None, uneven_shards(case.vocab_size, 3)):
            out = step(case, shards, padding=filling.expand(5, -1), backend=backend)
            assert out.token_ids.tolist() == expected, f"padding {filling[0, 0]}, shards {shards}"
            assert (out.status == Status.OK).all()


@pytest.mark.parametrize(
    ("scale", "softcap", "has_bias"),
    [
        c
        for c in itertools.product((1.0, 0.5), (None, 3.0), (False, True))
        if any((c[0] != 1, *c[1:]))
    ],
)
def test_head(scale, softcap, has_bias):
    case = Case.make(203, 8)
    bias = torch.randn(203, generator=torch.Generator().manual_seed(1)) if has_bias else None
    logits = reference.logits(
        case.hidden_states, case.weight, bias=bias, logit_scale=scale, logit_softcap=softcap
    )
    padding = torch.full((3, 16), NAN)
    shards = uneven_shards(203, 3)
    both_backends(
        case, TILES[1], logits, shards, head=Head(scale, softcap), bias=bias, padding=padding
    )


def test_every_piece_of_the_head_matters():
    """The same case gives other tokens with each part left out, so the test above can fail."""
    case = Case.make(203, 8)
    bias = torch.randn(203, generator=torch.Generator().manual_seed(1))
    full = {"bias": bias, "logit_scale": 0.5, "logit_softcap": 3.0}
    tokens = case.oracle(**full).token_ids.tolist()
    for part in full:
        assert (
            case.oracle(**{k: v for k, v in full.items() if k != part}).token_ids.tolist() != tokens
        )


@pytest.mark.parametrize("num_samples", [1, 3])
def test_several_samples_per_row(num_samples):
    case = Case.make(203, 6)
    kernel, _ = both_backends(case, TILES[1], num_samples=num_samples)
    assert kernel.token_ids.shape == (6, num_samples)
    first = reference.sample(
        reference.logits(case.hidden_states, case.weight),
        case.batch,
        case.positions,
    )
    assert kernel.token_ids[:, 0].tolist() == first.token_ids.tolist()


def planted_logits(values: dict[int, float], *, greedy: bool, fill: float = -1.0) -> Case:
    """One row of 37 logits, exact: the hidden state is 1."""
    logits = torch.full((37, 1), fill)
    for token_id, value in values.items():
        logits[token_id] = value
    params = [SamplingParams(temperature=0.0 if greedy else 0.8, seed=11)]
    return Case(torch.ones(1, 1), logits, params, torch.tensor([5]))


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "random"])
@pytest.mark.parametrize(
    ("values", "fill", "token", "status"),
    [
        ({9: NAN}, -1.0, -1, Status.NAN),
        ({9: NAN, 3: INF}, -1.0, -1, Status.NAN),
        ({20: NAN}, -INF, -1, Status.NAN),
        ({30: INF}, -1.0, -1, Status.NAN),
        ({30: INF, 7: INF, 8: INF}, -INF, -1, Status.NAN),
        ({13: -1e30}, -INF, 13, Status.OK),
        ({}, -INF, -1, Status.EMPTY),
    ],
    ids=["nan", "nan and inf", "nan and masks", "overflow", "overflows", "one left", "empty"],
)
def test_special_logits(values, fill, token, status, greedy):
    case = planted_logits(values, greedy=greedy, fill=fill)
    logits = case.weight.T.contiguous()  # not hidden · weight, which makes 0 · inf of nothing
    logits.masked_fill_(logits == INF, NAN)  # a product that is +inf is no logit
    for out in both_backends(case, TILES[0], logits, uneven_shards(37, 2)):
        assert (out.token_ids.item(), out.status.item()) == (token, status)


@pytest.mark.parametrize(
    "values",
    [{5: 2.0, 6: 2.0, 36: 2.0}, {8: 2.0, 9: 2.0}, {5: 0.0, 6: 0.0}, {5: 1e-45, 6: 0.0}],
    ids=["between shards", "in one tile", "zero", "subnormal"],
)
def test_greedy_ties_go_to_the_lowest_id(values):
    case = planted_logits(values, greedy=True)
    for out in both_backends(case, TILES[0], shards=[VocabShard(6, 37), VocabShard(0, 6)]):
        assert out.token_ids.item() == min(values)


# (seed, planted id, its word, its Gumbel noise, id with noise near 0): position and sample
# 0. Found by searching seeds for words that fp32 -log(-log(rand)), which ends at 16.64, cannot use.
PLANTED_TAILS = [
    (481, 12239, 35, 18.61, 5),
    (2, 84308, 135, 17.27, 29),
    (345, 91596, 148, 17.18, 34),
]


@pytest.mark.parametrize(
    ("golden", "how"),
    [
        (PLANTED_TAILS[0], {"backend": "triton", "tile": tile(4096, 4, 16)}),
        *((golden, {"backend": "torch"}) for golden in PLANTED_TAILS),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else value["backend"],
)
def test_planted_tails_win(golden, how):
    """A token that only noise beyond fp32 -log(-log(rand)) can lift is drawn, and by 0.2 nats."""
    seed, planted, word, gumbel, best = golden
    assert noise.words(seed, 0, planted).item() == word
    ids = np.array([planted])
    assert oracle.noise_words(seed, 0, ids)[0][0] == word
    natural = -(oracle.noise(seed, 0, ids) + math.log2(math.log(2))) * math.log(2)
    assert math.log(word / (word + 1)) < natural[0] - gumbel < 0.01  # the table has 32 bits
    logits = torch.full((planted + 13, 1), -60.0)
    logits[best] = 0.0
    logits[planted] = -(gumbel - 0.3)
    params = [SamplingParams(seed=seed)]
    case = Case(torch.ones(1, 1), logits, params, torch.zeros(1, dtype=torch.int64))
    assert step(case, **how).token_ids.tolist() == [planted]


@pytest.mark.parametrize(("rows", "parts"), [(5, 1), (32, 1), (33, 2), (65, 3), (128, 4)])
def test_padded_batch_columns_draw_no_noise(monkeypatch, rows, parts):
    """A batch tile of 128 is worked on 32 rows at a time, as far as there are rows."""
    drawn = []
    noise_tile = head.noise_tile
    monkeypatch.setattr(
        head, "noise_tile", lambda *given: drawn.append(given) or noise_tile(*given)
    )
    case = Case.make(60, rows)
    kernel = step(case, backend="triton", tile=tile(64, 128, 16))
    assert torch.equal(kernel.token_ids, case.oracle().token_ids)
    assert len(drawn) == parts
