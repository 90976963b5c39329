"""Calls under torch.inference_mode leave nothing behind that later calls cannot write to."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpsample.exchange
from tests.support.calls import CALLS, call, sampler_of, step
from tests.support.ranks import run_ranks
from tests.support.tiers import long

WIDER = 300


def _inside_then_outside(exchange: str, swaps: bool, backend: str) -> list[str]:
    """Every call that keeps memory, under inference mode and then outside of it."""
    if exchange == "two_level":
        socket.gethostname = lambda: "ab"[dist.get_rank()]
    tpsample.exchange.SWAPS_ON = ("cpu",) if swaps else ()
    how: dict[str, Any] = {"exchange": exchange, "backend": backend}
    sampler = sampler_of(**how)
    expected, failed = step(sampler), []
    wider: list[Any] = []  # a sampler that is alive, with longer messages

    def build() -> None:
        wider.append(sampler_of(**how, max_rows=WIDER))
        assert step(sampler) == expected

    calls: dict[str, Callable[[], object]] = {
        "build another": build,
        "reset": sampler.reset,
        **{name: lambda name=name: call(sampler, name) for name in CALLS},
        "refresh": sampler.refresh,
        "compare": sampler.compare,
        "warm_up": lambda: sampler.warm_up(("plain", "top_p", "logprobs", "penalties")),
    }
    for name, each in calls.items():
        try:
            with torch.inference_mode():
                each()
            assert step(sampler) == expected
            each()
            with torch.inference_mode():
                assert step(sampler) == expected
            assert step(sampler) == expected
        except RuntimeError as error:
            failed.append(f"{name}: {error}")
            sampler.reset()
    for other in wider:
        assert step(other) == expected
    return failed


@pytest.mark.parametrize(
    ("exchange", "swaps", "backend"),
    [
        ("collective", True, "torch"),
        ("collective", True, "numba"),
        ("two_level", True, "torch"),
        ("collective", False, "torch"),
        ("p2p", False, "torch"),
        *long(("peer", False, "triton")),
    ],
)
def test_calls_under_inference_mode_leave_a_sampler_that_steps_outside(exchange, swaps, backend):
    if backend == "numba":
        pytest.importorskip("numba", reason="needs the extra cpu")
    assert run_ranks(2, _inside_then_outside, exchange, swaps, backend) == [[], []]
