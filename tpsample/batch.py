"""SamplingBatch: the parameters of a batch as per-row device tensors."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpsample.errors import UnsupportedParameter
from tpsample.kept_set import RowFilters
from tpsample.logprob_rows import AskingRows, LogprobRows
from tpsample.noise import philox4x32
from tpsample.params import SamplingParams

_DOMAIN_SEED = 0x73656564


class SamplingBatch:
    """Rows of sampling parameters on the device, read by the kernels at run time.

    Writing into the tensors between steps is allowed; a captured CUDA graph reads the new values
    at replay.

    Attributes:
        temperature: fp32 [B]; below 1e-5 the row is greedy.
        seed: int64 [B], 64 bits.
        filters: the rows with top_k, top_p or min_p; None if there are none, which the host
            knows, so that such a batch takes the plain plan.
        logprobs: what rows ask for logprobs; None if none does.
        stored, host_stored: int64 [R] and a list: rows whose logits a step keeps on their ranks,
            the filtered ones, then those that ask for logprobs and have no filter. None, and
            empty, if there are none.
        stored_slot: int32 [B], place of each row in `stored`, or -1; None if there are none.
        vocab_size: V, what ids were checked against.
        kept_cap: most tokens of a kept set that a step reports; None reports none.
        fixed_rounds: a step with filters never waits for the device.
        asking: where the rows that ask for logprobs are among the stored ones.
    """

    def __init__(
        self,
        temperature: Tensor,
        seed: Tensor,
        *,
        vocab_size: int,
        filters: RowFilters | None = None,
        logprobs: LogprobRows | None = None,
        kept_cap: int | None = None,
        fixed_rounds: bool = False,
        unseeded: Sequence[int] = (),
        for_all_rows: SamplingParams | None = None,
    ) -> None:
        self.temperature = temperature
        self.seed = seed
        self.filters = filters
        self.logprobs = logprobs
        rows = [*(filters.host_rows if filters else ()), *(logprobs.rows if logprobs else ())]
        self.host_stored = list(dict.fromkeys(rows))
        self.stored: Tensor | None = None
        self.stored_slot: Tensor | None = None
        if rows:
            self.stored = torch.tensor(self.host_stored, device=seed.device)
            slots = torch.arange(len(self.host_stored), dtype=torch.int32, device=seed.device)
            self.stored_slot = torch.full_like(seed, -1, dtype=torch.int32)
            self.stored_slot[self.stored] = slots
        self.vocab_size = vocab_size
        self.kept_cap = kept_cap
        self.fixed_rounds = fixed_rounds
        self.asking: AskingRows | None = None
        if logprobs is not None:
            self.asking = AskingRows.of(logprobs, filters, self.host_stored)
        self._unseeded = list(unseeded)
        self._for_all_rows = for_all_rows
        self._expanded: dict[int, SamplingBatch] = {}

    @staticmethod
    def from_params(
        params: SamplingParams | Sequence[SamplingParams],
        *,
        vocab_size: int,
        device: torch.device | str | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        output_token_ids: Sequence[Sequence[int]] | None = None,
        kept_cap: int | None = None,
        fixed_rounds: bool = False,
    ) -> SamplingBatch:
        """Build a batch from requests.

        Args:
            params: one request per row, or one for all rows of whatever batch it meets.
            vocab_size: V; must match across ranks.
            device: where the tensors live; the hidden states' device. Default: the CPU.
            prompt_token_ids, output_token_ids: tokens so far per row, checked against V. No
                supported parameter reads them yet.
            kept_cap: report which tokens the filters of each filtered row left
                (`SampleOutput.kept`), up to this many per row; None reports none.
            fixed_rounds: draw every filtered row by the way that takes the same number of
                exchanges whatever the logits, so that a step never waits for the device. The
                tokens are the same. A step that is being captured in a CUDA graph does so anyway.

        Returns:
            A batch whose rows with ``seed=None`` are given a seed by the first sampler that
            meets them: all ranks derive it from one random number drawn on one rank.

        Raises:
            TypeError: params is not a SamplingParams or a sequence of them.
            UnsupportedParameter: a field whose effect is not built yet, or kept_cap with
                fixed_rounds: how many tokens to send, the host has to read.
            ValueError: a token id >= V, token lists that do not match the rows, or kept_cap < 1.
        """
        single = params if isinstance(params, SamplingParams) else None
        requests: list[Any] = [params] if single is not None else list(params)  # type: ignore[arg-type]
        for row, request in enumerate(requests):
            if not isinstance(request, SamplingParams):
                raise TypeError(
                    f"params[{row}]: expected SamplingParams, got {type(request).__name__}"
                )
            request.require_supported()
        for name, lists in (
            ("prompt_token_ids", prompt_token_ids),
            ("output_token_ids", output_token_ids),
        ):
            _check_token_lists(name, lists, len(requests), vocab_size)

        if kept_cap is not None and (
            isinstance(kept_cap, bool) or not isinstance(kept_cap, int) or kept_cap < 1
        ):
            raise ValueError(f"kept_cap: expected None or an int >= 1, got {kept_cap!r}")
        if kept_cap is not None and fixed_rounds:
            raise UnsupportedParameter("kept_cap: not with fixed_rounds; leave one of them off")

        temperature = [request.temperature for request in requests]
        seeds = [_signed64(request.seed or 0) for request in requests]
        return SamplingBatch(
            torch.tensor(temperature, dtype=torch.float32, device=device),
            torch.tensor(seeds, dtype=torch.int64, device=device),
            vocab_size=vocab_size,
            filters=RowFilters.of(requests, vocab_size, device),
            logprobs=LogprobRows.of(requests, vocab_size, device),
            kept_cap=kept_cap,
            fixed_rounds=fixed_rounds,
            unseeded=[row for row, request in enumerate(requests) if request.seed is None],
            for_all_rows=single,
        )

    @property
    def rows(self) -> int:
        """B."""
        return self.temperature.shape[0]

    @property
    def device(self) -> torch.device:
        return self.temperature.device

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

    @property
    def unseeded(self) -> bool:
        """Whether a row still waits for its seed."""
        return bool(self._unseeded)

    def draw_seeds(self, source: SeedSource) -> None:
        """Give every row that came without a seed the next one of `source`."""
        for row in self._unseeded:
            self.seed[row] = source.next()
        self._unseeded = []


class SeedSource:
    """63-bit seeds derived from one random number; equal on ranks that share the number.

    Args:
        root: 63 random bits; None draws them.
    """

    def __init__(self, root: int | None = None) -> None:
        self.root = secrets.randbits(63) if root is None else root
        self._drawn = 0

    def next(self) -> int:
        """The next seed: Philox keyed by the root, counted by the number of seeds drawn."""
        counter = tuple(torch.tensor(c) for c in (self._drawn, 0, 0, _DOMAIN_SEED))
        key = (self.root & 0xFFFFFFFF, self.root >> 32)
        low, high, *_ = philox4x32(counter, key, 10)  # type: ignore[arg-type]
        self._drawn += 1
        return (int(high) << 32 | int(low)) & (2**63 - 1)


def _signed64(seed: int) -> int:
    bits = seed & 0xFFFFFFFFFFFFFFFF
    return bits - (1 << 64) if bits >> 63 else bits


def _check_token_lists(
    name: str, lists: Sequence[Sequence[int]] | None, rows: int, vocab_size: int
) -> None:
    if lists is None:
        return
    if len(lists) != rows:
        raise ValueError(f"{name}: expected one list per row ({rows}), got {len(lists)}")
    for row, ids in enumerate(lists):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{name}[{row}]: expected ids in [0, {vocab_size}), got {token_id}"
                )
