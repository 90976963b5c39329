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
whole vocabulary. Rows find their state by slot, so moving a row moves one number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.core.digest import digest_text, mix
from tpsample.core.host_tensors import integers
from tpsample.core.vocab_shard import VocabShard
from tpsample.core.word import NO_TOKEN
from tpsample.request.batch_checks import CheckedRequest
from tpsample.request.controls.bits import pack_ids
from tpsample.request.controls.token_state import TokenState
from tpsample.request.params import SamplingParams

ABSENT = -2
"""Where `recent` has no token yet."""

PENALISED, BIASED = 1, 2
"""Bits of `wants`."""


class ControlTables:
    """Tables by slot, on the device, and the dense state of each shard that was asked for.

    They outlive the call that makes them, so under inference mode too their tensors are ordinary
    ones, of explicit dtypes.

    Attributes:
        vocab_size: V.
        slot_of: int64 [slots], the slot of each row of the batch, then the free slots.
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
            them, else 0. It is kept up to date only on a CPU, where ranks compare it.
        has_penalties, has_bias, has_masks: whether a row ever needed them. Kernels are compiled
            and the state is allocated for these.
    """

    @torch.inference_mode(False)
    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.device, self.vocab_size = device, vocab_size
        self._slot_list = list(range(slots))
        self.slot_of = torch.arange(slots, device=device)
        self.has_penalties = self.has_bias = self.has_masks = False
        self.wants = torch.zeros(slots, dtype=torch.int32, device=device)
        self.penalties = torch.zeros(slots, 3, dtype=torch.float32, device=device)
        self.penalties[:, 0] = 1.0
        self.min_tokens = torch.zeros_like(self.wants)
        self.length = torch.zeros_like(self.wants)
        self.stop_ids = self._ids(slots, 1)
        self.bad_words = self._ids(slots, 1, 1)
        self.recent = self._ids(slots, 1).fill_(ABSENT)
        self.whole = pack_ids(None, vocab_size).to(device).unsqueeze(0)
        self.allowed: Tensor | None = None
        self.token_digest = torch.zeros(slots, dtype=torch.int64, device=device)
        self._requests: dict[int, tuple[CheckedRequest, int]] = {}  # and the appends before it
        self._states: dict[VocabShard, TokenState] = {}
        self._appends = 0

    @property
    def slots(self) -> int:
        return self.wants.shape[0]

    @torch.inference_mode(False)
    def load(self, row: int, request: CheckedRequest) -> None:
        """Start the state of a row anew."""
        slot, params = self._slot_list[row], request.params
        self._requests[slot] = (request, self._appends)
        self.has_penalties |= params.penalised
        self.has_bias |= bool(params.logit_bias)
        self.has_masks |= params.masked
        self.wants[slot] = PENALISED * params.penalised + BIASED * bool(params.logit_bias)
        self.penalties[slot] = torch.tensor(
            [params.repetition_penalty, params.frequency_penalty, params.presence_penalty],
            dtype=torch.float32,
        )
        self.min_tokens[slot] = params.min_tokens if params.stop_token_ids else 0
        self.length[slot] = len(request.output)
        so_far = f"{request.prompt}{request.output}"
        self.token_digest[slot] = digest_text(so_far) | 1 if params.reads_output else 0
        self._load_words(slot, params, request.output)
        if params.allowed_token_ids is not None and self.allowed is None:
            self.allowed = self.whole.repeat(self.slots, 1)
        if self.allowed is not None:
            self.allowed[slot] = pack_ids(params.allowed_token_ids, self.vocab_size)
        for state in self._states.values():
            state.reserve(history=self.has_penalties, bias=self.has_bias)
            state.load(slot, request)

    def _load_words(self, slot: int, params: SamplingParams, output: tuple[int, ...]) -> None:
        stop_ids = sorted(set(params.stop_token_ids or ())) if params.min_tokens else []
        words = [list(reversed(sequence)) for sequence in params.bad_words or ()]
        longest = max(map(len, words), default=1)
        self.stop_ids = _widened(self.stop_ids, NO_TOKEN, len(stop_ids))
        self.bad_words = _widened(self.bad_words, NO_TOKEN, len(words), longest)
        self.recent = _widened(self.recent, ABSENT, longest - 1)
        self.stop_ids[slot] = _padded(stop_ids, NO_TOKEN, self.stop_ids.shape[1])
        self.bad_words[slot] = NO_TOKEN
        for i, sequence in enumerate(words):
            self.bad_words[slot, i] = _padded(sequence, NO_TOKEN, self.bad_words.shape[2])
        width = self.recent.shape[1]
        self.recent[slot] = _padded(list(reversed(output))[:width], ABSENT, width)

    @torch.inference_mode(False)
    def reorder(self, order: list[int]) -> None:
        """Keep the state of these rows, in this order; the slots of all others are free.

        A row behind the slots is new, and takes a free one: `load` starts its state.
        """
        old, slots = self._slot_list, self.slots
        free = sorted(set(old).difference([old[row] for row in order if row < slots]))
        for slot in free:
            self._requests.pop(slot, None)
        unused = iter(free)
        arranged = [old[row] if row < slots else next(unused) for row in order]
        self._slot_list = [*arranged, *unused]
        self.slot_of.copy_(integers(self._slot_list, device=None)[0])

    @torch.inference_mode(False)
    def append(self, token_ids: Tensor) -> None:
        """Count one new token per row, int64 [B]; an id outside [0, V), such as -1, is none."""
        self._appends += 1
        slots = self.slot_of[: len(token_ids)]
        there = (token_ids >= 0) & (token_ids < self.vocab_size)
        self.length[slots] += there.to(torch.int32)
        recent = self.recent[slots]
        moved = torch.cat([token_ids.to(torch.int32).unsqueeze(1), recent[:, :-1]], dim=1)
        self.recent[slots] = torch.where(there.unsqueeze(1), moved, recent)
        if self.device.type == "cpu":
            digest = self.token_digest[slots]
            self.token_digest[slots] = torch.where(
                there & (digest != 0), mix(digest + token_ids), digest
            )
        for state in self._states.values():
            state.append(slots, token_ids)

    def state(self, shard: VocabShard) -> TokenState:
        """Return the dense state of a shard, which is made when it is first asked for.

        Raises:
            ValueError: tokens have been appended since a penalised row came; its counts on this
                shard are not known.
        """
        state = self._states.get(shard)
        if state is None:
            for request, appends in self._requests.values():
                if request.params.penalised and appends < self._appends:
                    raise ValueError(
                        f"batch: tokens were appended before a sampler of {shard} first saw it, "
                        "so their counts are not known there; call batch.prepare(shard) before "
                        "the first append, or build a new batch with output_token_ids="
                    )
            state = TokenState(shard, self.slots, self.device)
            state.reserve(history=self.has_penalties, bias=self.has_bias)
            for slot, (request, _) in self._requests.items():
                state.load(slot, request)
            self._states[shard] = state
        return state

    def _ids(self, *shape: int) -> Tensor:
        return torch.full(shape, NO_TOKEN, dtype=torch.int32, device=self.device)


def needs_controls(request: SamplingParams) -> bool:
    """Return whether a request has penalties or constraints."""
    return request.penalised or request.masked or bool(request.logit_bias)


def _widened(table: Tensor, value: int, *widths: int) -> Tensor:
    """Return the table [slots, …] with further axes at least so wide; new places hold `value`."""
    shape = [max(old, new) for old, new in zip(table.shape[1:], widths, strict=True)]
    if list(table.shape[1:]) == shape:
        return table
    wider = table.new_full((table.shape[0], *shape), value)
    wider[tuple(slice(0, size) for size in table.shape)] = table
    return wider


def _padded(ids: list[int], value: int, width: int) -> Tensor:
    return torch.tensor(ids + [value] * (width - len(ids)), dtype=torch.int32)
