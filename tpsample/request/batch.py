"""SamplingBatch: the parameters of a batch as per-row device tensors."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpsample.request.batch_checks import (
    check_appended,
    check_kept,
    check_per_row,
    check_request,
    check_rows,
    require_list,
    token_lists,
)
from tpsample.request.controls import ControlRows, ControlTables, needs_controls
from tpsample.request.params import SamplingParams
from tpsample.request.seeds import SeedSource, signed64
from tpsample.stored.kept_set import RowFilters
from tpsample.stored.logprob_rows import AskingRows, LogprobRows, stored_order
from tpsample.vocab_shard import VocabShard


class SamplingBatch:
    """Rows of sampling parameters on the device, read by the kernels at run time.

    The tensors may be written between steps; a captured CUDA graph reads them at replay. Rows may
    join, leave, move and change: temperatures and seeds keep their place in memory, a row's state
    its slot; with filters, logprobs or controls capture again. Every rank makes the same changes.

    With penalties, bad_words or min_tokens tell it after each step: ``append(out.token_ids)``.

    Attributes:
        temperature: fp32 [B]; below 1e-5 the row is greedy.
        seed: int64 [B], 64 bits.
        filters: the rows with top_k, top_p or min_p; None if there are none, as the host knows.
        logprobs: what rows ask for logprobs; None if none does.
        controls: penalties and constraints of the rows; None if there are none.
        stored, host_stored: int64 [R] and a list: rows whose logits a step keeps on their ranks;
            None, and empty, if there are none. See `stored_order`.
        stored_slot: int32 [B], place of each row in `stored`, or -1; None if there are none.
        vocab_size: V, what ids were checked against.
        max_rows: most rows it can hold.
        kept_cap: most tokens of a kept set that a step reports; None reports none.
        fixed_rounds: a step with filters never waits for the device.
        asking: where the rows that ask for logprobs are among the stored ones.
    """

    kept_cap: int | None = None
    fixed_rounds = False
    asking: AskingRows | None = None
    _params_digest: int | None = None
    filters: RowFilters | None = None
    logprobs: LogprobRows | None = None
    stored: Tensor | None = None
    stored_slot: Tensor | None = None

    def __init__(self, temperature: Tensor, seed: Tensor, *, vocab_size: int) -> None:
        """Rows with a temperature and a seed alone, over the caller's tensors."""
        self.temperature, self.seed = self._temperature, self._seed = temperature, seed
        self.vocab_size, self.max_rows = vocab_size, seed.shape[0]
        self.host_stored: list[int] = []
        self._host_slots = list(range(self.max_rows))
        self._params: list[SamplingParams] = []
        self._unseeded: set[int] = set()
        self._tables: ControlTables | None = None
        self._grammar_bitmask: Tensor | None = None
        self._forced: Tensor | None = None
        self.controls: ControlRows | None = None
        self._for_all_rows: SamplingParams | None = None
        self._expanded: dict[int, SamplingBatch] = {}
        self._drafted: dict[int, SamplingBatch] = {}

    @staticmethod
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

        Args:
            params: one request per row, or one for all rows of whatever batch it meets.
            vocab_size: V; must match across ranks.
            device: of the hidden states. Default: the CPU.
            prompt_token_ids, output_token_ids: tokens so far per row, what penalties, bad_words and
                min_tokens refer to. Default: none so far.
            max_rows: room for rows to `add`. Default: the rows given.
            kept_cap: report which tokens the filters of each filtered row left
                (`SampleOutput.kept`), up to this many per row; None reports none.
            fixed_rounds: draw filtered rows in a fixed number of exchanges, so that a step never
                waits for the device; the same tokens. A step that is being captured does so anyway.

        Rows with ``seed=None`` are given a seed by the first sampler that meets them: all ranks
        derive it from one random number drawn on one rank.

        Raises:
            TypeError: params is not a SamplingParams or a sequence of them.
            UnsupportedParameter: kept_cap, which the host counts, with fixed_rounds.
            ValueError: a token id >= V, token lists that do not match the rows, or kept_cap < 1.
        """
        single = params if isinstance(params, SamplingParams) else None
        requests: list[Any] = [params] if single is not None else list(params)  # type: ignore[arg-type]
        prompts = token_lists("prompt_token_ids", prompt_token_ids, len(requests))
        outputs = token_lists("output_token_ids", output_token_ids, len(requests))
        check_kept(kept_cap, fixed_rounds)
        slots = len(requests) if max_rows is None else max_rows
        batch = SamplingBatch(
            torch.ones(slots, dtype=torch.float32, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
            vocab_size=vocab_size,
        )
        batch._append_rows(requests, prompts, outputs)
        batch._for_all_rows = single
        batch.kept_cap, batch.fixed_rounds = kept_cap, fixed_rounds
        return batch

    @property
    def rows(self) -> int:
        """B."""
        return self.temperature.shape[0]

    @property
    def device(self) -> torch.device:
        return self._seed.device

    def for_rows(self, rows: int) -> SamplingBatch:
        """This batch, or its one request repeated for `rows` rows.

        Raises:
            ValueError: the batch was built from a list of another length.
        """
        if self._for_all_rows is None or rows == self.rows:
            if rows != self.rows:
                raise ValueError(
                    f"batch: expected {rows} rows, as hidden_states or logits have, got "
                    f"{self.rows}; pass one SamplingParams per row, or a single one for all"
                )
            return self
        if rows not in self._expanded:
            self._expanded[rows] = SamplingBatch.from_params(
                [self._for_all_rows] * rows,
                vocab_size=self.vocab_size,
                device=self.device,
                kept_cap=self.kept_cap,
                fixed_rounds=self.fixed_rounds,
            )
        return self._expanded[rows]

    def add(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] = (),
        output_token_ids: Sequence[int] = (),
    ) -> int:
        """Let a request join as the last row, and return its index.

        Raises:
            TypeError, ValueError: as `from_params`; or all `max_rows` rows are taken.
        """
        require_list("add", self._for_all_rows)
        self._append_rows([params], [prompt_token_ids], [output_token_ids])
        return self.rows - 1

    def drop(self, rows: int | Sequence[int]) -> None:
        """Let rows leave. The others close up and keep their order."""
        gone = {rows} if isinstance(rows, int) else set(rows)
        check_rows("drop", gone, self.rows)
        require_list("drop", self._for_all_rows)
        self._reorder([row for row in range(self.rows) if row not in gone])

    def permute(self, order: Sequence[int]) -> None:
        """Put row ``order[i]`` in place i.

        Raises:
            ValueError: `order` is not a permutation of the rows.
        """
        require_list("permute", self._for_all_rows)
        if sorted(order) != list(range(self.rows)):
            raise ValueError(f"order: expected a permutation of {self.rows} rows, got {order}")
        self._reorder(list(order))

    def update(
        self,
        row: int,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        output_token_ids: Sequence[int] | None = None,
    ) -> None:
        """Replace the request of a row, with the tokens so far if it refers to them.

        Raises:
            TypeError, ValueError: as `from_params`; or tokens so far are needed and missing.
        """
        check_rows("update", {row}, self.rows)
        require_list("update", self._for_all_rows)
        if isinstance(params, SamplingParams) and params.reads_output and output_token_ids is None:
            raise ValueError(
                f"output_token_ids: expected the tokens so far of row {row}, which penalties, "
                "bad_words and min_tokens refer to; pass [] if there are none"
            )
        prompt, output = prompt_token_ids or (), output_token_ids or ()
        check_request(row, params, prompt, output, self.vocab_size)
        self._params[row] = params
        self._load(row, params, prompt, output)
        self._changed(self.rows)

    def prepare(self, shard: VocabShard) -> None:
        """Make the state of a shard, for a sampler that comes after tokens have been appended."""
        if self._tables is not None:
            self._tables.state(shard)

    def append(self, token_ids: Tensor) -> None:
        """Count the tokens of a step as output, on the device.

        Args:
            token_ids: int64 [B], or [B, n] for several tokens per row in order; -1 is none.

        Raises:
            ValueError: another shape, dtype or device.
        """
        batch = self.for_rows(check_appended(token_ids, self.seed))
        if batch._tables is not None:
            for column in token_ids.view(batch.rows, -1).unbind(dim=1):
                batch._tables.append(column)

    @property
    def grammar_bitmask(self) -> Tensor | None:
        """int32 [B, ceil(V / 32)]: bit v % 32 of word v // 32 allows id v. None: no grammar.

        The layout of grammar engines; all bits (-1) for a row without. Kept by reference: write the
        next step's bits into it, or assign another. Each rank reads its own shard's part.
        """
        return self._grammar_bitmask

    @grammar_bitmask.setter
    def grammar_bitmask(self, bitmask: Tensor | None) -> None:
        words = -(-self.vocab_size // 32)
        check_per_row("grammar_bitmask", bitmask, torch.int32, self.seed, words)
        self._grammar_bitmask = bitmask
        self.controls = self._control_rows()

    @property
    def forced_token_ids(self) -> Tensor | None:
        """int64 [B]: the only id a row may draw in the next steps, -1 for any. None: no row's.

        Stands above every other mask. Kept by reference; values from V on leave no id (EMPTY).
        """
        return self._forced

    @forced_token_ids.setter
    def forced_token_ids(self, forced: Tensor | None) -> None:
        check_per_row("forced_token_ids", forced, torch.int64, self.seed)
        self._forced = forced
        self.controls = self._control_rows()

    @property
    def unseeded(self) -> bool:
        """Whether a row still waits for its seed."""
        return bool(self._unseeded)

    @property
    def params_digest(self) -> int:
        """32 bits of all rows' requests but their seeds, for ranks to compare."""
        if self._params_digest is None:
            fields = [vars(params) | {"seed": None} for params in self._params]
            self._params_digest = zlib.crc32(repr(fields).encode())
        return self._params_digest

    def draw_seeds(self, source: SeedSource) -> None:
        """Give every row without a seed the next one of `source`."""
        for row in sorted(self._unseeded):
            self.seed[row] = source.next()
        self._unseeded = set()

    def with_drafts(self, draft_token_ids: Tensor) -> SamplingBatch:
        """B · (K + 1) rows: row b · (K + 1) + i is row b after i of its K drafts.

        Penalties, bad_words and min_tokens see these drafts, int64 [B, K] with -1 behind a row's
        last, as output; the state itself does not change. Valid until the batch changes or is asked
        again. A grammar bitmask and forced ids must be of all B · (K + 1) rows.

        Raises:
            ValueError: another shape or dtype, or rows without a seed.
        """
        check_per_row("draft_token_ids", draft_token_ids, torch.int64, self.seed, None)
        if self.unseeded:
            raise ValueError("batch: rows without a seed; draw them first, see draw_seeds")
        times = draft_token_ids.shape[1] + 1
        if times not in self._drafted:
            self._drafted[times] = self._repeated(times)
        drafted = self._drafted[times]
        drafted.temperature.copy_(self.temperature.repeat_interleave(times))
        drafted.seed.copy_(self.seed.repeat_interleave(times))
        if self.controls is not None:
            masks = self._grammar_bitmask, self._forced
            drafted.controls = self.controls.with_drafts(draft_token_ids, *masks)
        return drafted

    def _repeated(self, times: int) -> SamplingBatch:
        seed = self.seed.repeat_interleave(times)
        batch = SamplingBatch(seed.to(torch.float32), seed, vocab_size=self.vocab_size)
        batch._params = [params for params in self._params for _ in range(times)]
        batch._changed(len(seed))
        batch.fixed_rounds = self.fixed_rounds
        return batch

    def _append_rows(
        self,
        requests: Sequence[Any],
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
    ) -> None:
        first = len(self._params)
        if first + len(requests) > self.max_rows:
            raise ValueError(
                f"params: {first + len(requests)} rows exceed max_rows={self.max_rows}; drop rows, "
                "or build the batch with a larger max_rows"
            )
        for row, (params, prompt, output) in enumerate(
            zip(requests, prompts, outputs, strict=True), first
        ):
            check_request(row, params, prompt, output, self.vocab_size)
        self._params += requests
        self._resize(len(self._params))
        for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), first):
            self._load(row, self._params[row], prompt, output)
        self._changed(len(self._params))

    def _load(
        self, row: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        self._temperature[row] = params.temperature
        self._seed[row] = signed64(params.seed or 0)
        self._unseeded.discard(row)
        if params.seed is None:
            self._unseeded.add(row)
        if self._tables is None and needs_controls(params):
            self._tables = ControlTables(self._host_slots, self.device)
        if self._tables is not None:
            self._tables.load(self._host_slots[row], params, prompt, output)

    def _reorder(self, order: list[int]) -> None:
        """Rows `order`, in place; the slots of the rows left out come last, to be taken again."""
        left = [row for row in range(self.rows) if row not in set(order)]
        every, tensors = [*order, *left], [self._temperature, self._seed]
        if self._tables is not None:
            for row in left:
                self._tables.forget(self._host_slots[row])
            tensors.append(self._tables.slot_of)
        for tensor in tensors:
            tensor[: len(every)] = tensor[every]
        self._host_slots[: len(every)] = [self._host_slots[row] for row in every]
        self._params = [self._params[row] for row in order]
        self._unseeded = {place for place, row in enumerate(order) if row in self._unseeded}
        self._changed(len(order))

    def _resize(self, rows: int) -> None:
        self.temperature, self.seed = self._temperature[:rows], self._seed[:rows]

    def _changed(self, rows: int) -> None:
        """What follows from the rows' requests."""
        self._drafted.clear()
        self._params_digest = None
        self._resize(rows)
        self.filters = RowFilters.of(self._params, self.vocab_size, self.device)
        self.logprobs = LogprobRows.of(self._params, self.vocab_size, self.device)
        order = stored_order(self.filters, self.logprobs, self.seed)
        self.host_stored, self.stored, self.stored_slot = order
        self.asking = None
        if self.logprobs is not None:
            self.asking = AskingRows.of(self.logprobs, self.filters, self.host_stored)
        self.controls = self._control_rows()

    def _control_rows(self) -> ControlRows | None:
        rows, bitmask, forced = self.rows, self._grammar_bitmask, self._forced
        if self._tables is None:
            if bitmask is None and forced is None:
                return None
            self._tables = ControlTables(self._host_slots, self.device)
        found = ControlRows(
            self._tables,
            self._tables.slot_of[:rows],
            None if bitmask is None else bitmask[:rows],
            None if forced is None else forced[:rows],
        )
        return found if found.changes_logits else None
