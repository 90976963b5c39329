"""SamplingBatch: the parameters of a batch as per-row device tensors, and how its rows change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tpsample.core.caller_warning import warn
from tpsample.core.checks import check_int, describe
from tpsample.core.handles import handle_of
from tpsample.core.row_noise import GREEDY_BELOW
from tpsample.core.rules import FilterOrder
from tpsample.core.tensors import ordinary_tensors, outside_of_graphs, readable, tensors_of
from tpsample.request.batch_checks import (
    MAX_ROWS,
    check_arranged,
    check_device,
    check_options,
    check_order,
    check_requests,
    check_rows,
    check_rows_in_order,
    check_sizes,
    request_list,
)
from tpsample.request.entries import NEEDS_APPEND, NO_REQUEST, STATE, Entry
from tpsample.request.params import SamplingParams
from tpsample.request.plan import BatchPlan, BatchView
from tpsample.request.selection import Selection
from tpsample.request.step_batch import StepBatch
from tpsample.request.table import RequestTable
from tpsample.request.tensor_columns import table_of

Tokens = Sequence[Sequence[int]] | None


class SamplingBatch(StepBatch):
    """The sampling parameters of B rows on the device, where the kernels read them at run time.

    Rows may join, leave, move and change between steps, and temperatures and seeds may be written
    in place. A captured CUDA graph reads both at replay, because they keep their place in memory;
    once rows with filters, logprobs, penalties or constraints have changed, capture again. (A
    request with temperature 0 has no filters: use `update` to make it random with some.) Every
    rank makes the same changes. A change that is refused changes nothing.

    With penalties, bad_words or min_tokens, report each step's tokens: ``append(out.token_ids)``.

    A batch may be built and used under inference mode, no_grad or autograd, in any combination.

    Where requests keep their slots for life, a step names some of them:

        batch = SamplingBatch.of_slots(256, vocab_size=V, device="cuda")
        batch.put(7, params, prompt_token_ids=[prompt])     # when a request arrives
        rows = batch.select(slots)                          # in every step
        batch.free(7)                                       # when it has ended

    Attributes:
        temperature: fp32 [B]; below 1e-5, negative or NaN the row is greedy, above 2^100 it
            counts as 2^100.
        seed: int64 [B], 64 bits.
        plan: how a step treats the rows; replaced whole after they change.
        unseeded: the rows that still wait for their seed.
        vocab_size: V; token ids of requests are below it.
        max_rows: how many rows the batch has room for.
    """

    def __init__(self, table: RequestTable, entries: Sequence[Entry] = (), **options: Any) -> None:
        """Put requests into a new table. `from_params`, `from_tensors` and `of_slots` make
        batches."""
        if not isinstance(table, RequestTable):
            raise TypeError(
                f"SamplingBatch: is not built by its name, got {describe(table)}; call "
                "SamplingBatch.from_params(params, vocab_size=…), from_tensors or of_slots"
            )
        self._selects = False
        self._plans: dict[int, BatchPlan] = {}  # by how often each row stands in a row
        self._handle = 0  # of the rows as they are, for `tpsample.compiled`
        super().__init__(table, options)
        self.max_rows = table.slots
        self._dropped, self._drop_told = (-1, 0), False  # the version after it, and its first row
        if table.entries:
            self._changed()
        else:
            self._arrange(list(range(len(entries))), list(entries))

    @staticmethod
    @outside_of_graphs
    def from_params(
        params: Sequence[SamplingParams],
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
            params: one request per row, such as ``[params] * B``. Rows with one seed draw the same
                at equal positions, so give each a seed of its own (`SamplingParams.fork`) or None.
            vocab_size: V; must match across ranks.
            device: where the hidden states are. Default: the CPU.
            prompt_token_ids, output_token_ids: the tokens so far of each row, which penalties,
                bad_words and min_tokens look at. Leave padding out, which would count as text. A
                row that was preempted passes what it drew as output. They are copied. Default: none
                so far; a warning says so if a repetition penalty counts prompts. Prompt ids outside
                [0, V), such as the placeholders of an image, are ignored.
            max_rows: how many rows `add` can fill. Default: the rows given.
            kept_cap: report the tokens that masks and filters left of each row
                (`SampleOutput.kept`), up to this many per row. Default: report none.
            fixed_rounds: draw filtered rows in a fixed number of exchanges, so that a step never
                waits for the device (`tpsample.filters.sample`). The tokens are the same. A
                captured step does so anyway.

        Raises:
            TypeError: params is not a sequence of SamplingParams, or ids are not ints.
            ValueError: an output id or an id of a request outside [0, V); token lists that do not
                match the rows; a size out of range; or a device that torch does not have.
        """
        requests = request_list(params)
        check_device(device)
        slots, vocab_size = check_sizes(vocab_size, max_rows, len(requests)), int(vocab_size)
        check_options(kept_cap, fixed_rounds)
        checked = check_requests(0, requests, prompt_token_ids, output_token_ids, vocab_size)
        table = RequestTable(slots, vocab_size, device)
        return SamplingBatch(table, checked, kept_cap=kept_cap, fixed_rounds=fixed_rounds)

    @staticmethod
    @outside_of_graphs
    def of_slots(
        slots: int,
        *,
        vocab_size: int,
        device: torch.device | str | None = None,
        kept_cap: int | None = None,
    ) -> SamplingBatch:
        """Build a batch of so many slots without a request.

        Args:
            vocab_size, device, kept_cap: as in `from_params`.

        Raises:
            ValueError: a size out of range.
        """
        none = [NO_REQUEST] * check_int("slots", slots, 0, MAX_ROWS)
        how: dict[str, Any] = {"vocab_size": vocab_size, "device": device, "kept_cap": kept_cap}
        batch = SamplingBatch.from_params(none, **how)
        batch._ready_to_select()
        return batch

    @staticmethod
    @outside_of_graphs
    def from_tensors(
        *,
        vocab_size: int,
        temperature: Tensor,
        seed: Tensor,
        host: Mapping[str, Any] | None = None,
        filter_order: FilterOrder = "sequential",
        kept_cap: int | None = None,
        fixed_rounds: bool = False,
        **filters: Tensor | None,
    ) -> SamplingBatch:
        """Build a batch from columns, as an engine has them that keeps its parameters in tensors.

        The numbers are copied, so make another for each step. Any number has a meaning, see
        `tpsample.request.tensor_columns`; on a CPU and with `host` a number out of range is warned
        of, but for top_k. Penalties, biases and logprobs need requests. The `requests` of this
        batch have the filters that the host knows; temperatures and seeds are the tensors'.

        On a CPU the host reads the filters. On a GPU it does not: without `host` every row is
        treated as if each filter that is passed were on, so leave out those that no row has.

        Args:
            vocab_size: V; must match across ranks.
            temperature, seed: fp32 and int64 [B].
            host: the numbers of each filter that is passed, by name, as the host has them: lists,
                arrays, or tensors of a CPU. The filters are then taken of these numbers alone, and
                a step launches what they need and no more. A CPU refuses others than the tensors'.
            filter_order: of all rows, as in `SamplingParams`.
            kept_cap, fixed_rounds: as in `from_params`.
            filters: top_k, int32 or int64 [B], and other rules of `tpsample.core.rules` by name,
                such as top_p and min_p, fp32 or float64 [B].

        Raises:
            TypeError, ValueError: no such rule, a tensor of another shape, dtype or device, or
                other numbers on the host.
        """
        check_sizes(vocab_size, None, 0)
        check_options(kept_cap, fixed_rounds)
        table = table_of(int(vocab_size), temperature, seed, filters, host, filter_order)
        return SamplingBatch(table, kept_cap=kept_cap, fixed_rounds=fixed_rounds)

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        return (
            f"SamplingBatch({self.rows} rows of at most {self.max_rows}, "
            f"vocab_size={self.vocab_size}, on {self.device})"
        )

    @property
    def temperature(self) -> Tensor:
        """fp32 [B]; below 1e-5 the row is greedy. It may be written in place."""
        return self._table.row_temperature

    @property
    def seed(self) -> Tensor:
        """int64 [B], 64 bits. It may be written in place."""
        return self._table.row_seed

    @property
    def requests(self) -> tuple[SamplingParams, ...]:
        """The requests of the rows, in order. `update` replaces one."""
        return tuple([entry.params for entry in self._table.entries])

    @property
    def rows(self) -> int:  # type: ignore[override]
        """How many rows the batch has, B."""
        return self._table.row_seed.shape[0]

    @property
    def plan(self) -> BatchPlan:
        """The plan of a step of all rows. If the batch is used through selections, it is made
        when it is read, because a selection has a plan of its own."""
        if 1 not in self._plans:
            entries = self._table.entries
            self._plans[1] = self._table.plan(range(self.rows), entries, **self._options)
        return self._plans[1]

    def add(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        output_token_ids: Sequence[int] = (),
    ) -> int:
        """Let a request join as the last row, and return its index.

        Raises:
            TypeError, ValueError: as `from_params`; or all `max_rows` rows are taken.
        """
        prompts = None if prompt_token_ids is None else [prompt_token_ids]
        tokens = prompts, [output_token_ids]
        checked = check_requests(self.rows, [params], *tokens, self.vocab_size)
        self._arrange(list(range(self.rows + 1)), checked)
        return self.rows - 1

    def drop(self, rows: int | Sequence[int]) -> None:
        """Let rows leave. The others close up and keep their order.

        Name all rows that leave in one call, ``batch.drop([0, 2])``. After ``batch.drop(0)`` row 2
        has become row 1.

        Raises:
            TypeError, ValueError: a row that is not there, or is named twice.
        """
        named = check_rows("rows", rows, self.rows)
        gone = set(named)
        if len(gone) < len(named):
            raise ValueError(f"rows: expected each row once, got {describe(rows)}")
        self._warn_of_moved(gone)
        self._arrange([row for row in range(self.rows) if row not in gone], [])
        self._dropped = self._table.version, min(gone, default=self.rows)

    def _warn_of_moved(self, gone: set[int]) -> None:
        """Warn once of rows that leave behind others that left just before, so that they moved."""
        version, first = self._dropped
        if version != self._table.version or self._moving.has_stepped(version):
            return
        if readable(self.device) and not self._drop_told and max(gone, default=first) > first:
            self._drop_told = True
            warn(
                f"drop: rows {sorted(gone)} leave after row {first} has left, so they are not the "
                f"rows that had these numbers before; name all that leave in one call, such as "
                f"batch.drop([{first}, {max(gone)}])",
            )

    def permute(self, order: Sequence[int]) -> None:
        """Make row ``order[i]`` row i.

        Raises:
            TypeError, ValueError: `order` is not a permutation of the rows.
        """
        self._arrange(check_order(order, self.rows), [])

    def arrange(
        self,
        order: Sequence[int],
        joining: Sequence[SamplingParams] = (),
        *,
        prompt_token_ids: Tokens = None,
        output_token_ids: Tokens = None,
    ) -> None:
        """Let rows leave, join and move in one pass, as an engine's batch does between two steps.

            batch.arrange([2, 0, 4], [params])  # of 4 rows 1 and 3 leave, and one joins after 0

        Args:
            order: the row that each new row was: one of the batch's B rows, or B + i for the
                joining request i, which must be named. Rows that are not named leave.
            joining: requests that join.
            prompt_token_ids, output_token_ids: of the joining requests, as in `from_params`.

        Raises:
            TypeError, ValueError: as `from_params`; a row named twice, or one that is not there;
                or more than `max_rows` rows.
        """
        tokens = prompt_token_ids, output_token_ids
        checked = check_requests(self.rows, joining, *tokens, self.vocab_size)
        self._arrange(check_arranged(order, self.rows, len(checked)), checked)

    @outside_of_graphs
    def update(
        self,
        row: int,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        output_token_ids: Sequence[int] | None = None,
        **fields: NoReturn,
    ) -> None:
        """Replace the request of a row, and its tokens so far if the request looks at them.

        Args:
            params: a whole request; a field by itself is refused with the call that sets it.

        Raises:
            TypeError, ValueError: as `from_params`; or tokens so far are needed and missing.
        """
        (row,) = check_rows("row", [row], self.rows)
        if fields:
            values: dict[str, object] = {**fields}
            got = ", ".join(f"{name}={value!r}" for name, value in values.items())
            raise TypeError(
                f"update: expected a whole SamplingParams, got {got}; pass "
                f"dataclasses.replace(batch.requests[{row}], {got})"
            )
        if isinstance(params, SamplingParams) and params.reads_output and output_token_ids is None:
            raise ValueError(
                f"output_token_ids: expected the tokens so far of row {row}, which penalties, "
                "bad_words and min_tokens refer to; pass [] if there are none"
            )
        prompts = None if prompt_token_ids is None else [prompt_token_ids]
        tokens = prompts, [() if output_token_ids is None else output_token_ids]
        self._load([row], check_requests(row, [params], *tokens, self.vocab_size))

    @outside_of_graphs
    def put(
        self,
        slots: int | Sequence[int],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        prompt_token_ids: Tokens = None,
        output_token_ids: Tokens = None,
    ) -> None:
        """Let requests take slots, whatever was in them. No other slot changes.

        Masks that are assigned to the batch, a row per slot, have to be assigned anew.

        Args:
            slots: one or several, each once.
            params: one request per slot.
            prompt_token_ids, output_token_ids: the tokens so far of each, as in `from_params`: a
                list per slot, such as [[5, 6]] for one. A request that was preempted brings all
                that it drew as output.

        Raises:
            TypeError, ValueError: as `from_params`; a slot named twice, or one that is not there.
        """
        rows = check_rows_in_order("slots", slots, self.rows)
        tokens = prompt_token_ids, output_token_ids
        requests = [params] if isinstance(params, SamplingParams) else params
        checked = check_requests(0, requests, *tokens, self.vocab_size)
        if len(rows) != len(checked) or len(set(rows)) < len(rows):
            raise ValueError(
                f"slots: expected as many as requests, each slot once, got {len(checked)} "
                f"requests for {describe(slots)}"
            )
        self._load(rows, checked)

    @outside_of_graphs
    def free(self, slots: int | Sequence[int]) -> None:
        """Let requests leave their slots. A row of a selection that names such a slot has the
        status BAD_SLOT; a step of the whole batch is refused while it has one.

        Raises:
            ValueError: a slot that is not there.
        """
        rows = list(dict.fromkeys(check_rows("slots", slots, self.rows)))
        self._load(rows, [Entry.of(NO_REQUEST, self.vocab_size)] * len(rows))

    def select(
        self,
        slots: Tensor,
        *,
        host: Sequence[int] | Tensor | None = None,
        out: Selection | None = None,
    ) -> Selection:
        """Return the rows of a step, by slot: pass it to the sampler, `verify` and `sample_draft`
        in place of the batch, and its `append` the tokens.

        Without `host` a GPU's step does all that any slot of the batch may need: with filters in
        one of them, the logits of all rows are stored.

        A CUDA graph may be captured from here to `append`; it serves any slots and any requests
        while `capture_key` is what it was. Draw the seeds of requests without one before a replay
        (`LMHeadSampler.draw_seeds`).

        With `out`, and `out=` of the sampler, a step without filters and logprobs allocates no
        memory on the device, from here to `append`.

        Args:
            slots: int32 or int64 [B] on the device of the batch, in any order; -1 is padding.
                See `tpsample.request.selection` for rows that are not drawn.
            host: the same numbers on the host, as engines have them: a list, a NumPy array or a
                tensor of a CPU. A step then stores and exchanges what these rows need and no more.
                Unless the batch has `fixed_rounds` the host waits for rows that need a second
                round. From other numbers rows are drawn without their filters; a CPU compares them.
            out: an earlier selection of as many rows of this batch, to write into; it then means
                these slots, without the masks that were assigned to it. Default: a new one.

        Raises:
            TypeError, ValueError: another shape, dtype or device, or another kind of `out`.
            RuntimeError: another thread is in the batch, or this one in the middle of a step.
        """
        with self._table.thread.changing():
            if not self._selects:
                self._ready_to_select()
            return Selection.of(self, slots, out, host)

    @property
    def capture_key(self) -> tuple[object, ...]:
        """A value to compare: a graph captured over a selection has to be captured again when it
        changes.

        It changes when a request brings a kind of parameter that no other has, and when rows move.
        It also changes when the last request of a kind leaves. After a request has only left, the
        old graph still gives the right tokens.
        """
        return self._table.launches

    def _for_rows(self, num_rows: int, masked_rows: int | None = None) -> SamplingBatch:
        if self._table.empty:
            raise ValueError(
                f"batch: slots {describe(self._table.empty)} have no request; name the slots of "
                "the step by batch.select, or drop these"
            )
        self._table.require_places()
        if num_rows != (rows := self._table.row_seed.shape[0]):
            raise ValueError(
                f"batch: expected {num_rows} rows, as hidden_states or logits have, got "
                f"{rows}; pass one SamplingParams per row"
            )
        if self._assigned and masked_rows is not None:
            self._check_masks(masked_rows)
        return self

    def _out_of_range(self) -> Iterator[tuple[str, str]]:
        yield from super()._out_of_range()
        rows = zip(self._table.entries, self.temperature.tolist(), strict=True)
        for row, (entry, temperature) in enumerate(rows):
            params = entry.params
            if params.greedy and params.filtered and temperature >= GREEDY_BELOW:
                yield (
                    "filters",
                    f"batch.temperature: row {row} is random by what was written, and its request "
                    "has temperature 0, with which filters are off; call batch.update with a "
                    "request that has both",
                )

    @property
    def _reads_tables(self) -> bool:
        """Whether a step reads more of the rows than seeds and temperatures."""
        tables = self._table.controls
        controlled = tables is not None and (tables.looks_at_output or tables.has_bias)
        return self._stores_logits or controlled or bool(self._assigned)

    def _note_append(self, token_ids: Tensor) -> None:
        if len(token_ids) != self.rows:
            raise ValueError(
                f"token_ids: expected the tokens of {self.rows} rows, as the batch has, got "
                f"{len(token_ids)} rows"
            )
        self._moving.check_rows(token_ids, self._table.moves)

    def _read(self, times: int = 1) -> BatchView:
        temperature, seed = self._table.row_temperature, self._table.row_seed
        if times == 1:
            return BatchView(temperature, seed, self.plan, self._controls())
        if times not in self._plans:
            slots = [slot for slot in range(self.rows) for _ in range(times)]
            entries = self._table.entries_of(slots)
            self._plans[times] = self._table.plan(slots, entries, **self._options)
        temperature, seed = (x.repeat_interleave(times) for x in (temperature, seed))
        return BatchView(temperature, seed, self._plans[times], self._controls())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handle = handle_of(self)

    @ordinary_tensors
    def _ready_to_select(self) -> None:
        """Make what a selection reads, because it may be made while a graph is captured."""
        self._selects = True
        self._table.make_controls()

    def _state_slots(self) -> Tensor:
        return self._table.numbers[STATE, : self.rows]

    def _load(self, rows: list[int], entries: list[Entry]) -> None:
        """Replace the requests of some rows, and nothing of the others."""
        if rows:
            with self._table.thread.changing():
                self._table.load(rows, entries)
                self._changed()

    def _arrange(self, order: list[int], joining: list[Entry]) -> None:
        """Keep these rows, in this order; an index from B on names a joining request."""
        if len(order) > self.max_rows:
            raise ValueError(
                f"params: {len(order)} rows exceed max_rows={self.max_rows}; drop rows, or build "
                "the batch with a larger max_rows"
            )
        with self._table.thread.changing():
            self._table.arrange(order, joining)
            self._changed()

    @ordinary_tensors
    def _changed(self) -> None:
        entries = self._table.entries
        needing = self._table.flagged(NEEDS_APPEND) if readable(self.device) else []
        self._moving.needing_append = self._moving.known = None
        if needing:
            known = [len(entries[row].prompt) + len(entries[row].output) for row in needing]
            self._moving.needing_append, self._moving.known = tensors_of(
                needing, known, device=None
            )
        self._lacks_output = bool(needing) and not any(entry.output for entry in entries)
        self._plans, self._handle = {}, handle_of(self, self._handle)
        if not self._selects:
            _ = self.plan  # now, because a step that is captured can send nothing to the device
