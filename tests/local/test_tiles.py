"""Which tile is taken, that ranks agree on the table, and tiles loaded through descriptors."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist

import tpsample.local.triton_backend
from benchmarks import tune
from benchmarks.problem import WrongToken
from benchmarks.shapes import TINY
from tests.support.agreement import padding_is_never_seen, shards_agree, step, tile
from tests.support.cases import Case, even_shards
from tests.support.ranks import run_ranks
from tests.support.virtual import Spy, virtual
from tests.support.virtual import step as peer_step
from tpsample import LMHeadSampler, RankMismatch, VocabShard
from tpsample.local import measured_tiles, tile_table
from tpsample.local.measured_tiles import MeasuredTile
from tpsample.local.tiles import Gpu, Tile

H200 = Gpu("NVIDIA H200", 90, 132)
TILE = Tile(128, 64, 64, 4, 4)
ENTRY = MeasuredTile(H200, 128256, 4096, 64, Tile(64, 64, 128, 4, 3, True), 290.5, 301.0)


def test_a_measured_shape_takes_its_tile_and_any_other_the_rule(monkeypatch):
    monkeypatch.setattr(tile_table, "measured_tiles", lambda: {ENTRY.shape: ENTRY.tile})
    tile_table.tile_for.cache_clear()

    def chosen(rows, vocab_rows=128256, hidden_size=4096, gpu=H200, dtype=torch.bfloat16):
        return tile_table.tile_for(rows, vocab_rows, hidden_size, dtype, gpu)

    assert chosen(64) == chosen(33) == ENTRY.tile
    others = [chosen(32), chosen(65), chosen(64, 128255), chosen(64, hidden_size=8192)]
    others += [chosen(64, gpu=Gpu("NVIDIA H100", 90, 132)), chosen(64, dtype=torch.float32)]
    tile_table.tile_for.cache_clear()
    assert ENTRY.tile not in others


def test_rules_read_the_weights_once_and_fill_the_gpu():
    def rule(rows, vocab_rows):
        return tile_table.tile_for(rows, vocab_rows, 8192, torch.bfloat16, H200)

    assert [rule(rows, 128256).block_b for rows in (1, 17, 64, 65, 256, 512)] == [
        16, 32, 64, 128, 256, 256,
    ]  # fmt: skip
    assert rule(64, 128256).block_v == 128 and rule(64, 128256 // 8).block_v == 64


def test_nothing_that_ships_was_measured():
    assert measured_tiles.load(measured_tiles.FILE) == []


def test_a_table_is_read_back_as_it_was_written(tmp_path):
    other = dataclasses.replace(ENTRY, batch=16)
    path = tmp_path / "tiles.json"
    measured_tiles.save(path, [ENTRY, other])
    assert measured_tiles.load(path) == [other, ENTRY]
    assert len(path.read_text().splitlines()) == 4  # one entry a line
    measured_tiles.save(path, [])
    assert measured_tiles.load(path) == []


@pytest.mark.parametrize("broken", [{"gpu": {}}, 7, {**dataclasses.asdict(ENTRY), "why": "?"}])
def test_a_broken_table_names_the_entry(tmp_path, broken):
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps([dataclasses.asdict(ENTRY), broken]))
    with pytest.raises(ValueError, match="entry 1 is no measured tile"):
        measured_tiles.load(path)


def test_every_entry_of_the_table_changes_its_fingerprint(tmp_path, monkeypatch):
    found = {tile_table.fingerprint()}
    for tiles in ([ENTRY], [dataclasses.replace(ENTRY, batch=16)]):
        monkeypatch.setattr(tile_table, "FILE", tmp_path / "tiles.json")
        measured_tiles.save(tmp_path / "tiles.json", tiles)
        found.add(tile_table.fingerprint())
    assert len(found) == 3


def _build_with_own_table(backend: str) -> str:
    rank = dist.get_rank()
    tile_table.fingerprint = lambda: f"table {rank}"
    try:
        LMHeadSampler(torch.zeros(4, 16), backend=backend)
    except RankMismatch as error:
        return str(error)
    return "built"


def test_ranks_with_other_tables_refuse_to_be_built():
    for message in run_ranks(2, _build_with_own_table, "triton"):
        assert message == (
            "tile_table: must be the same on every rank, got rank 0: 'table 0', rank 1: 'table 1'"
        )
    assert run_ranks(2, _build_with_own_table, "torch") == ["built"] * 2  # it uses no table


def described(block_v: int, block_b: int, block_d: int) -> Tile:
    return dataclasses.replace(tile(block_v, block_b, block_d), descriptors=True)


@pytest.fixture
def described_launches(monkeypatch):
    """Whether each launch of the LM head loads through descriptors."""
    launches = []
    spy = Spy(
        tpsample.local.triton_backend.lm_head_kernel,
        lambda _, __, arguments: launches.append(arguments["DESCRIPTORS"]),
    )
    monkeypatch.setattr(tpsample.local.triton_backend, "lm_head_kernel", spy)
    return launches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("hidden_size", [40, 64])
def test_descriptors_give_the_same_tokens(dtype, hidden_size, described_launches):
    """With a shard that begins within a quad, and more rows than one batch tile."""
    case = Case.make(300, 9, hidden_size, dtype)
    shards = [VocabShard(0, 71), VocabShard(71, 300)]
    out = step(case, shards, backend="triton", tile=described(128, 4, 32))
    assert described_launches == [True, True]
    assert torch.equal(out.token_ids, case.oracle().token_ids)


def test_descriptors_see_neither_padding_nor_other_shards(described_launches):
    case = Case.make(203, 8)
    padding_is_never_seen(case, backend="triton", tile=described(128, 8, 16))
    shards_agree(case, backend="triton", tile=described(128, 8, 16))
    assert all(described_launches)


@pytest.mark.parametrize(
    ("dtype", "hidden_size", "offset"),
    [(torch.bfloat16, 20, 0), (torch.float32, 64, 0), (torch.bfloat16, 64, 1)],
    ids=["rows of 40 bytes", "fp32", "hidden states at an odd address"],
)
def test_rows_that_do_not_fit_are_loaded_by_pointers(
    dtype, hidden_size, offset, described_launches
):
    case = Case.make(203, 5, hidden_size, dtype)
    memory = torch.empty(case.hidden_states.numel() + offset, dtype=dtype)
    moved = memory[offset:].view(case.hidden_states.shape).copy_(case.hidden_states)
    out = step(
        dataclasses.replace(case, hidden_states=moved), backend="triton", tile=described(128, 8, 16)
    )
    assert described_launches == [False]
    assert torch.equal(out.token_ids, case.oracle().token_ids)


def test_descriptors_under_the_peer_exchange(described_launches):
    """The shard of rank 1 is empty: it has nothing to describe."""
    case = Case.make(640, 5)
    shards = [*even_shards(640, 1), VocabShard(640, 640)]
    world, samplers = virtual(case, shards, described(128, 8, 16), chunks=2)
    for output in peer_step(world, samplers, case):
        assert torch.equal(output.token_ids, case.oracle().token_ids)
    assert described_launches == [True, False]


def test_warp_specialization_gives_the_same_tokens():
    """The interpreter knows no warps: what this shows is that the flag reaches the kernel."""
    case = Case.make(300, 5)
    specialized = dataclasses.replace(described(128, 8, 16), warp_specialize=True)
    out = step(case, backend="triton", tile=specialized)
    assert torch.equal(out.token_ids, case.oracle().token_ids)


class TestTuner:
    def test_writes_a_table_that_the_sampler_can_read(self, tmp_path, capsys, monkeypatch):
        path = tmp_path / "tiles.json"
        measured_tiles.save(path, [ENTRY])
        monkeypatch.setattr(tune, "MIN_GAIN", 0.0)  # on a CPU nothing is faster for a reason
        assert tune.main(["--tiny", "--output", str(path)]) == 0
        new, old = measured_tiles.load(path)
        assert old == ENTRY and new.gpu == Gpu() and new.us <= new.rule_us
        assert new.shape[1:] == (TINY.vocab_size, TINY.hidden_size, 16)
        assert "1000×64 batch 16" in capsys.readouterr().out

    def test_a_wrong_token_stops_it(self, tmp_path, monkeypatch):
        finish = LMHeadSampler.finish

        def planted(self, out):
            finish(self, out).token_ids[0] += 1
            return out

        monkeypatch.setattr(LMHeadSampler, "finish", planted)
        with pytest.raises(WrongToken):
            tune.main(["--tiny", "--output", str(tmp_path / "tiles.json")])
        assert not (tmp_path / "tiles.json").exists()

    def test_keeps_gains_only(self):
        rule = dataclasses.replace(ENTRY, tile=TILE, us=300.0, rule_us=300.0)
        for us, kept in ((290.0, True), (296.0, False), (300.0, False)):
            best = dataclasses.replace(ENTRY, us=us, rule_us=300.0)
            assert tune.merged([ENTRY], [(rule, best)]) == ([best] if kept else [])

    def test_refuses_what_would_spoil_the_table(self, capsys):
        for arguments, message in ([], "no GPU"), (["--tiny"], "another --output"):
            with pytest.raises(SystemExit):
                tune.main(arguments)
            assert message in capsys.readouterr().err

    @pytest.mark.parametrize("arch", [80, 90, 100])
    @pytest.mark.parametrize("block_b", [16, 64, 256])
    def test_candidates_of_a_gpu(self, arch, block_b):
        gpu = Gpu("a GPU", arch, 132)
        rule = tile_table.rule(block_b, 128256, torch.bfloat16, gpu)
        tiles = tune.candidates(rule, gpu)
        assert tiles[0] == rule and len(set(tiles)) == len(tiles)
        assert {tile.block_b for tile in tiles} == {block_b}
        assert any(tile.descriptors for tile in tiles) == (arch >= 90)
        assert any(tile.warp_specialize for tile in tiles) == (arch >= 100 and block_b < 256)
        assert all(tile.descriptors or not tile.warp_specialize for tile in tiles)
