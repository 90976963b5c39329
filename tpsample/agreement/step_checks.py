"""Checks of what a step and other calls are handed, before anything is sent.

Each message names the argument, what was expected, what came and, where it is not obvious, the way
out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpsample.agreement.logits_checks import check_has_weight, check_local_logits
from tpsample.agreement.step import Call
from tpsample.core.checks import (
    check_current,
    check_int,
    describe,
    fits,
    is_integer,
    require_plain,
)
from tpsample.core.vocab_shard import VocabShard
from tpsample.output import SampleOutput
from tpsample.ranks.ranks import Ranks
from tpsample.request.kinds import Kind, check_kinds
from tpsample.request.plan import BatchView
from tpsample.request.seeds import SeedSource
from tpsample.request.step_batch import StepBatch

MISSING: Any = None
"""The default of an argument that is required. Without a default Python refuses the call before
this rank's peers can learn of it."""


@dataclass
class StepChecks:
    """Makes the `Call` of a sampler's arguments, or raises before anything is sent.

    Attributes:
        weight, shard, vocab_size, max_rows, ranks: of the sampler.
        seeds: where rows without a seed get theirs.
        follow: follows the caller's weight and bias.
        copy_is_current: returns whether the backend's copy of the weight, if any, is of it.
        closed: whether the sampler was closed.
    """

    weight: Tensor
    shard: VocabShard
    vocab_size: int
    max_rows: int
    ranks: Ranks
    seeds: SeedSource
    follow: Callable[[], None]
    copy_is_current: Callable[[], bool]
    closed: bool = False

    def __post_init__(self) -> None:
        # One position given for all rows is spread out here, so that a step allocates nothing.
        self._positions = torch.zeros(self.max_rows, dtype=torch.int64, device=self.weight.device)

    def ready(self) -> None:
        """Raise if the sampler was closed, or its device is not the current one."""
        if self.closed:
            raise RuntimeError("sampler: closed; build a new LMHeadSampler")
        check_current(self.weight.device)

    def weight_is_current(self) -> None:
        """Follow the caller's weight; raise if a step would read an old copy of it."""
        self.follow()
        if not self.copy_is_current():
            raise ValueError(
                "lm_head_weight: changed after the sampler had made its 8-bit copy of it, so "
                "screened tokens could be wrong; call sampler.refresh() on every rank"
            )

    def step(
        self,
        hidden_states: Tensor,
        batch: StepBatch | BatchView,
        positions: Tensor | int,
        num_samples: int | None,
        out: SampleOutput | None,
    ) -> Call:
        """Return the step that the arguments of `LMHeadSampler.__call__` ask for."""
        self.weight_is_current()
        check_hidden_states(hidden_states, self.weight)
        rows = hidden_states.shape[0]
        return self._step("step", "hidden_states", rows, batch, positions, num_samples, out)

    def logits_step(
        self,
        local_logits: Tensor,
        batch: StepBatch | BatchView,
        positions: Tensor | int,
        num_samples: int | None,
        out: SampleOutput | None,
    ) -> Call:
        """Return the step that the arguments of `LMHeadSampler.sample_logits` ask for."""
        check_local_logits(local_logits, self.weight, self.shard)
        rows = local_logits.shape[0]
        return self._step(
            "step from logits", "local_logits", rows, batch, positions, num_samples, out
        )

    def _step(
        self,
        name: str,
        argument: str,
        rows: int,
        batch: StepBatch | BatchView,
        positions: Tensor | int,
        num_samples: int | None,
        out: SampleOutput | None,
    ) -> Call:
        """Return a step on `rows` rows of the argument called `argument`."""
        samples = check_num_samples(num_samples)
        check_batch(batch, self.vocab_size, self.weight.device)
        if rows * samples > self.max_rows:
            raise ValueError(
                f"{argument}: {rows} rows × {samples} samples exceed "
                f"max_rows={self.max_rows}; build the sampler with a larger max_rows"
            )
        if out is not None:
            check_out(out, rows, num_samples, self.weight.device)
        at = positions_tensor(positions, rows, self.weight.device, self._positions)
        return self.rows(name, batch, rows, at, num_samples=samples)

    def rows(
        self,
        name: str,
        batch: StepBatch | BatchView,
        rows: int,
        positions: Tensor,
        *,
        masked_rows: int | None = None,
        num_samples: int = 1,
        token_ids: Tensor | None = None,
    ) -> Call:
        """Return a call on rows of a batch, whose state on this shard is made or refused here.

        Args:
            masked_rows: rows that a grammar bitmask must have, where that is not `rows`.

        Raises:
            ValueError: the batch does not fit.
        """
        self.ready()
        if isinstance(batch, StepBatch):
            batch = batch.for_rows(rows)
            batch.check_masks(rows if masked_rows is None else masked_rows)
            batch.prepare(self.shard)
        else:
            batch = batch.view(rows)
        if batch.stores_logits:
            self.ranks.require_group()
        return Call(name, rows, batch, positions, num_samples, token_ids, self.seeds.drawn)

    def prompt(self, hidden_states: Tensor, token_ids: Tensor, top: int) -> Call:
        """Return what `LMHeadSampler.prompt_logprobs` asks for."""
        self.ready()
        self.follow()
        check_prompt(hidden_states, token_ids, top, weight=self.weight, vocab_size=self.vocab_size)
        self.ranks.require_group("prompt_logprobs")
        rows = hidden_states.shape[0]
        return Call("prompt_logprobs", rows, num_samples=top, token_ids=token_ids)

    def warm_up(self, kinds: Sequence[Kind], rows: Sequence[int]) -> Call:
        """Return what comes before the steps of a warm-up."""
        self.ready()
        check_kinds(kinds, rows, self.max_rows)
        return Call("warm_up")

    def compare(self, hidden_states: Tensor | None) -> Call:
        """Return a comparison of the ranks."""
        self.ready()
        self.ranks.require_group("compare, desync_every")
        if hidden_states is None:
            return Call("compare")
        if not fits(hidden_states, None, "BD", self.weight.device):
            raise ValueError(
                f"hidden_states: expected a floating-point tensor [B, D] on {self.weight.device}, "
                f"got {describe(hidden_states)}"
            )
        return Call("compare hidden states", hidden_states.shape[0])


def check_batch(batch: object, vocab_size: int, device: torch.device) -> None:
    """Check that a batch fits a sampler."""
    if not isinstance(batch, (StepBatch, BatchView)):
        raise TypeError(
            f"batch: expected a SamplingBatch, got {type(batch).__name__}; "
            "see SamplingBatch.from_params"
        )
    if batch.vocab_size != vocab_size:
        raise ValueError(
            f"batch: expected vocab_size {vocab_size} as the sampler has, got {batch.vocab_size}"
        )
    if batch.device != device:
        raise ValueError(
            f"batch: expected tensors on {device}, got {batch.device}; build it with "
            f"device={str(device)!r}"
        )


def check_prompt(
    hidden_states: Tensor, token_ids: Tensor, top: int, *, weight: Tensor, vocab_size: int
) -> None:
    """Check the arguments of `prompt_logprobs`. It reads the ids, so it waits for the GPU."""
    check_hidden_states(hidden_states, weight)
    shape = (hidden_states.shape[0],)
    if not isinstance(token_ids, Tensor) or (
        token_ids.dtype,
        token_ids.shape,
        token_ids.device,
    ) != (torch.int64, shape, weight.device):
        raise ValueError(
            f"token_ids: expected int64 {shape} on {weight.device}, the token that came at each "
            f"position, got {describe(token_ids)}"
        )
    wrong = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if len(wrong):
        raise ValueError(
            f"token_ids: expected ids in [0, {vocab_size}), got {int(wrong[0])}; leave out the "
            "positions whose next token is not known"
        )
    check_int("top", top, 0, vocab_size)


def check_hidden_states(hidden_states: Tensor, weight: Tensor) -> None:
    check_has_weight(weight)
    require_plain("hidden_states", hidden_states)
    if not isinstance(hidden_states, Tensor) or hidden_states.ndim != 2:
        way_out = {
            1: "; one row is hidden_states.unsqueeze(0)",
            3: "; pass those of the last position, hidden_states[:, -1]",
        }.get(getattr(hidden_states, "ndim", 0), "")
        raise ValueError(
            f"hidden_states: expected a tensor [B, {weight.shape[1]}], "
            f"got {describe(hidden_states)}{way_out}"
        )
    if hidden_states.shape[1] != weight.shape[1]:
        way_out = ""
        if hidden_states.shape[1] == weight.shape[0]:
            way_out = (
                "; lm_head_weight seems to be [D, V_local]: build the sampler of "
                "lm_head_weight.T.contiguous()"
            )
        raise ValueError(
            f"hidden_states: expected D = {weight.shape[1]} columns as lm_head_weight has, "
            f"got {describe(hidden_states)}{way_out}"
        )
    check_fits_weight(hidden_states, weight)


def check_fits_weight(hidden_states: Tensor, weight: Tensor) -> None:
    """Check that hidden states [..., D] are as the product with the weight takes them."""
    if hidden_states.dtype != weight.dtype or hidden_states.device != weight.device:
        raise ValueError(
            f"hidden_states: expected {weight.dtype} on {weight.device} like lm_head_weight, "
            f"got {describe(hidden_states)}; convert with .to(lm_head_weight)"
        )
    if hidden_states.shape[-1] > 1 and hidden_states.stride(-1) != 1:
        raise ValueError(
            f"hidden_states: expected a contiguous last axis, got strides "
            f"{hidden_states.stride()}; call .contiguous()"
        )


def check_out(out: SampleOutput, rows: int, num_samples: int | None, device: torch.device) -> None:
    """Check that a step may write into `out`."""
    if not isinstance(out, SampleOutput):
        raise TypeError(f"out: expected a SampleOutput, got {type(out).__name__}")
    shape = (rows,) if num_samples is None else (rows, num_samples)
    for name, tensor, wanted, dtype in (
        ("token_ids", out.token_ids, shape, torch.int64),
        ("status", out.status, (rows,), torch.int32),
        ("seeds", out.seeds, (rows,), torch.int64),
    ):
        if (
            not isinstance(tensor, Tensor)
            or (tensor.shape, tensor.dtype, tensor.device) != (wanted, dtype, device)
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"out.{name}: expected a contiguous {dtype} tensor {wanted} on {device}, "
                f"got {describe(tensor)}"
            )


def check_num_samples(num_samples: int | None) -> int:
    """Return the number of draws per row; None is one."""
    if num_samples is None:
        return 1
    return check_int("num_samples", num_samples, 1, 2**20)


def positions_tensor(
    positions: Tensor | int, rows: int, device: torch.device, out: Tensor | None = None
) -> Tensor:
    """Return contiguous int64 [rows] from a tensor, or from one integer, which fills `out`."""
    if is_integer(positions) and not isinstance(positions, Tensor):
        positions = int(positions)
        if not 0 <= positions < 2**63:
            raise ValueError(f"positions: expected 0 <= position < 2^63, got {positions}")
        if out is None:
            out = torch.empty(rows, dtype=torch.int64, device=device)
        return out[:rows].fill_(positions)
    if isinstance(positions, Tensor) and positions.ndim == 0 and positions.dtype == torch.int64:
        positions = positions.expand(rows)
    if (
        not isinstance(positions, Tensor)
        or positions.dtype != torch.int64
        or positions.shape != (rows,)
        or positions.device != device
    ):
        raise ValueError(
            f"positions: expected an int or an int64 tensor [{rows}] on {device}, "
            f"got {describe(positions)}; a position is the index, in its sequence, of the token "
            "being generated"
        )
    return positions.contiguous()
