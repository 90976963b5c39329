"""The penalties and constraints of a batch's rows, and where a row's state lies.

    x -> allowed ids, grammar bitmask, forced token       -inf outside
      -> + logit_bias
      -> min_tokens                                       -inf at stop ids while too short, unless
                                                         nothing else is left
      -> x / r if x > 0 else x · r                        repetition: ids in prompt or output
      -> - f · n                                          frequency: n occurrences in the output
      -> - p  if n > 0                                    presence
      -> bad_words                                        -inf at the end of a begun sequence

Each fp32 operation is rounded once. Order and names are vLLM's. A masked id stays masked, because
no bias revives it. Counts and biases per token id are kept per shard (`token_state`), never as
[rows, V]. The rest is here, in tables with a slot per row; allowed ids take one bit per id of the
whole vocabulary. A batch keeps the slot of each row's state, so moving a row moves one number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tpsample.core.digest import digest_text, mix
from tpsample.core.tensors import (
    ALIGNED,
    HasViews,
    Scratch,
    ordinary_tensors,
    readable,
    tensors_of,
)
from tpsample.core.vocab_shard import VocabShard
from tpsample.core.word import NO_TOKEN
from tpsample.request.controls.token_state import TokenState
from tpsample.request.entries import Entry
from tpsample.request.params import SamplingParams

ABSENT = -2
"""Where `recent` has no token yet."""

PENALISED, BIASED = 1, 2
"""Bits of `wants`."""


AppendTokens = Callable[["ControlTables", Tensor, Tensor], None]
"""It does what `ControlTables.append` does on a device whose memory the host does not read."""


class ControlTables(HasViews):
    """Tables by slot, on the device, and the dense state of each shard that was asked for.

    They outlive the call that makes them, so under inference mode too their tensors are ordinary
    ones, of explicit dtypes.

    Attributes:
        vocab_size: V.
        slots: how many there are. The last is idle for ever: it has no request, and what is
            written there is never read.
        wants: int32 [slots], bits PENALISED and BIASED.
        penalties: fp32 [slots, 3]: repetition, frequency, presence.
        min_tokens, length: int32 [slots], how many output tokens are wanted and there.
        stop_ids: int32 [slots, S], each once, -1 where a slot has fewer.
        bad_words: int32 [slots, N, L], each sequence backwards, then -1.
        recent: int32 [slots, L - 1 or 1], the last output tokens, latest first; ABSENT before.
        whole: int32 [1, ceil(V / 32)], a bit for every id of the vocabulary.
        allowed: int32 [slots, ceil(V / 32)], a bit per id that allowed_token_ids leaves; None until
            a row needs it.
        token_digest: int64 [slots], a digest of the tokens so far of a slot whose controls look at
            them, else 0.
        keeps_digests: whether `append` keeps it up to date: on a CPU, where ranks compare it.
        has_penalties, has_bias, has_masks: whether a row ever needed them. Kernels are compiled
            and the state is allocated for these.
        append_by: how the backend of the last step appends tokens; None by operators of torch.
        states: by shard, those that `state` has made.
        looks_at_output: whether a row ever needed its tokens so far, which `append` then counts.
    """

    @ordinary_tensors
    def __init__(self, requests: int, vocab_size: int, device: torch.device) -> None:
        self.device, self.vocab_size = device, vocab_size
        self.slots = slots = requests + 1
        self.has_penalties = self.has_bias = self.has_masks = self.looks_at_output = False
        # In one piece, because the three change together when a request comes.
        width = slots + -slots % ALIGNED
        self._numbers = torch.zeros(3, width, dtype=torch.int32, device=device)
        self.penalties = torch.zeros(slots, 3, dtype=torch.float32, device=device)
        self.penalties[:, 0] = 1.0
        self._view()
        self.stop_ids = self._ids(slots, 1)
        self.bad_words = self._ids(slots, 1, 1)
        self.recent = self._ids(slots, 1).fill_(ABSENT)
        self.whole = pack_ids(None, vocab_size).to(device).unsqueeze(0)
        self.allowed: Tensor | None = None
        self.token_digest = torch.zeros(slots, dtype=torch.int64, device=device)
        self.keeps_digests = readable(device)
        self.append_by: AppendTokens | None = None
        self._idle = torch.tensor(requests, device=device)
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._scratch = Scratch(device)
        self._requests: dict[int, tuple[Entry, int]] = {}  # and the appends before it
        self._looking: set[int] = set()  # slots whose requests look at their tokens
        self.states: dict[VocabShard, TokenState] = {}
        self._appends = 0

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the backend, which the process that loads a batch may not have."""
        return {**vars(self), "append_by": None}

    def _view(self) -> None:
        columns = self._numbers[:, : self.slots]
        self.wants, self.min_tokens, self.length = columns.unbind()

    @property
    def launches(self) -> tuple[object, ...]:
        """A value to compare: equal values make equal launches, which read equal shapes."""
        flags = self.has_penalties, self.has_bias, self.has_masks, self.allowed is not None
        tables = self.stop_ids, self.bad_words, self.recent
        return (*flags, *(tuple(table.shape) for table in tables))

    def load(self, slots: Sequence[int], requests: Sequence[Entry]) -> None:
        """Start the state of some slots anew, with one write per table for all of them."""
        params = [request.params for request in requests]
        for slot, request in zip(slots, requests, strict=True):
            self._requests[slot] = (request, self._appends)
            looks = request.params.penalised or request.params.masked
            (self._looking.add if looks else self._looking.discard)(slot)
        self.has_penalties |= any(p.penalised for p in params)
        self.has_bias |= any(p.logit_bias for p in params)
        self.has_masks |= any(p.masked for p in params)
        self.looks_at_output = self.has_penalties or self.has_masks
        packed_slots, digests = tensors_of(slots, map(_digest, requests), device=None)
        index, send = self._scratch.send("slots", packed_slots), self._scratch.send
        wants = [PENALISED * p.penalised + BIASED * bool(p.logit_bias) for p in params]
        least = [p.min_tokens if p.stop_token_ids else 0 for p in params]
        lengths = [len(request.output) for request in requests]
        (numbers,) = tensors_of([*wants, *least, *lengths], device=None, dtype=torch.int32)
        penalties = [
            penalty
            for p in params
            for penalty in (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
        ]
        (packed_penalties,) = tensors_of(penalties, device=None, dtype=torch.float32)
        self._numbers.index_copy_(1, index, send("numbers", numbers.view(3, -1)))
        self.token_digest.index_copy_(0, index, send("digests", digests))
        self.penalties.index_copy_(0, index, send("penalties", packed_penalties.view(-1, 3)))
        if self.has_masks:
            self._load_words(index, requests)
            self._load_allowed(index, params)
        for state in self.states.values():
            state.load(slots, requests, history=self.has_penalties, bias=self.has_bias)

    def _load_words(self, index: Tensor, requests: Sequence[Entry]) -> None:
        """Write stop ids, bad words and the last output tokens of slots, int64 [n]."""
        params = [request.params for request in requests]
        stops = [sorted(set(p.stop_token_ids or ())) if p.min_tokens else [] for p in params]
        words = [[sequence[::-1] for sequence in p.bad_words or ()] for p in params]
        longest = max((len(sequence) for row_words in words for sequence in row_words), default=1)
        self.stop_ids = widened(self.stop_ids, NO_TOKEN, max(map(len, stops)))
        self.bad_words = widened(self.bad_words, NO_TOKEN, max(map(len, words)), longest)
        self.recent = widened(self.recent, ABSENT, longest - 1)
        most, width = self.bad_words.shape[1], self.recent.shape[1]
        latest = [request.output[::-1][:width] for request in requests]
        sequences = [
            seq for row_words in words for seq in (*row_words, *[()] * (most - len(row_words)))
        ]
        for name, table, values, value in (
            ("stop ids", self.stop_ids, stops, NO_TOKEN),
            ("bad words", self.bad_words, sequences, NO_TOKEN),
            ("recent", self.recent, latest, ABSENT),
        ):
            flat = padded(values, value, table.shape[-1], torch.int32)
            sent = self._scratch.send(name, flat.view(len(requests), *table.shape[1:]))
            table.index_copy_(0, index, sent)

    def _load_allowed(self, index: Tensor, params: Sequence[SamplingParams]) -> None:
        """Write the allowed ids of slots, int64 [n]."""
        of_rows = [p.allowed_token_ids for p in params]
        if self.allowed is None and any(ids is not None for ids in of_rows):
            self.allowed = self.whole.repeat(self.slots, 1)
        if self.allowed is not None:
            free = pack_ids(None, self.vocab_size)
            bits = [free if ids is None else pack_ids(ids, self.vocab_size) for ids in of_rows]
            self.allowed.index_copy_(0, index, self._scratch.send("allowed", torch.stack(bits)))

    def forget(self, slots: Sequence[int]) -> None:
        """Forget the requests of slots that have left; `load` starts the state of others there."""
        for slot in slots:
            self._requests.pop(slot, None)
            self._looking.discard(slot)

    def append(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count new tokens of slots, int64 [B, n]; an id outside [0, V), such as -1, is none.

        Args:
            slots: int64 [B]. Only the idle one may be named twice. It counts what is none.
        """
        self._appends += token_ids.shape[1]
        # A GPU may capture the append, and then counts for whoever comes.
        if not (self._looking or (self.looks_at_output and self.device.type == "cuda")):
            return
        if self.append_by is not None and not self.keeps_digests:
            self.append_by(self, slots, token_ids)
            return
        for column in token_ids.unbind(dim=1):
            self._append(slots, column)

    def _append(self, slots: Tensor, token_ids: Tensor) -> None:
        take, rows = self._scratch.take, len(slots)
        ids = torch.clamp(token_ids, 0, self.vocab_size - 1, out=take("ids", torch.int64, rows))
        there = torch.eq(ids, token_ids, out=take("there", torch.bool, rows))
        slots = torch.where(there, slots, self._idle, out=take("counting", torch.int64, rows))
        if self.has_masks:
            self.length.index_add_(0, slots, self._one.expand(rows))
            moved = take("moved", torch.int32, rows, self.recent.shape[1] + 1)
            moved[:, 1:].copy_(self._scratch.pick("recent", self.recent, slots))
            moved[:, 0].copy_(ids)
            self.recent.index_copy_(0, slots, moved[:, :-1])
        if self.keeps_digests:
            digest = self.token_digest[slots]
            self.token_digest[slots] = torch.where(digest != 0, mix(digest + ids), digest)
        for state in self.states.values():
            state.append(slots, ids)

    def state(self, shard: VocabShard) -> TokenState:
        """Return the dense state of a shard, which is made when it is first asked for.

        Raises:
            ValueError: tokens have been appended since a penalised row came; its counts on this
                shard are not known.
        """
        state = self.states.get(shard)
        if state is None:
            for request, appends in self._requests.values():
                if request.params.penalised and appends < self._appends:
                    raise ValueError(
                        f"batch: tokens were appended before a sampler of {shard} first saw it, "
                        "so their counts are not known there; call batch.prepare(shard) before "
                        "the first append, or build a new batch with output_token_ids="
                    )
            state = TokenState(shard, self.slots, self.device)
            requests = [request for request, _ in self._requests.values()]
            needs = {"history": self.has_penalties, "bias": self.has_bias}
            state.load(list(self._requests), requests, **needs)
            self.states[shard] = state
        return state

    def _ids(self, *shape: int) -> Tensor:
        return torch.full(shape, NO_TOKEN, dtype=torch.int32, device=self.device)


def needs_controls(request: SamplingParams) -> bool:
    """Return whether a request has penalties or constraints."""
    return request.penalised or request.masked or bool(request.logit_bias)


def num_words(vocab_size: int) -> int:
    """Return how many words of 32 bits hold a bit per id."""
    return -(-vocab_size // 32)


def pack_ids(token_ids: Iterable[int] | None, vocab_size: int) -> Tensor:
    """Return int32 [ceil(V / 32)], bit v % 32 of word v // 32 for id v; None is all of [0, V)."""
    bits = torch.zeros(num_words(vocab_size) * 32, dtype=torch.bool, device="cpu")
    if token_ids is None:
        bits[:vocab_size] = True
    else:
        bits[torch.tensor(list(token_ids), dtype=torch.int64, device="cpu")] = True
    # Bytes, because int64 numbers of every bit took several times as long.
    shifts = torch.arange(8, dtype=torch.uint8, device="cpu")
    eights = bits.view(torch.uint8).view(-1, 8) << shifts
    return eights.sum(dim=1, dtype=torch.uint8).view(torch.int32)


def widened(table: Tensor, value: int, *widths: int) -> Tensor:
    """Return a table [slots, …] with further axes at least so wide; new places hold `value`."""
    shape = [max(old, new) for old, new in zip(table.shape[1:], widths, strict=True)]
    if list(table.shape[1:]) == shape:
        return table
    wider = table.new_full((table.shape[0], *shape), value)
    wider[tuple(slice(0, size) for size in table.shape)] = table
    return wider


def padded(lists: Sequence[Sequence[int]], value: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return lists of ids as one tensor on the host, each followed by `value` up to a width."""
    ids = itertools.chain(*([*ids, *[value] * (width - len(ids))] for ids in lists))
    return tensors_of(ids, device=None, dtype=dtype)[0]


def _digest(request: Entry) -> int:
    """Return a digest of the tokens so far, 0 if nothing looks at them."""
    if not request.params.reads_output:
        return 0
    return digest_text(f"{request.prompt}{request.output}") | 1
