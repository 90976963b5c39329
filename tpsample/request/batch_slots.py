"""The part of a batch in which a request keeps its slot for life."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tpsample.core.ordinary_tensors import ordinary_tensors
from tpsample.errors import UnsupportedParameter
from tpsample.request.batch_checks import (
    CheckedRequest,
    check_requests,
    check_rows,
    request_list,
    token_lists,
)
from tpsample.request.batch_rows import BatchRows
from tpsample.request.controls.tables import ControlTables
from tpsample.request.params import SamplingParams
from tpsample.request.selection import Selection, selection_of
from tpsample.request.slot_tables import NO_REQUEST, SlotTables


class BatchSlots(BatchRows):
    """Rows as slots: `put` and `free` change some and move none, `select` names those of a step.

        batch = SamplingBatch.of_slots(256, vocab_size=V, device="cuda")
        batch.put(7, params, prompt_token_ids=[prompt])     # when a request arrives
        rows = batch.select(slots)                          # in every step
        batch.free(7)                                       # when it has ended

    The slot of a row is its index, until `drop`, `permute` or `arrange` moves rows.
    """

    def put(
        self,
        slots: int | Sequence[int],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        output_token_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Let requests take slots, whatever was in them. No other slot changes.

        Masks that are assigned to the batch, a row per slot, have to be assigned anew.

        Args:
            slots: one or several, each once.
            params: one request per slot.
            prompt_token_ids, output_token_ids: the tokens so far of each, as in `from_params`.

        Raises:
            TypeError, ValueError: as `from_params`; a slot named twice, or one that is not there.
        """
        self._require_list("put")
        rows, requests = check_rows("put", slots, self.rows), request_list(params)
        if len(rows) != len(requests) or len(set(rows)) < len(rows):
            raise ValueError(
                f"put: expected as many requests as slots, each slot once, got {len(requests)} "
                f"requests for {slots!r}"
            )
        prompts = token_lists("prompt_token_ids", prompt_token_ids, len(rows))
        outputs = token_lists("output_token_ids", output_token_ids, len(rows))
        checked = check_requests(0, requests, prompts, outputs, self.vocab_size)
        if rows:
            self._load_rows(rows, checked)

    def free(self, slots: int | Sequence[int]) -> None:
        """Let requests leave their slots. A row of a selection that names such a slot has the
        status BAD_SLOT; a step of the whole batch is refused while it has one.

        Raises:
            ValueError: a slot that is not there.
        """
        self._require_list("free")
        rows = list(dict.fromkeys(check_rows("free", slots, self.rows)))
        if rows:
            self._load_rows(rows, [CheckedRequest(NO_REQUEST, (), ())] * len(rows), idle=True)

    def select(self, slots: Tensor, *, out: Selection | None = None) -> Selection:
        """Return the rows of a step, by slot: pass it to the sampler, `verify` and `sample_draft`
        in place of the batch, and its `append` the tokens.

        The host does not read the slots, so a step takes the way that any slot of the batch may
        need: with filters in one of them, the logits of all rows are stored. Kept sets are not
        reported. A CUDA graph may be captured from here to `append`; it serves any slots and any
        requests while `capture_key` is what it was. Draw the seeds of requests without one before
        a replay (`LMHeadSampler.draw_seeds`).

        With `out`, and `out=` of the sampler, a step without filters and logprobs allocates no
        memory on the device, from here to `append`.

        Args:
            slots: int32 or int64 [B] on the device of the batch, in any order; -1 is padding.
                See `tpsample.request.selection` for rows that are not drawn.
            out: an earlier selection of as many rows of this batch, to write into; it then means
                these slots, without the masks that were assigned to it. Default: a new one.

        Raises:
            TypeError, ValueError: another shape, dtype or device, or another kind of `out`.
            UnsupportedParameter: (a ValueError) the batch has kept_cap, which the host counts.
        """
        self._require_list("select")
        if self._last_plan.kept_cap is not None:
            raise UnsupportedParameter("kept_cap: not with select; build the batch without it")
        parameters, tables = self._make_slots()
        return selection_of(self, slots, out, parameters, tables, self._masks)

    @property
    def capture_key(self) -> tuple[object, ...]:
        """A value to compare: a graph captured over a selection has to be captured again when it
        changes.

        It changes when a request brings a kind of parameter that no other has, when the last
        request of a kind leaves, and when rows move. After a request has only left, the old graph
        still gives the right tokens.
        """
        parameters, tables = self._make_slots()
        return self._times_made, parameters.launches, tables.launches

    @ordinary_tensors
    def _make_slots(self) -> tuple[SlotTables, ControlTables]:
        """Return the tables by slot, which are made when they are first needed."""
        if self._slots is None:
            self._times_made += 1
            tensors = self._tensors
            self._slots = SlotTables(tensors.temperature, tensors.seed, self.vocab_size)
            if self.requests:
                self._slots.load(range(self.rows), self._host_rows)
        return self._slots, self._make_tables()
