"""What both runners of vLLM do in a step: they arrange a batch, sample it, hand tokens on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tpsample.core.sealed import Sealed
from tpsample.core.word import Status
from tpsample.integrations.engine_rows import EngineRequest, EngineRows
from tpsample.integrations.vllm_head import Head
from tpsample.integrations.vllm_params import admit, end_of
from tpsample.output import Logprobs
from tpsample.request.batch import SamplingBatch
from tpsample.request.params import LogprobsMode

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows the lines of its own loggers


class Tables(NamedTuple):
    """Logprobs as vLLM takes them: int32 and fp32 [rows, 1 + N], and the drawn tokens' ranks."""

    token_ids: Tensor
    values: Tensor
    ranks: Tensor


class Sampled(NamedTuple):
    """Tokens of a step, int64 [B], each of which vLLM can take, and logprobs if a row asks."""

    token_ids: Tensor
    logprobs: Tables | None


class EngineSteps(Sealed):
    """The steps of one runner.

    Attributes:
        head: samples what the model's head was given.
        rows: the batch, by the runner's names of its rows.
        grammar: int32 [rows, ceil(V / 32)] for the next step, or None.
        logprobs_mode: of the whole server.
    """

    def __init__(self, head: Head, max_rows: int, logprobs_mode: LogprobsMode) -> None:
        self.head, self.logprobs_mode = head, logprobs_mode
        self.vocab_size, self.device = head.sampler.vocab_size, head.sampler.weight.device
        self.rows = EngineRows(self.vocab_size, max_rows, self.device)
        self.grammar: Tensor | None = None
        self._failures = Failures(self.device, head.sampler.count_failed)

    def batch(
        self,
        names: Sequence[Hashable],
        load: Callable[[Hashable], tuple[Any, Callable[[], tuple[Sequence[int], Sequence[int]]]]],
    ) -> SamplingBatch:
        """Return the batch with these rows, and the grammar of the step.

        Args:
            load: returns the vLLM request of a row that joins, and what reads its prompt and
                output, which is called only if the request looks at them.
        """

        def joining(name: Hashable) -> EngineRequest:
            request, tokens = load(name)
            params = admit(name, request, self.vocab_size, self.logprobs_mode)
            prompt, output = tokens() if params.reads_output else ((), ())
            return EngineRequest(params, prompt, output, end_of(request))

        batch = self.rows.arrange(names, joining)
        batch.grammar_bitmask, self.grammar = self.grammar, None
        return batch

    def sample(self, kept: Tensor, positions: Tensor, unfinished: Tensor) -> Sampled:
        """Sample the batch. Collective.

        Args:
            kept: what the head was given, a row per row of the batch.
            positions: [B], of the tokens to come.
            unfinished: bool [B], rows in the middle of their prompt, whose tokens nobody wants.
        """
        batch = self.rows.batch
        out = self.head.sample(kept, batch, positions.to(torch.int64))
        batch.append(out.token_ids.masked_fill(unfinished, -1))
        token_ids = self.ended(out.token_ids, out.status, unfinished)
        return Sampled(token_ids, self.tables(out.logprobs, token_ids))

    def ended(self, token_ids: Tensor, status: Tensor, unfinished: Tensor) -> Tensor:
        """Return the tokens [B], with the token that ends its request where a row has none."""
        failed = status != Status.OK
        self._failures.note(self.rows.names, status.masked_fill(unfinished, int(Status.OK)))
        return torch.where(failed, self.rows.ends, token_ids)

    def tables(self, logprobs: Logprobs | None, drawn: Tensor) -> Tables | None:
        """Return logprobs of rows · positions as vLLM takes them; `drawn` are their tokens.

        vLLM reads the first columns of each row: the token drawn, then as many as the request
        asked for. Ours has columns for the N most likely, and behind them those for chosen ids.
        """
        if logprobs is None:
            return None
        token_ids, values = logprobs.token_ids, logprobs.values
        requests = self.rows.batch.plan.requests
        chosen = [len(request.logprob_token_ids or ()) for request in requests]
        if any(chosen):
            at = np.tile(np.arange(token_ids.shape[1]), (len(requests), 1))
            first = token_ids.shape[1] - max(chosen)
            for row, count in enumerate(chosen):
                at[row, 1 : 1 + count] = np.arange(first, first + count)
            index = torch.from_numpy(at).to(self.device)
            index = index.repeat_interleave(len(token_ids) // len(requests), dim=0)
            token_ids, values = token_ids.gather(1, index), values.gather(1, index)
        # A row without a token reports the one that ends it, at a probability of nothing.
        token_ids = torch.cat([drawn.clamp(min=0).unsqueeze(1), token_ids[:, 1:].clamp(min=0)], 1)
        values = values.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        return Tables(token_ids.to(torch.int32), values.float(), logprobs.ranks[:, 0])

    def prompt_tables(self, kept: Tensor, token_ids: Tensor, top: int) -> Tables:
        """Return logprobs of a prompt's tokens, or their logits in such a mode. Collective."""
        top = self.vocab_size if top == -1 else top
        as_logits = self.logprobs_mode.endswith("logits")
        found = self.head.scores(kept, token_ids, top, as_logits=as_logits)
        return Tables(
            found.token_ids.to(torch.int32).clamp(min=0),
            found.values.nan_to_num(nan=-torch.inf, neginf=-torch.inf).float(),
            found.ranks[:, 0],
        )

    def fitting(self, bitmask: Tensor) -> Tensor:
        """Return a grammar's bits with a word for each 32 ids of the vocabulary, on the device."""
        words = -(-self.vocab_size // 32)
        bitmask = F.pad(bitmask[:, :words], (0, max(0, words - bitmask.shape[1])))
        return bitmask.contiguous().to(self.device, non_blocking=True)


class Failures(Sealed):
    """Tells the log which requests had no token, without waiting for the device.

    What a step found is read before the next one, if the device is done with it by then.

    Args:
        count: counts the failed rows of a status that came from a GPU.
    """

    def __init__(self, device: torch.device, count: Callable[[Tensor], None]) -> None:
        self._on_gpu, self._count = device.type == "cuda", count
        self._last: tuple[list[Hashable], Tensor, Any] | None = None

    def note(self, names: Sequence[Hashable], status: Tensor) -> None:
        """Remember the status of a step's rows, and tell what was remembered before."""
        event = torch.cuda.Event() if self._on_gpu else None
        if self._on_gpu:
            self.tell()
            host = torch.empty(status.shape, dtype=status.dtype, pin_memory=True)
            host.copy_(status, non_blocking=True)
            assert event is not None
            event.record()
            status = host
        self._last = (list(names), status, event)
        if not self._on_gpu:
            self.tell()

    def tell(self) -> None:
        """Log the rows that failed in the step that is remembered."""
        if self._last is None:
            return
        names, status, event = self._last
        if event is not None and not event.query():
            return
        if event is not None:  # on a CPU the sampler has counted them
            self._count(status)
        for name, code in zip(names, status.tolist(), strict=True):
            if code != Status.OK:
                logger.error(
                    "request %s is ended: no token could be drawn, status %s",
                    name,
                    Status(code).name,
                )
        self._last = None
