"""SamplingBatch: the parameters of a batch as per-row device tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpsample.core.digest import digest_bits
from tpsample.core.vocab_shard import VocabShard
from tpsample.request.batch_checks import (
    CheckedRequest,
    check_appended,
    check_kept,
    check_order,
    check_per_row,
    check_requests,
    check_rows,
    check_sizes,
    token_lists,
)
from tpsample.request.controls.bits import num_words
from tpsample.request.controls.rows import ControlRows
from tpsample.request.controls.tables import ControlTables, needs_controls
from tpsample.request.params import SamplingParams
from tpsample.request.plan import BatchPlan, BatchView
from tpsample.request.row_masks import NAMES as MASKS
from tpsample.request.row_masks import RowMasks
from tpsample.request.seeds import SeedSource, signed64


@dataclass
class _Row:
    """What the host knows of a row: its request, and whether it still waits for a seed."""

    params: SamplingParams
    unseeded: bool


class SamplingBatch:
    """Rows of sampling parameters on the device, read by the kernels at run time.

    Temperatures and seeds may be written between steps; a captured CUDA graph reads them at replay.
    (A request with temperature 0 has no filters: `update` it, to make it random with some.) Rows
    may join, leave, move and change: temperatures and seeds keep their place in memory, a row's
    state its slot; with filters, logprobs or controls capture again. Every rank makes the same
    changes. A change that is refused changes nothing.

    With penalties, bad_words or min_tokens tell it after each step: ``append(out.token_ids)``.

    Steps may run under inference mode, no_grad or autograd, whatever the batch was built under.

    Attributes:
        temperature: fp32 [B]; below 1e-5 the row is greedy.
        seed: int64 [B], 64 bits.
        plan: what follows from the rows' requests; replaced whole when they change.
        unseeded: the rows that still wait for their seed.
        vocab_size: V, what ids were checked against.
        max_rows: most rows it can hold.
    """

    @torch.inference_mode(False)
    def __init__(self, temperature: Tensor, seed: Tensor, *, vocab_size: int) -> None:
        """Rows with a temperature and a seed alone, over the caller's tensors."""
        self._temperature, self._seed = temperature, seed
        self.vocab_size, self.max_rows = vocab_size, seed.shape[0]
        self._kept_cap: int | None = None
        self._fixed_rounds = False
        plain = SamplingParams()
        self._rows = [_Row(plain, False) for _ in range(self.max_rows)]
        self.unseeded: list[int] = []
        # Of the rows there are, then of those that may come.
        self._slots = list(range(self.max_rows))
        self._tables: ControlTables | None = None
        self._masks = RowMasks()
        self._single: CheckedRequest | None = None
        self._expanded: dict[int, SamplingBatch] = {}
        self._changed()

    @staticmethod
    @torch.inference_mode(False)
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
            params: one request per row, or one for all rows of whatever batch it meets. Its seed,
                temperature, masks and tokens so far are then those of every row; without a seed
                each row is given its own. Tokens are counted apart for each number of rows met.
            vocab_size: V; must match across ranks.
            device: of the hidden states. Default: the CPU.
            prompt_token_ids, output_token_ids: tokens so far per row, what penalties, bad_words and
                min_tokens refer to. They are copied. Default: none so far. Prompt ids outside
                [0, V), such as placeholders of images, are left out.
            max_rows: room for rows to `add`. Default: the rows given.
            kept_cap: report which tokens the filters of each filtered row left
                (`SampleOutput.kept`), up to this many per row; None reports none.
            fixed_rounds: draw filtered rows in a fixed number of exchanges, so that a step never
                waits for the device; the same tokens. A step that is being captured does so anyway.

        Rows with ``seed=None`` are given a seed by the first sampler that meets them: all ranks
        derive it from one random number drawn on one rank.

        Raises:
            TypeError: params is not a SamplingParams or a sequence of them, or ids are not ints.
            UnsupportedParameter: kept_cap, which the host counts, with fixed_rounds.
            ValueError: an output id or an id of a request outside [0, V), token lists that do not
                match the rows, or a size out of range.
        """
        requests = [params] if isinstance(params, SamplingParams) else _listed(params)
        slots = check_sizes(vocab_size, max_rows, len(requests))
        check_kept(kept_cap, fixed_rounds)
        prompts = token_lists("prompt_token_ids", prompt_token_ids, len(requests))
        outputs = token_lists("output_token_ids", output_token_ids, len(requests))
        checked = check_requests(0, requests, prompts, outputs, vocab_size)
        batch = SamplingBatch(
            torch.ones(slots, dtype=torch.float32, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
            vocab_size=vocab_size,
        )
        batch._rows = []
        batch._kept_cap, batch._fixed_rounds = kept_cap, fixed_rounds
        batch._append_rows(checked)
        if isinstance(params, SamplingParams):
            batch._single = checked[0]
        return batch

    @property
    def rows(self) -> int:
        """B."""
        return self.seed.shape[0]

    @property
    def device(self) -> torch.device:
        return self._seed.device

    def for_rows(self, rows: int) -> SamplingBatch:
        """This batch, or its one request repeated for `rows` rows.

        Raises:
            ValueError: the batch was built from a list of another length.
        """
        if rows == self.rows:
            return self
        if self._single is None:
            raise ValueError(
                f"batch: expected {rows} rows, as hidden_states or logits have, got {self.rows}; "
                "pass one SamplingParams per row, or a single one for all"
            )
        if rows not in self._expanded:
            self._expanded[rows] = self._repeated(self._single, rows)
        expanded = self._expanded[rows]
        # What the caller may have written since.
        with torch.inference_mode(False):
            expanded._temperature.copy_(self._temperature.expand(rows))
            if self._single.params.seed is not None:
                expanded._seed.copy_(self._seed.expand(rows))
        expanded.grammar_bitmask = self._masks.for_each("grammar_bitmask", rows)
        expanded.forced_token_ids = self._masks.for_each("forced_token_ids", rows)
        return expanded

    def _repeated(self, single: CheckedRequest, rows: int) -> SamplingBatch:
        return SamplingBatch.from_params(
            [single.params] * rows,
            vocab_size=self.vocab_size,
            device=self.device,
            prompt_token_ids=[single.prompt] * rows,
            output_token_ids=[single.output] * rows,
            kept_cap=self._kept_cap,
            fixed_rounds=self._fixed_rounds,
        )

    def view(self, rows: int) -> BatchView:
        """What a step of so many rows reads.

        Raises:
            ValueError: the batch has other rows, or a grammar bitmask or forced ids are not of
                the rows it has now.
        """
        batch = self.for_rows(rows)
        batch.check_masks(rows)
        return BatchView(batch.temperature, batch.seed, batch.plan, batch._control_rows())

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
        self._require_list("add")
        self._append_rows(
            check_requests(
                self.rows, [params], [prompt_token_ids], [output_token_ids], self.vocab_size
            )
        )
        return self.rows - 1

    def drop(self, rows: int | Sequence[int]) -> None:
        """Let rows leave. The others close up and keep their order.

        Raises:
            TypeError, ValueError: a row that is not there.
        """
        gone = check_rows("drop", rows, self.rows)
        self._require_list("drop")
        self._reorder([row for row in range(self.rows) if row not in gone])

    def permute(self, order: Sequence[int]) -> None:
        """Put row ``order[i]`` in place i.

        Raises:
            TypeError, ValueError: `order` is not a permutation of the rows.
        """
        self._require_list("permute")
        self._reorder(check_order(order, self.rows))

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
        (row,) = check_rows("update", (row,), self.rows)
        self._require_list("update")
        if isinstance(params, SamplingParams) and params.reads_output and output_token_ids is None:
            raise ValueError(
                f"output_token_ids: expected the tokens so far of row {row}, which penalties, "
                "bad_words and min_tokens refer to; pass [] if there are none"
            )
        prompts, outputs = [prompt_token_ids or ()], [output_token_ids or ()]
        (checked,) = check_requests(row, [params], prompts, outputs, self.vocab_size)
        self._load(row, checked)
        self._changed()

    def prepare(self, shard: VocabShard) -> None:
        """Make the state of a shard, for a sampler that comes after tokens have been appended.

        Raises:
            TypeError: not a VocabShard.
            ValueError: a shard that reaches past V, or one whose counts are no longer known.
        """
        if not isinstance(shard, VocabShard):
            raise TypeError(f"shard: expected a VocabShard, got {shard!r}")
        if shard.stop > self.vocab_size:
            raise ValueError(f"shard: {shard} reaches past vocab_size={self.vocab_size}")
        if self._tables is not None:
            self._tables.state(shard)

    def append(self, token_ids: Tensor) -> None:
        """Count the tokens of a step as output, on the device.

        Args:
            token_ids: int64 [B], or [B, n] for several tokens per row in order; an id outside
                [0, V), such as -1, is none.

        Raises:
            ValueError: another shape, dtype or device.
        """
        rows = check_appended(token_ids, self.seed)
        if self._single is None and rows != self.rows:
            raise ValueError(
                f"token_ids: expected the tokens of {self.rows} rows, as the batch has, got "
                f"{rows} rows"
            )
        tables = self.for_rows(rows)._tables
        if tables is not None:
            columns = token_ids.unsqueeze(1) if token_ids.ndim == 1 else token_ids
            for column in columns.unbind(dim=1):
                tables.append(column)

    @property
    def grammar_bitmask(self) -> Tensor | None:
        """int32 [B, ceil(V / 32)]: bit v % 32 of word v // 32 allows id v. None: no grammar.

        The layout of grammar engines; all bits (-1) for a row without. Kept by reference: write the
        next step's bits into it, or assign another. The same on every rank. Its rows are those of
        the batch when it is assigned: after rows joined, left, moved or changed, assign it anew
        before the next step. For `verify` it has a row for each of the B · (K + 1) positions.
        """
        return self._masks["grammar_bitmask"]

    @grammar_bitmask.setter
    def grammar_bitmask(self, bitmask: Tensor | None) -> None:
        if bitmask is not None:
            words = num_words(self.vocab_size)
            check_per_row("grammar_bitmask", bitmask, torch.int32, self.seed, words)
            self._make_tables()
        self._masks.assign("grammar_bitmask", bitmask)

    @property
    def forced_token_ids(self) -> Tensor | None:
        """int64 [B]: the only id a row may draw in the next steps, -1 for any. None: no row's.

        Stands above every other mask. Kept by reference, with rows as those of `grammar_bitmask`.
        Values from V on leave no id (EMPTY).
        """
        return self._masks["forced_token_ids"]

    @forced_token_ids.setter
    def forced_token_ids(self, forced: Tensor | None) -> None:
        if forced is not None:
            check_per_row("forced_token_ids", forced, torch.int64, self.seed)
            self._make_tables()
        self._masks.assign("forced_token_ids", forced)

    @property
    def has_controls(self) -> bool:
        """Whether rows have penalties or constraints."""
        return self._control_rows() is not None

    def draw_seeds(self, source: SeedSource) -> None:
        """Give every row without a seed the next one of `source`."""
        if not self.unseeded:
            return
        with torch.inference_mode(False):
            index = torch.tensor(self.unseeded, dtype=torch.int64)
            self.seed[index.to(self.device)] = source.draw(len(self.unseeded)).to(self.device)
        for row in self._rows:
            row.unseeded = False
        self.unseeded = []

    def with_drafts(self, draft_token_ids: Tensor) -> BatchView:
        """B · (K + 1) rows: row b · (K + 1) + i is row b after i of its K drafts.

        Penalties, bad_words and min_tokens see these drafts, int64 [B, K] with -1 behind a row's
        last, as output; the state itself does not change. A grammar bitmask and forced ids must be
        of all B · (K + 1) rows.

        Raises:
            ValueError: another shape or dtype, rows without a seed, or masks of other rows.
        """
        check_per_row("draft_token_ids", draft_token_ids, torch.int64, self.seed, None)
        if self.unseeded:
            raise ValueError("batch: rows without a seed; draw them first, see draw_seeds")
        times = draft_token_ids.shape[1] + 1
        self.check_masks(times * self.rows)
        controls = self._control_rows()
        if controls is not None:
            drafts = draft_token_ids.to(torch.int32) if times > 1 else None
            controls = controls.with_drafts(drafts, times)
        return BatchView(
            self.temperature.repeat_interleave(times),
            self.seed.repeat_interleave(times),
            self.plan.repeated(times),
            controls,
        )

    def state_digests(self) -> dict[str, int]:
        """64 bits each of what a step reads beside requests and seeds, for ranks to compare. Reads
        tensors, so for those on a CPU."""
        found = {name: self._masks[name] for name in MASKS}
        if self._tables is not None:
            found["tokens so far"] = self._tables.token_digest[self._tables.slot_of[: self.rows]]
        return {
            name: 0 if tensor is None else digest_bits(tensor) for name, tensor in found.items()
        }

    def _append_rows(self, checked: list[CheckedRequest]) -> None:
        first = len(self._rows)
        if first + len(checked) > self.max_rows:
            raise ValueError(
                f"params: {first + len(checked)} rows exceed max_rows={self.max_rows}; drop rows, "
                "or build the batch with a larger max_rows"
            )
        for row, request in enumerate(checked, first):
            self._load(row, request)
        self._changed()

    @torch.inference_mode(False)
    def _load(self, row: int, request: CheckedRequest) -> None:
        params = request.params
        self._rows[row : row + 1] = [_Row(params, params.seed is None)]
        self._temperature[row] = params.temperature
        self._seed[row] = signed64(params.seed or 0)
        if needs_controls(params):
            self._make_tables()
        if self._tables is not None:
            self._tables.load(self._slots[row], params, request.prompt, request.output)

    @torch.inference_mode(False)
    def _reorder(self, order: list[int]) -> None:
        """Rows `order`, in place; the slots of the rows left out are free to be taken again."""
        stay = set(order)
        left = [row for row in range(self.rows) if row not in stay]
        every = [*order, *left]
        tensors = [self._temperature, self._seed]
        if self._tables is not None:
            for row in left:
                self._tables.forget(self._slots[row])
            tensors.append(self._tables.slot_of)
        index = torch.tensor(every, dtype=torch.int64, device=self.device)
        for tensor in tensors:
            tensor[: len(every)] = tensor[index]
        self._slots[: len(every)] = [self._slots[row] for row in every]
        self._rows = [self._rows[row] for row in order]
        self._changed()

    @torch.inference_mode(False)
    def _changed(self) -> None:
        """Make anew what follows from the rows' requests."""
        self.temperature = self._temperature[: len(self._rows)]
        self.seed = self._seed[: len(self._rows)]
        self.unseeded = [index for index, row in enumerate(self._rows) if row.unseeded]
        self._masks.rows_changed()
        self.plan = BatchPlan.of(
            [row.params for row in self._rows],
            self.vocab_size,
            self.device,
            kept_cap=self._kept_cap,
            fixed_rounds=self._fixed_rounds,
        )

    def _make_tables(self) -> ControlTables:
        if self._tables is None:
            self._tables = ControlTables(self._slots, self.vocab_size, self.device)
        return self._tables

    def check_masks(self, rows: int) -> None:
        """Raise a ValueError if grammar bitmask or forced ids are not of so many rows, and of those
        of now."""
        self._masks.check(rows)

    def _control_rows(self) -> ControlRows | None:
        if self._tables is None:
            return None
        slots = self._tables.slot_of[: self.rows]
        found = ControlRows(self._tables, slots, self.grammar_bitmask, self.forced_token_ids)
        return found if found.changes_logits else None

    def _require_list(self, method: str) -> None:
        """Rows of a batch that is one request for all rows cannot change one by one."""
        if self._single is not None:
            raise ValueError(
                f"{method}: this batch was built from one request for all rows; build it from a "
                "list of requests to change its rows"
            )


def _listed(params: Any) -> list[Any]:
    if isinstance(params, (str, bytes, dict)) or not isinstance(params, Iterable):
        raise TypeError(
            f"params: expected SamplingParams or a sequence of them, got {type(params).__name__}"
        )
    return list(params)
