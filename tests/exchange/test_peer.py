"""The `peer` exchange in the interpreter: the real kernels write into every rank's inbox.

The ranks here are virtual, several in one process; those of `test_soak` share memory.
The oracle is `reference.sample` on the full logits.
"""

import itertools
import random

import pytest
import torch

import tpsample.backends.triton_.launch
import tpsample.exchange.peer
from benchmarks.lab.virtual_ranks import even_shards
from tests.support.cases import Case, uneven_shards
from tests.support.settings import settings_of
from tests.support.tiers import long
from tests.support.virtual import Spy, assert_all_equal, step, virtual
from tpsample import LMHeadSampler, PeerLost, SamplingBatch, Status, VocabShard
from tpsample.backends.torch_.launch import TorchBackend
from tpsample.backends.triton_.kernels.inbox import chunk_of_tile, tiles_of_chunk
from tpsample.core import word
from tpsample.request.step import Inputs

CANARY = -987654321


SHARDS = {
    "even": even_shards,
    "uneven": uneven_shards,
    "all on the last": lambda v, w: [VocabShard(0, 0)] * (w - 1) + [VocabShard(0, v)],
}


# Each pair of values of two arguments is in some case.
PAIRS = [
    (1000, 1, "even", 4),
    (1000, 2, "uneven", 1),
    (1000, 3, "even", 1),
    (1000, 3, "uneven", 4),
    (1000, 4, "all on the last", 4),
    (1000, 8, "uneven", 4),
    (7, 1, "all on the last", 1),
    (7, 2, "even", 4),
    (7, 2, "all on the last", 4),
    (7, 3, "all on the last", 4),
    (7, 4, "even", 1),
    (7, 4, "uneven", 1),
    (7, 8, "even", 1),
    (7, 8, "all on the last", 4),
    (7, 1, "uneven", 4),
]
EVERY = [
    case
    for case in itertools.product([1000, 7], [1, 2, 3, 4, 8], SHARDS, [1, 4])
    if case not in PAIRS
]


@pytest.mark.parametrize(("vocab_size", "world_size", "shards", "chunks"), [*PAIRS, *long(*EVERY)])
def test_tokens_are_the_oracles(vocab_size, world_size, shards, chunks):
    case = Case.make(vocab_size, 5)
    world, samplers = virtual(case, SHARDS[shards](vocab_size, world_size), chunks=chunks)
    assert_all_equal(step(world, samplers, case), case.oracle())
    several = case.rows([4, 1])
    assert_all_equal(step(world, samplers, several, num_samples=2), several.oracle(num_samples=2))


@pytest.mark.parametrize("num_samples", [None, 2])
def test_rows_that_name_no_request_get_no_token(num_samples):
    case = Case.make(1000, 5)
    slots = SamplingBatch.of_slots(4, vocab_size=1000)
    slots.put([0, 3], case.params[:2])
    world, samplers = virtual(case, SHARDS["uneven"](1000, 3), chunks=2)
    named = torch.tensor([3, -1, 0, 2, -1])  # padding, and a slot without a request
    given = case.hidden_states, slots.select(named), case.positions
    expected = LMHeadSampler(case.weight, backend="torch")(*given, num_samples=num_samples)
    assert expected.status.tolist() == [0, 0, 0, Status.BAD_SLOT, 0]
    assert_all_equal(world.step(samplers, *given, num_samples=num_samples), expected)


@pytest.mark.parametrize(
    ("vocab_size", "world_size", "shards", "chunks"),
    [(12289, 2, "even", 4), *long((50257, 4, "uneven", 1), (151936, 8, "even", 4))],
)
def test_large_vocabularies_whatever_the_batch(vocab_size, world_size, shards, chunks):
    """Rows permuted, padded with strangers, and alone."""
    case = Case.make(vocab_size, 4)
    expected = case.oracle().token_ids.tolist()
    world, samplers = virtual(case, SHARDS[shards](vocab_size, world_size), None, chunks=chunks)
    for sampler in samplers:
        sampler.exchange.timeout_s = 1
    for index in ([2, 0, 3, 1], [3]):
        for out in step(world, samplers, case.rows(index)):
            assert out.token_ids.tolist() == [expected[row] for row in index]
    padded = Case.make(vocab_size, 5).beside(case)
    for out in step(world, samplers, padded):
        assert out.token_ids[5:].tolist() == expected


def test_tile_of_the_table_and_more_rows_than_a_finish_program():
    case = Case.make(300, 70, dtype=torch.float32)
    world, samplers = virtual(case, even_shards(300, 3), tile=None, chunks=2)
    for _ in range(2):
        assert_all_equal(step(world, samplers, case), case.oracle())
    assert [int(sampler.exchange.epoch) for sampler in samplers] == [3, 3, 3]


def test_every_chunk_has_tiles_and_they_add_up():
    for num_chunks in range(1, 9):
        for num_tiles in range(num_chunks, 40):
            chunks = [chunk_of_tile.fn(t, num_tiles, num_chunks) for t in range(num_tiles)]
            counts = [tiles_of_chunk.fn(c, num_tiles, num_chunks) for c in range(num_chunks)]
            assert chunks == sorted(chunks)
            assert [chunks.count(chunk) for chunk in range(num_chunks)] == counts
            assert min(counts) >= 1


def test_a_chunk_is_pushed_by_its_last_tile_and_not_before(monkeypatch):
    """Stops the launch after each of its programs: 5 tiles in 2 chunks, 2 and 3."""
    case = Case.make(640, 3)
    _, (sampler, peer) = virtual(case, [VocabShard(0, 640), VocabShard(640, 640)], chunks=2)
    kernel = tpsample.backends.triton_.launch.lm_head_kernel
    pushed = []
    for programs in range(1, 6):
        stopped = Spy(kernel, lambda _, grid, __, programs=programs: (min(programs, *grid),))
        monkeypatch.setattr(tpsample.backends.triton_.launch, "lm_head_kernel", stopped)
        sampler.local._launches.clear()  # which know the kernel that was here before
        sampler.pipeline.start(Inputs(case.hidden_states), case.batch, case.positions)
        slots = peer.exchange.memory.own[1, :, 0, :3]
        pushed.append([bool((chunk != 0).all()) for chunk in slots])
        assert all(pushed[-1][chunk] or (slots[chunk] == 0).all() for chunk in range(2))
        for each in (sampler, peer):
            each.exchange.reset()
    assert pushed == [[False, False], *[[True, False]] * 3, [True, True]]


def _local_words(case: Case, sampler: LMHeadSampler, num_samples: int | None) -> torch.Tensor:
    """The words of a rank's whole shard by the torch backend."""
    twin = TorchBackend(settings_of(sampler.weight, sampler.shard))
    words = torch.zeros(case.hidden_states.shape[0] * (num_samples or 1), dtype=torch.int64)
    view = case.batch._view_of(case.hidden_states.shape[0])
    step = twin.prepare(case.hidden_states, view, case.positions, num_samples or 1)
    twin.best_words(step, words)
    return words


@pytest.mark.parametrize("num_samples", [None, 2])
def test_a_push_writes_each_word_once_to_every_rank_and_nothing_else(num_samples):
    """The inboxes between the halves of a step; rows that are not part of it keep a canary."""
    case, rows, chunks, max_rows = Case.make(1000, 5), 5 * (num_samples or 1), 4, 16
    _, samplers = virtual(case, uneven_shards(1000, 3), chunks=chunks, max_rows=max_rows)
    for sampler in samplers:
        sampler.exchange.memory.own[..., rows:] = CANARY
        sampler.exchange.words[..., rows:] = CANARY
    begun = [
        sampler.pipeline.start(
            Inputs(case.hidden_states), case.batch, case.positions, num_samples=num_samples
        )
        for sampler in samplers
    ]
    epoch = 1
    sent = [
        _local_words(case, sampler, num_samples) | epoch << word.EPOCH_SHIFT for sampler in samplers
    ]
    for sampler in samplers:
        inbox = sampler.exchange.memory.own
        assert inbox.shape == (2, chunks, 3, max_rows)
        for source in samplers:
            rank = source.exchange.ranks.rank
            assert torch.equal(inbox[epoch & 1, :, rank, :rows].amax(dim=0), sent[rank])
            assert (inbox[epoch & 1, :, rank, :rows] != 0).all()
            assert (source.exchange.words[..., :rows] == 0).all()
        assert (inbox[1 - (epoch & 1), ..., :rows] == 0).all()
        assert (sampler.exchange.arrive == 0).all()
    outputs = [sampler.pipeline.finish(each) for sampler, each in zip(samplers, begun, strict=True)]
    assert_all_equal(outputs, case.oracle(num_samples))
    for sampler in samplers:
        assert (sampler.exchange.memory.own[..., :rows] == 0).all()
        assert (sampler.exchange.memory.own[..., rows:] == CANARY).all()
        assert (sampler.exchange.words[..., rows:] == CANARY).all()


def test_steps_of_any_size_through_the_wrap_of_the_epoch():
    case = Case.make(40, 9)
    world, samplers = virtual(case, even_shards(40, 2), chunks=2)
    for sampler in samplers:
        sampler.exchange.epoch.fill_(2040)
    sizes = random.Random(3)
    epochs = []
    for _ in range(16):
        epochs.append(int(samplers[0].exchange.epoch))
        some = case.rows(sizes.sample(range(9), sizes.randint(1, 9)))
        assert_all_equal(step(world, samplers, some), some.oracle())
        for sampler in samplers:
            assert (sampler.exchange.memory.own == 0).all()
            assert int(sampler.exchange.done) == 0
            sampler.check()
    assert epochs == [*range(2040, 2047), *range(1, 10)]


def test_a_word_of_an_earlier_epoch_does_not_stand_for_a_rank():
    case = Case.make(40, 3)
    _, (sampler, _) = virtual(case, even_shards(40, 2))
    sampler.exchange.epoch.fill_(3)
    stale = word.pack(torch.tensor(1e30), torch.tensor(39)) | 1 << word.EPOCH_SHIFT
    sampler.exchange.memory.own[1, :, 1] = stale
    out = sampler(case.hidden_states, case.batch, case.positions)
    assert out.status.tolist() == [Status.PEER_LOST] * 3
    with pytest.raises(PeerLost, match="rank 1 did not answer"):
        sampler.check()


def test_a_step_replayed_from_its_launches(monkeypatch):
    """Record what a CUDA graph keeps: the launches with their arguments, not the host code."""
    launches = []

    for module, name in (
        (tpsample.backends.triton_.launch, "lm_head_kernel"),
        (tpsample.exchange.peer, "peer_finish_kernel"),
    ):
        spy = Spy(getattr(module, name), lambda *launch: launches.append(launch))
        monkeypatch.setattr(module, name, spy)

    case = Case.make(100, 3)
    world, samplers = virtual(case, even_shards(100, 2), chunks=2)
    outputs = step(world, samplers, case)
    assert len(launches) == 4
    for _ in range(3):
        case.positions.add_(1)
        for kernel, grid, arguments in launches:
            kernel[grid](**arguments)
        assert_all_equal(outputs, case.oracle())


def test_a_rank_that_lost_another_tells_the_rest_in_its_next_step():
    case = Case.make(100, 5)
    world, samplers = virtual(case, even_shards(100, 3), chunks=2, on_failed=9)
    addresses = samplers[2].exchange.memory.addresses
    real, nowhere = addresses.clone(), torch.zeros_like(samplers[2].exchange.memory.own)
    addresses[1] = nowhere.data_ptr()
    outputs = step(world, samplers, case)
    assert_all_equal([outputs[0], outputs[2]], case.oracle())
    assert outputs[1].status.tolist() == [Status.PEER_LOST] * 5
    addresses.copy_(real)
    for _ in range(2):
        for output in step(world, samplers, case):
            assert output.token_ids.tolist() == [9] * 5
            assert output.status.tolist() == [Status.PEER_LOST] * 5
    for sampler, name, lost_step in zip(samplers, (1, 2, 1), (1, 0, 1), strict=True):
        with pytest.raises(PeerLost) as lost:
            sampler.check()
        assert (lost.value.ranks, lost.value.step) == ((name,), lost_step)
    for sampler in samplers:
        sampler.exchange.reset()
    assert_all_equal(step(world, samplers, case), case.oracle())


def test_a_dead_rank_is_named_and_reset_recovers():
    case = Case.make(100, 5)
    world, samplers = virtual(case, even_shards(100, 3), chunks=2)
    assert_all_equal(step(world, samplers, case), case.oracle())
    alive = samplers[:2]
    for timeout_s in (0.01, 3600):  # once lost, nobody waits again
        for sampler in alive:
            sampler.exchange.timeout_s = timeout_s
        begun = [
            sampler.pipeline.start(Inputs(case.hidden_states), case.batch, case.positions)
            for sampler in alive
        ]
        for output in [s.pipeline.finish(each) for s, each in zip(alive, begun, strict=True)]:
            assert output.token_ids.tolist() == [-1] * 5
            assert output.status.tolist() == [Status.PEER_LOST] * 5
    for sampler in alive:
        with pytest.raises(PeerLost, match="rank 2 did not answer"):
            sampler.check()
    samplers[2].check()

    for sampler in samplers:
        sampler.exchange.reset()
        sampler.check()
    for _ in range(3):
        assert_all_equal(step(world, samplers, case), case.oracle())
