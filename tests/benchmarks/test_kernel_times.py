"""The times of kernels are those of a call, and a replay that is none is not told as one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.gpu import kernel_times
from benchmarks.lab.harness import NotCaptured, Run

CPU = torch.device("cpu")


def test_launches_and_times_are_those_of_one_call() -> None:
    def event(name: str, us: float, on: str = "CUDA") -> Any:
        kind = getattr(torch.autograd.DeviceType, on)
        return SimpleNamespace(name=name, device_type=kind, device_time=us)

    launched = [event("decode", 1.0), event("lm_head", 8.0), event("lm_head", 4.0)]
    events = [*launched, *launched, event("aten::empty", 9.0, "CPU")]
    calls = []
    with patch.object(kernel_times, "profile") as profile:
        profile.return_value.__enter__.return_value.events.return_value = events
        found = kernel_times.kernels(lambda: calls.append(1), 2, CPU)
    assert len(calls) == 2
    assert list(found.items()) == [("lm_head", [2.0, 12.0]), ("decode", [1.0, 1.0])]


def test_a_step_without_its_graph_has_no_replay() -> None:
    time = Run.time

    def uncaptured(run: Run, steps: Any, **named: Any) -> Any:
        run.uncaptured |= dict.fromkeys(steps, "it waits")
        return time(run, steps, **named)

    with patch.object(Run, "time", uncaptured), pytest.raises(NotCaptured, match="plain: it waits"):
        list(kernel_times.kernel_times(CPU, True))
