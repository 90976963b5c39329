"""Checks of what a step and other calls are handed, before anything is sent.

Each message names the argument, what was expected, what came and, where it is not obvious, the way
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tpsample.agreement.caller_tensors import CallerTensors
from tpsample.agreement.ready_made import ReadyMadeLogits
from tpsample.agreement.step import Call, StepAgreement
from tpsample.backends.backend import Backend
from tpsample.core.checks import (
    check_current,
    check_int,
    check_num_samples,
    check_tensor,
    describe,
    fits,
    positions_tensor,
    read_positions,
    require_memory,
    require_plain,
)
from tpsample.core.score import LOGIT_DTYPES
from tpsample.core.vocab_shard import VocabShard
from tpsample.output import SampleOutput
from tpsample.request.kinds import Kind, check_kinds
from tpsample.request.plan import BatchView
from tpsample.request.step import Inputs
from tpsample.request.step_batch import StepBatch, require_batch
from tpsample.settings import Settings


class StepChecks:
    """Makes the `Call` of a sampler's arguments, or raises before anything is sent.

    Args:
        settings: of the sampler.
        caller: the caller's weight and bias, which every call follows.
        local: the local step, which may have an 8-bit copy of the weight.
        agreement: of the sampler, which keeps other threads out of a batch until a call ends.

    Attributes:
        closed: whether the sampler was closed.
        ready_made: checks what comes as logits.
    """

    def __init__(
        self, settings: Settings, caller: CallerTensors, local: Backend, agreement: StepAgreement
    ) -> None:
        self._settings, self._caller, self._local = settings, caller, local
        self._agreement = agreement
        self.closed = False
        self.ready_made = ReadyMadeLogits(settings)
        # One position given for all rows is spread out here, so that a step allocates nothing.
        size, device = settings.max_rows, settings.device
        self._positions = torch.zeros(size, dtype=torch.int64, device=device)

    def hold_batch(self, batch: StepBatch | BatchView) -> None:
        """Check that a batch fits, and that no other thread is in it until the call ends.

        Every check of a call with a batch begins with it, so that all ranks hear of a busy one.
        Ranks in one process share a batch, because their threads take turns anyway.

        Raises:
            TypeError, ValueError: the batch does not fit.
            RuntimeError: another thread is in it.
        """
        check_batch(batch, self._settings)
        ranks = self._settings.ranks
        if isinstance(batch, StepBatch) and (ranks.world_size == 1 or ranks.roll is not None):
            self._agreement.hold(batch._table.thread)

    def ready(self) -> None:
        """Raise if the sampler was closed, or its device is not the current one."""
        if self.closed:
            raise RuntimeError("sampler: closed; build a new LMHeadSampler")
        if self._settings.device.type == "cuda":
            check_current("lm_head_weight", self._settings.device)

    def check_inputs(
        self, inputs: Inputs, leading: tuple[int, int] | None = None, samples: int = 1
    ) -> None:
        """Check hidden states or logits, which a verification has of each position.

        The caller's weight is followed; a step that would read an old copy of it is refused.

        Args:
            leading: B and K + 1, of a verification.
            samples: draws per row, of a step; 0 where rows are not drawn, and not limited either.
        """
        settings, name, given, are_logits = self._settings, inputs.name, *inputs[:2]
        weight, axes = settings.weight, 2 if leading is None else 3
        if not are_logits:
            self._caller.rebind_aliases()
            copy = self._local.copy if samples else None
            if copy is not None and not copy.is_current():
                raise ValueError(
                    "lm_head_weight: changed after the sampler had made its 8-bit copy of it, so "
                    "screened tokens could be wrong; call sampler.refresh() on every rank"
                )
        width = len(settings.shard) if are_logits else weight.shape[1]
        if weight.shape[1] == 0 and not are_logits:
            raise ValueError(
                "hidden_states: this sampler has no weight, lm_head_weight is "
                f"{list(weight.shape)}; call sample_logits, or build it over the LM head"
            )
        require_plain(name, given)
        if leading is not None and (not isinstance(given, Tensor) or given.shape[:-1] != leading):
            raise ValueError(
                f"{name}: expected {[*leading, width]}, those of the token before the drafts and "
                f"of each draft, for draft_token_ids {[leading[0], leading[1] - 1]}; "
                f"got {describe(given)}"
            )
        rows = given
        if are_logits:
            _check_local_logits(given, leading or ("B",), weight, settings.shard)
            rows = given if leading is None else given.flatten(0, 1)
        elif (
            not isinstance(given, Tensor)
            or given.ndim != axes
            or given.shape[-1] != width
            or given.dtype != weight.dtype
            or given.device != weight.device
        ):
            _refuse_hidden_states(given, weight, axes)
        if rows.shape[-1] > 1 and rows.stride(-1) != 1:
            raise ValueError(
                f"{name}: expected a contiguous last axis, got strides {rows.stride()}; call "
                ".contiguous()"
            )
        require_memory(name, rows)
        if are_logits:
            self.ready_made.check(inputs)
        num_rows, times = leading or (given.shape[0], samples)
        if num_rows * times > settings.max_rows:
            of_each = "samples" if leading is None else "positions"
            raise ValueError(
                f"{name}: {num_rows} rows × {times} {of_each} exceed max_rows="
                f"{settings.max_rows}; build the sampler with a larger max_rows"
            )

    def step(
        self,
        inputs: Inputs,
        batch: StepBatch | BatchView,
        positions: Tensor | int,
        num_samples: int | None,
        out: SampleOutput | None,
    ) -> Call:
        """Return the step that the arguments of a call of `LMHeadSampler` ask for."""
        settings = self._settings
        samples = check_num_samples(num_samples)
        self.check_inputs(inputs, samples=samples)
        self.hold_batch(batch)
        rows = inputs.tensor.shape[0]
        at = positions_tensor(positions, rows, settings.device, self._positions)
        if out is not None:
            held = batch._table.numbers if isinstance(batch, StepBatch) else batch.seed
            check_out(out, num_samples, at, held)
        states = None if inputs.are_logits else inputs.tensor
        name = f"step{inputs.dtype_suffix}"
        return self.call_on_rows(name, batch, rows, at, num_samples=samples, hidden_states=states)

    def call_on_rows(
        self,
        name: str,
        batch: StepBatch | BatchView,
        rows: int,
        positions: Tensor,
        *,
        masked_rows: int | None = None,
        num_samples: int,
        token_ids: Tensor | None = None,
        hidden_states: Tensor | None,
    ) -> Call:
        """Return a call on rows of a batch, whose state on this shard is made or refused here.

        Args:
            masked_rows: rows that a grammar bitmask must have, where that is not `rows`.

        Raises:
            ValueError: the batch does not fit.
        """
        self.ready()
        if isinstance(batch, StepBatch):
            batch = batch._for_rows(rows, rows if masked_rows is None else masked_rows)
            controls, shard = batch._table.controls, self._settings.shard
            if controls is not None and shard not in controls.states:
                controls.state(shard)
        else:
            batch = batch._view_of(rows)
        now = read_positions(positions, batch)
        return Call(name, rows, batch, positions, num_samples, token_ids, hidden_states, now)

    def prompt(self, hidden_states: Tensor, next_token_ids: Tensor, top: int) -> Call:
        """Return what `LMHeadSampler.prompt_logprobs` asks for. It reads the ids, so it waits."""
        self.ready()
        weight, vocab_size = self._settings.weight, self._settings.vocab_size
        self.check_inputs(Inputs(hidden_states), samples=0)
        rows = hidden_states.shape[0]
        ids, came = next_token_ids, ", the token that came after each position"
        check_tensor("next_token_ids", ids, (torch.int64,), (rows,), weight.device, came)
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        if len(wrong):
            raise ValueError(
                f"next_token_ids: expected ids in [0, {vocab_size}), got {int(wrong[0])}; leave "
                "out the positions whose next token is not known"
            )
        number = check_int("top", top, 0, vocab_size)
        how: dict[str, Any] = {"token_ids": ids, "hidden_states": hidden_states}
        return Call("prompt_logprobs", rows, num_samples=number, **how)

    def warm_up(
        self, kinds: Sequence[Kind], rows: Sequence[int], num_samples: int | None, num_drafts: int
    ) -> Call:
        """Return what comes before the steps of a warm-up."""
        self.ready()
        max_rows = self._settings.max_rows
        samples = check_int("num_samples", check_num_samples(num_samples), 1, max_rows)
        check_kinds(kinds, rows, max_rows // samples)
        check_int("num_drafts", num_drafts, 0, max_rows - 1)
        draws = f"num_samples {num_samples}, num_drafts {num_drafts}"  # which make its steps
        return Call(f"warm_up of rows {list(map(int, rows))}, {draws}, kinds {[*kinds]}")

    def compare(self, hidden_states: Tensor | None) -> Call:
        """Return a comparison of the ranks."""
        self.ready()
        if hidden_states is None:
            return Call("compare")
        check_tensor("hidden_states", hidden_states, (), "BD", self._settings.device)
        return Call("compare hidden states", hidden_states.shape[0])


def check_batch(batch: StepBatch | BatchView, settings: Settings) -> None:
    """Check that a batch fits a sampler."""
    vocab_size, device = settings.vocab_size, settings.device
    require_batch(batch)
    if batch.vocab_size != vocab_size:
        raise ValueError(
            f"batch: expected vocab_size {vocab_size} as the sampler has, got {batch.vocab_size}"
        )
    if batch.device != device:
        raise ValueError(
            f"batch: expected tensors on {device}, got {batch.device}; build it with "
            f"device={describe(str(device))}"
        )


def check_out(out: SampleOutput, num_samples: int | None, positions: Tensor, held: Tensor) -> None:
    """Check that a step may write into `out`.

    Args:
        positions: int64 [B] of the step, contiguous.
        held: where its batch has its seeds, contiguous.
    """
    if not isinstance(out, SampleOutput):
        raise TypeError(f"out: expected a SampleOutput, got {type(out).__name__}")
    rows, device = positions.shape[0], positions.device
    shape = (rows,) if num_samples is None else (rows, num_samples)
    begin, first = positions.data_ptr(), held.data_ptr()
    others = [
        ("positions", begin, begin + positions.nbytes),
        ("batch", first, first + held.nbytes),
    ]
    for name, tensor, wanted, dtype in (
        ("token_ids", out.token_ids, shape, torch.int64),
        ("status", out.status, (rows,), torch.int32),
        ("seeds", out.seeds, (rows,), torch.int64),
    ):
        alike = isinstance(tensor, Tensor) and tensor.shape == wanted and tensor.dtype is dtype
        if not alike or tensor.device != device or not tensor.is_contiguous():
            raise ValueError(
                f"out.{name}: expected a contiguous {dtype} tensor {wanted} on {device}, "
                f"got {describe(tensor)}"
            )
        require_memory(f"out.{name}", tensor)
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"out.{name}: expected a tensor that can be written to, got one made under "
                "torch.inference_mode; pass the output of an earlier call"
            )
        start = tensor.data_ptr()
        end = start + tensor.nbytes
        for other, other_start, other_end in others:
            if start < other_end and other_start < end:
                raise ValueError(
                    f"out.{name}: expected memory of its own, got some that {other} has; "
                    "pass the output of an earlier call"
                )
        others.append((f"out.{name}", start, end))


def _refuse_hidden_states(rows: Tensor, weight: Tensor, axes: int) -> NoReturn:
    if not isinstance(rows, Tensor) or rows.ndim != axes:
        way_out = {
            1: "; one row is hidden_states.unsqueeze(0)",
            3: "; a step takes the last position, hidden_states[:, -1], and prompt_logprobs all, "
            "hidden_states.flatten(0, 1)",
        }.get(getattr(rows, "ndim", 0), "")
        raise ValueError(
            f"hidden_states: expected a tensor [B, {weight.shape[1]}], "
            f"got {describe(rows)}{way_out}"
        )
    if rows.shape[-1] != weight.shape[1]:
        way_out = ""
        if rows.shape[-1] == weight.shape[0]:
            way_out = (
                "; logits go to sample_logits; or lm_head_weight is [D, V_local]: build the "
                "sampler of lm_head_weight.T.contiguous()"
            )
        raise ValueError(
            f"hidden_states: expected D = {weight.shape[1]} columns as lm_head_weight has, "
            f"got {describe(rows)}{way_out}"
        )
    raise ValueError(
        f"hidden_states: expected {weight.dtype} on {weight.device} like lm_head_weight, "
        f"got {describe(rows)}; convert with .to(lm_head_weight)"
    )


def _check_local_logits(
    given: Tensor, leading: Sequence[int | str], weight: Tensor, shard: VocabShard
) -> None:
    shapes = [(*leading, width) for width in dict.fromkeys((len(shard), weight.shape[0]))]
    if not any(fits(given, LOGIT_DTYPES, shape, weight.device) for shape in shapes):
        shown = " or ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes)
        raise ValueError(
            f"local_logits: expected fp32, bf16 or fp16 {shown} on {weight.device}, the columns of "
            f"{shard}, got {describe(given)}"
        )
