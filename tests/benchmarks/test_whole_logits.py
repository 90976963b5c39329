"""Baselines on gloo ranks: whole logits by an all-gather or an all-to-all, and what they send."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.lab import baselines, whole_logits
from benchmarks.lab.problem import Problem, make_weight
from benchmarks.lab.shapes import TINY
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
        problem = _problem(rows)
        way = kind(problem.weight, rank, world_size)
        sent.clear()
        greedy = way.tokens(problem.hidden_states, _greedy).clone()
        assert len(sent) == 1
        own = problem.take(way.own_rows(rows) or range(1))
        drawn = way.tokens(problem.hidden_states, baselines.gumbel_argmax(own)).clone()
        found.append((greedy, drawn, way.bytes_sent(rows), sent[0]))
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
