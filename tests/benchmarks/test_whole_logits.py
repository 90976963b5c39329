"""Baselines on gloo ranks: whole logits by an all-gather or an all-to-all, and what they send."""

import pytest
import torch
import torch.distributed as dist

from benchmarks import whole_logits
from benchmarks.problem import Problem, make_weight
from benchmarks.shapes import TINY
from tests.support.ranks import run_ranks
from tpsample import reference

V = TINY.vocab_size
CPU = torch.device("cpu")


def _problem(rows: int) -> Problem:
    return Problem.make(make_weight(V, TINY.hidden_size, CPU), rows)


def _greedy(logits: torch.Tensor) -> torch.Tensor:
    assert logits.shape[1] == V
    return logits.argmax(dim=1)


def _tokens(rows: int) -> list[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """Of each way: greedy and drawn tokens, the bytes it says that it sends, and those it sends."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    all_to_all, all_gather, sent = dist.all_to_all_single, whole_logits.all_gather, []

    def noted_all_to_all(output, own, output_sizes, input_sizes):
        others = sum(size for peer, size in enumerate(input_sizes) if peer != rank)
        sent.append(others * own.element_size())
        return all_to_all(output, own, output_sizes, input_sizes)

    def noted_all_gather(output, own):
        if own.dtype == torch.bfloat16:  # tokens are not counted
            sent.append((world_size - 1) * own.nbytes)
        return all_gather(output, own)

    dist.all_to_all_single, whole_logits.all_gather = noted_all_to_all, noted_all_gather
    found = []
    for kind in whole_logits.KINDS:
        way = kind(_problem(rows), rank, world_size)
        sent.clear()
        greedy = way.step(_greedy).clone()
        assert len(sent) == 1
        found.append((greedy, way.gumbel_tokens().clone(), way.bytes_sent, sent[0]))
    return found


def _whole(problem: Problem, world_size: int) -> torch.Tensor:
    """The product as the ranks make it, part by part."""
    parts = problem.weight.chunk(world_size)
    return torch.cat([problem.hidden_states @ part.T for part in parts], dim=1)


@pytest.mark.parametrize(("world_size", "rows"), [(2, 6), (2, 5), (3, 4), (3, 1)])
def test_both_ways_sample_whole_logits(world_size, rows):
    """Rows that the ranks share evenly, unevenly, and not at all; a vocabulary of uneven parts."""
    problem = _problem(rows)
    logits = _whole(problem, world_size)
    scores = reference.scores(logits.float(), problem.batch, problem.positions)
    for found in run_ranks(world_size, _tokens, rows):
        for greedy, drawn, said, sent in found:
            assert torch.equal(greedy, logits.argmax(dim=1))
            assert torch.equal(drawn, scores.argmax(dim=1))
            assert said == sent


def test_an_all_to_all_sends_a_share_of_what_an_all_gather_does():
    """(W - 1) / W · B · V / W logits of two bytes, and (W - 1) · B · V / W."""
    for found in run_ranks(2, _tokens, 6):
        assert [said for *_, said, _ in found] == [6 * (V // 2) * 2, 1 / 2 * 6 * (V // 2) * 2]


def _steps() -> list[list[str]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ways = [kind(_problem(3), rank, world_size) for kind in whole_logits.KINDS]
    for way in ways:
        for name, step in way.steps().items():
            token_ids = step()
            assert token_ids.shape == (3,) and ((token_ids >= 0) & (token_ids < V)).all(), name
    return [list(way.steps()) for way in ways]


def test_every_sampler_stands_behind_both_ways():
    for gathers, alls in run_ranks(2, _steps):
        assert [name.replace("all-gather", "all-to-all") for name in gathers] == alls
        assert alls == ["all-to-all + softmax + exponential race", "all-to-all + Gumbel argmax"]
