"""SamplingBatch: the parameters of a batch as per-row device tensors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from tpsample.core.ordinary_tensors import ordinary_tensors
from tpsample.request.batch_checks import (
    check_appended,
    check_device,
    check_kept,
    check_per_row,
    check_requests,
    check_sizes,
    request_list,
    token_lists,
)
from tpsample.request.batch_slots import BatchSlots
from tpsample.request.controls.bits import num_words
from tpsample.request.controls.rows import ControlRows
from tpsample.request.host_rows import HostRows
from tpsample.request.params import SamplingParams
from tpsample.request.plan import BatchPlan, BatchView
from tpsample.request.row_tensors import WAITING
from tpsample.request.slot_batch import MASKS
from tpsample.request.slot_tables import NO_REQUEST
from tpsample.request.tensor_batch import Needs, TensorBatch, batch_over


class SamplingBatch(BatchSlots):
    """The sampling parameters of B rows on the device, where the kernels read them at run time.

    Rows may join, leave, move and change between steps, and temperatures and seeds may be written
    in place. A captured CUDA graph reads both at replay, because they keep their place in memory;
    once rows with filters, logprobs, penalties or constraints have changed, capture again. (A
    request with temperature 0 has no filters: use `update` to make it random with some.) Every
    rank makes the same changes. A change that is refused changes nothing.

    With penalties, bad_words or min_tokens, report each step's tokens: ``append(out.token_ids)``.

    A batch may be built and used under inference mode, no_grad or autograd, in any combination.

    Where requests keep their slots and a step takes some of them, see `select`.

    Attributes:
        temperature: fp32 [B]; below 1e-5 the row is greedy.
        seed: int64 [B], 64 bits.
        plan: what follows from the rows' requests; replaced whole after they change.
        unseeded: the rows that still wait for their seed.
        vocab_size: V; token ids of requests are below it.
        max_rows: how many rows the batch has room for.
    """

    @staticmethod
    @ordinary_tensors
    def from_params(
        params: SamplingParams | Sequence[SamplingParams],
        *,
        vocab_size: int,
        device: torch.device | str | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        output_token_ids: Sequence[Sequence[int]] | None = None,
        max_rows: int | None = None,
        kept_cap: int | None = None,
        fixed_rounds: bool = False,
    ) -> SamplingBatch:
        """Build a batch from requests.

        A row with ``seed=None`` is given a seed by the first step: all ranks derive it from one
        random number that one rank draws.

        Args:
            params: a list with one request per row, or one request that every row of a step
                shares, whatever their number. A shared request gives each row its seed,
                temperature, masks and tokens so far, or without a seed a seed of its own; tokens
                are then appended separately for each number of rows.
            vocab_size: V; must match across ranks.
            device: where the hidden states are. Default: the CPU.
            prompt_token_ids, output_token_ids: the tokens so far of each row, which penalties,
                bad_words and min_tokens look at. They are copied. Default: none so far. Prompt ids
                outside [0, V), such as the placeholders of an image, are ignored.
            max_rows: how many rows `add` can fill. Default: the rows given.
            kept_cap: report the tokens that each filtered row's filters left
                (`SampleOutput.kept`), up to this many per row. Default: report none.
            fixed_rounds: draw filtered rows in a fixed number of exchanges, so that a step never
                waits for the device (`tpsample.logits.fixed_rounds`). The tokens are the same. A
                captured step does so anyway.

        Raises:
            TypeError: params is not a SamplingParams or a sequence of them, or ids are not ints.
            UnsupportedParameter: kept_cap, which the host counts, with fixed_rounds.
            ValueError: an output id or an id of a request outside [0, V), token lists that do not
                match the rows, a size out of range, or a device that torch does not have.
        """
        requests = request_list(params)
        check_device(device)
        slots, vocab_size = check_sizes(vocab_size, max_rows, len(requests)), int(vocab_size)
        check_kept(kept_cap, fixed_rounds)
        prompts = token_lists("prompt_token_ids", prompt_token_ids, len(requests))
        outputs = token_lists("output_token_ids", output_token_ids, len(requests))
        checked = check_requests(0, requests, prompts, outputs, vocab_size)
        batch = SamplingBatch(
            torch.ones(slots, dtype=torch.float32, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
            vocab_size=vocab_size,
        )
        batch._set_plan(
            BatchPlan.of([], vocab_size, batch.device, kept_cap=kept_cap, fixed_rounds=fixed_rounds)
        )
        batch._replace(HostRows.of([], vocab_size))
        batch._join(checked)
        if isinstance(params, SamplingParams):
            batch._single = checked[0]
        return batch

    @staticmethod
    def of_slots(
        slots: int, *, vocab_size: int, device: torch.device | str | None = None
    ) -> SamplingBatch:
        """Build a batch of so many slots without a request; see `BatchSlots` for their life.

        Raises:
            ValueError: a size out of range.
        """
        none = [NO_REQUEST] * slots
        batch = SamplingBatch.from_params(none, vocab_size=vocab_size, device=device)
        batch.free(range(slots))
        batch._make_slots()
        return batch

    @staticmethod
    def over(
        *,
        vocab_size: int,
        temperature: Tensor,
        seed: Tensor,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        min_p: Tensor | None = None,
        needs: Needs | None = None,
        filter_order: str = "sequential",
    ) -> TensorBatch:
        """Make a batch over the caller's own tensors, which every step reads in place.

        Args:
            vocab_size: V; must match across ranks.
            temperature, seed: fp32 and int64 [S].
            top_k: int32 or int64 [S].
            top_p, min_p: fp32 or float64 [S].
            needs: which of these filters may occur. Default: those that are given. What a value out
                of range means is written in `tpsample.request.tensor_batch`.
            filter_order: of all rows, as in `SamplingParams`.

        Raises:
            TypeError, ValueError: a tensor of another shape, dtype or device, or one that is needed
                and missing.
        """
        check_sizes(vocab_size, None, 0)
        return batch_over(
            vocab_size=vocab_size,
            temperature=temperature,
            seed=seed,
            filters={"top_k": top_k, "top_p": top_p, "min_p": min_p},
            needs=needs,
            filter_order=filter_order,
        )

    def for_rows(self, num_rows: int) -> SamplingBatch:
        """Return this batch, or its one request repeated for so many rows.

        Raises:
            ValueError: the batch was built from a list of another length, or has empty slots.
        """
        if self._idle:
            raise ValueError(
                f"batch: slots {self._idle} have no request; name the slots of the step by "
                "batch.select, or drop these"
            )
        return self._of_rows(num_rows)

    def _of_rows(self, num_rows: int) -> SamplingBatch:
        if num_rows == self.rows:
            return self
        single = self._single
        if single is None:
            raise ValueError(
                f"batch: expected {num_rows} rows, as hidden_states or logits have, got "
                f"{self.rows}; pass one SamplingParams per row, or a single one for all"
            )
        if num_rows not in self._repeated:
            self._repeated[num_rows] = SamplingBatch.from_params(
                [single.params] * num_rows,
                vocab_size=self.vocab_size,
                device=self.device,
                prompt_token_ids=[single.prompt] * num_rows,
                output_token_ids=[single.output] * num_rows,
                kept_cap=self.plan.kept_cap,
                fixed_rounds=self.plan.fixed_rounds,
            )
        repeated: SamplingBatch = self._repeated[num_rows]
        # The caller may have written since.
        with torch.inference_mode(False):
            repeated.temperature.copy_(self.temperature.expand(num_rows))
            # Without a seed each row has its own, unless the caller wrote one before the first.
            seed = self.seed.expand(num_rows)
            if single.params.seed is not None:
                repeated.seed.copy_(seed)
            elif self.unseeded:
                repeated.seed.copy_(repeated.seed.where(seed == WAITING, seed))
        for name in MASKS:
            mask = self._masks.get(name)
            if mask is not None and len(mask) == 1:
                mask = mask.expand(num_rows, *mask.shape[1:]).contiguous()
            setattr(repeated, name, mask)
        return repeated

    def __copy__(self) -> SamplingBatch:
        """Return a copy with tensors of its own: two batches over the same ones would differ from
        them after the first change."""
        return copy.deepcopy(self)

    def view(self, num_rows: int) -> BatchView:
        """Return what a step of so many rows reads.

        Raises:
            ValueError: the batch has other rows, or a grammar bitmask or forced ids are not of
                the rows it has now.
        """
        batch = self.for_rows(num_rows)
        batch.check_masks(num_rows)
        return BatchView(batch.temperature, batch.seed, batch.plan, batch._controls())

    def with_drafts(self, draft_token_ids: Tensor) -> BatchView:
        """Return what a verification reads: row b · (K + 1) + i is row b after i of its K drafts.

        Penalties, bad_words and min_tokens see these drafts, int64 [B, K] with -1 behind a row's
        last, as output; the batch itself does not change. A grammar bitmask and forced ids must be
        of all B · (K + 1) rows.

        Raises:
            ValueError: another shape or dtype, rows without a seed, or masks of other rows.
        """
        check_per_row("draft_token_ids", draft_token_ids, torch.int64, self.seed, "K")
        if self.unseeded:
            raise ValueError("batch: rows without a seed; draw them first, see draw_seeds")
        self.for_rows(self.rows).check_masks((draft_token_ids.shape[1] + 1) * self.rows)
        view = BatchView(self.temperature, self.seed, self.plan, self._controls())
        return view.after_drafts(draft_token_ids)

    def append(self, token_ids: Tensor) -> None:
        """Count the tokens of a step as output, on the device.

        Args:
            token_ids: int64 [B], or [B, n] for several tokens per row in order; an id outside
                [0, V), such as -1, is none.

        Raises:
            ValueError: another shape, dtype or device.
        """
        num_rows = check_appended(token_ids, self.seed)
        if self._single is None and num_rows != self.rows:
            raise ValueError(
                f"token_ids: expected the tokens of {self.rows} rows, as the batch has, got "
                f"{num_rows} rows"
            )
        rows = self._of_rows(num_rows)
        rows._last_positions, tables = None, rows._tables
        if tables is not None:
            columns = token_ids.unsqueeze(1) if token_ids.ndim == 1 else token_ids
            for column in columns.unbind(dim=1):
                tables.append(tables.slot_of[:num_rows], column)

    def note_step(self, positions: Tensor) -> None:
        """Warn once if rows look at their output, and a step at later positions comes without the
        tokens of the one before. A step at the same ones may be a trial; on a GPU none is known."""
        if not self._needs_append or not positions.is_cpu:
            return
        last, self._last_positions = self._last_positions, positions.detach().clone()
        if last is not None and len(last) == len(positions) and bool((positions > last).all()):
            self._needs_append = False
            warnings.warn(
                "batch: a step at later positions, and no token was appended since the last one, "
                "so penalties, bad_words and min_tokens do not see it; call "
                "batch.append(out.token_ids) after each step",
                stacklevel=5,
            )

    @property
    def grammar_bitmask(self) -> Tensor | None:
        """int32 [B, ceil(V / 32)]: bit v % 32 of word v // 32 allows id v. None: no grammar.

        This is the layout of grammar engines; a row without a grammar has all bits set (-1). The
        tensor is kept by reference: write the next step's bits into it, or assign another. It is
        the same on every rank. After rows joined, left, moved or changed, assign it anew before the
        next step. For `verify` it has a row for each of the B · (K + 1) positions.
        """
        return self._masks.get("grammar_bitmask")

    @grammar_bitmask.setter
    def grammar_bitmask(self, bitmask: Tensor | None) -> None:
        self._assign("grammar_bitmask", bitmask, torch.int32, num_words(self.vocab_size))

    @property
    def forced_token_ids(self) -> Tensor | None:
        """int64 [B]: the only id a row may draw in the next steps, -1 for any. None: no row's.

        A forced id overrides every other mask; one from V on leaves no id (EMPTY). The tensor is
        kept by reference, with rows as those of `grammar_bitmask`.
        """
        return self._masks.get("forced_token_ids")

    @forced_token_ids.setter
    def forced_token_ids(self, forced: Tensor | None) -> None:
        self._assign("forced_token_ids", forced, torch.int64)

    @property
    def has_controls(self) -> bool:
        """Whether rows have penalties or constraints."""
        return self._controls() is not None

    def check_masks(self, num_rows: int) -> None:
        """Raise a ValueError if a mask is not of so many rows, or of rows that have changed."""
        for name, mask in self._masks.items():
            if name in self._stale:
                raise ValueError(
                    f"batch.{name}: rows of the batch joined, left, moved or changed since it was "
                    "assigned; assign it anew, or None"
                )
            if len(mask) != num_rows:
                raise ValueError(
                    f"batch.{name}: expected a row for each of the {num_rows} rows of the step, "
                    f"got {len(mask)}; assign another"
                )

    def state(self) -> dict[str, object]:
        found: dict[str, object] = dict(self._masks)
        if self._tables is not None:
            found["tokens so far"] = self._tables.token_digest[self._tables.slot_of[: self.rows]]
        return found

    def _assign(self, name: str, mask: Tensor | None, dtype: torch.dtype, *width: int) -> None:
        if mask is None:
            self._masks.pop(name, None)
        else:
            check_per_row(name, mask, dtype, self.seed, *width)
            self._make_tables()
            self._masks[name] = mask
        self._stale.discard(name)

    def _controls(self) -> ControlRows | None:
        if self._tables is None or not (self._tables.in_use or self._masks):
            return None
        slots = self._tables.slot_of[: self.rows]
        return ControlRows(self._tables, slots, self.grammar_bitmask, self.forced_token_ids)
