"""Both runners of vLLM sample the rows of a step here, and hand their tokens on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tpsample.core.sealed import Sealed
from tpsample.core.word import Status
from tpsample.integrations.engine_rows import EngineRequest, StepRows
from tpsample.integrations.vllm_head import VllmHead
from tpsample.integrations.vllm_params import admit, end_of
from tpsample.output import KeptSets, Logprobs
from tpsample.request.batch import SamplingBatch
from tpsample.request.params import LogprobsMode, SamplingParams
from tpsample.request.plan import BatchView
from tpsample.request.step_batch import StepBatch

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows the lines of its own loggers


class Verified(NamedTuple):
    """The tokens of a step in which rows have drafts.

    Attributes:
        token_ids: int64 [B, K + 1], -1 behind a row's last.
        num_accepted: int64 [B], how many drafts became tokens; a row has one token more.
        tables: logprobs of B · (K + 1) rows as vLLM takes them, if a row asks for any.
        kept: sets of these rows, of a batch with a `kept_cap`.
    """

    token_ids: Tensor
    num_accepted: Tensor
    tables: Any
    kept: KeptSets | None


class EngineSteps(Sealed):
    """The steps of one runner.

    Attributes:
        head: samples what the model's head was given.
        grammar: int32 [rows, ceil(V / 32)] for the next step, or None.
        logprobs_mode: of the whole server.
        kind: vLLM's class of logprobs: int32 and fp32 [rows, 1 + N], and the drawn tokens' ranks.
    """

    def __init__(self, head: VllmHead, logprobs_mode: LogprobsMode, kind: Any) -> None:
        self.head, self.logprobs_mode, self.kind = head, logprobs_mode, kind
        self.vocab_size, self.device = head.kept.sampler.vocab_size, head.kept.sampler.weight.device
        self.grammar: Tensor | None = None
        self._failures = Failures(self.device, head.kept.sampler.count_failed)

    def request(
        self, name: object, own: Any, tokens: Callable[[], tuple[Sequence[int], Sequence[int]]]
    ) -> EngineRequest:
        """Return our request for one of vLLM's that joins.

        Args:
            tokens: reads its prompt and output, and is called only if the request looks at them.
        """
        params = admit(name, own, self.vocab_size, self.logprobs_mode)
        prompt, output = tokens() if params.reads_output else ((), ())
        return EngineRequest(params, prompt, output, end_of(own, self.vocab_size))

    def sample(
        self,
        kept: Tensor,
        rows: StepRows,
        positions: Tensor,
        unfinished: Tensor,
        process: Callable[[Tensor, StepBatch], tuple[Tensor, StepBatch | BatchView]] | None = None,
    ) -> tuple[Tensor, Any, KeptSets | None]:
        """Return the tokens of a step, int64 [B], logprobs if a row asks, and kept sets of a batch
        with a `kept_cap`. Collective.

        Args:
            kept: what the head was given, a row each.
            positions: [B], of the tokens to come.
            unfinished: bool [B], rows in the middle of their prompt, whose tokens nobody wants.
            process: returns the logits and the rows to sample for what was kept and its rows.
        """
        rows.batch.grammar_bitmask = self._take_grammar()
        given: tuple[Tensor, StepBatch | BatchView] = (kept, rows.batch)
        if process is not None:
            given = process(kept, rows.batch)
        out = self.head.sample(*given, positions.to(torch.int64))
        rows.batch.append(out.token_ids.masked_fill(unfinished, -1))
        token_ids = self.ended(rows, out.token_ids, out.status, unfinished)
        return token_ids, self.tables(rows, out.logprobs, token_ids), out.kept

    def verify(
        self,
        flat: Tensor,
        starts: Tensor,
        drafts: Tensor,
        rows: StepRows,
        at: Tensor,
        unfinished: Tensor,
        **rule: Any,
    ) -> Verified:
        """Return the tokens of a step in which rows have drafts. Collective.

        They are those of plain decoding, but by another rule.

        Args:
            flat: what the head was given: of each row its position before the drafts, then theirs.
            starts: int [B], where the positions of each row begin.
            drafts: int64 [B, K], -1 behind a row's last.
            at: [B], the positions of the first tokens to come.
            unfinished: bool [B], rows in the middle of their prompt, whose tokens nobody wants.
            rule: method and draft_logits of `tpsample.verify`.
        """
        offset = torch.arange(drafts.shape[1] + 1, device=self.device)
        # Those behind a row's last position may be anything.
        index = (starts.unsqueeze(1) + offset).clamp(max=len(flat) - 1)
        grammar = self._take_grammar()
        rows.batch.grammar_bitmask = None if grammar is None else grammar[index].flatten(0, 1)
        out = self.head.verify(flat[index], drafts, rows.batch, at.to(torch.int64), **rule)
        rows.batch.append(out.token_ids.masked_fill(unfinished.unsqueeze(1), -1))

        # A row without a token behind its drafts ends there.
        last = out.num_accepted.unsqueeze(1)
        behind = self.ended(rows, out.token_ids.gather(1, last).squeeze(1), out.status, unfinished)
        token_ids = out.token_ids.scatter(1, last, behind.unsqueeze(1))
        tables = self.tables(rows, out.logprobs, token_ids.flatten())
        return Verified(token_ids, out.num_accepted, tables, out.kept)

    def _take_grammar(self) -> Tensor | None:
        """Return the bits of the grammars of this step, once."""
        grammar, self.grammar = self.grammar, None
        return grammar

    def ended(
        self, rows: StepRows, token_ids: Tensor, status: Tensor, unfinished: Tensor
    ) -> Tensor:
        """Return the tokens [B], with the token that ends its request where a row has none."""
        failed = status != Status.OK
        self._failures.note(rows.names, status.masked_fill(unfinished, int(Status.OK)))
        return torch.where(failed, rows.ends, token_ids)

    def tables(self, rows: StepRows, logprobs: Logprobs | None, drawn: Tensor) -> Any:
        """Return logprobs of rows · positions as vLLM takes them; `drawn` are their tokens.

        vLLM reads the first columns of each row: the token drawn, then as many as the request
        asked for, the most likely or ids of its own.
        """
        if logprobs is None:
            return None
        token_ids, values, wanted = logprobs.token_ids, logprobs.values, rows.ids[:, 1:]
        if wanted.shape[1]:
            wanted = wanted.repeat_interleave(len(token_ids) // len(wanted), dim=0)
            columns = [(token_ids == ids.unsqueeze(1)).int().argmax(dim=1) for ids in wanted.T]
            index = torch.arange(token_ids.shape[1], device=self.device).repeat(len(token_ids), 1)
            own = index[:, 1 : 1 + len(columns)]
            own.copy_(torch.stack(columns, dim=1).where(wanted >= 0, own))
            token_ids, values = token_ids.gather(1, index), values.gather(1, index)
        # A row without a token reports the one that ends it, at a probability of nothing.
        token_ids = torch.cat([drawn.unsqueeze(1), token_ids[:, 1:]], dim=1)
        return self._to_vllm_logprobs(token_ids, values, logprobs.ranks)

    def prompt_tables(self, kept: Tensor, token_ids: Tensor, top: int) -> Any:
        """Return logprobs of a prompt's tokens, or their logits in such a mode. Collective.

        The tokens are forced, so that a plain step reports them.
        """
        top = self.vocab_size if top == -1 else top
        as_logits = self.logprobs_mode.endswith("logits")
        mode: LogprobsMode = "raw_logits" if as_logits else "raw_logprobs"
        params = SamplingParams(temperature=0.0, logprobs=top, logprobs_mode=mode)
        prompt_logprobs = Logprobs.none(len(kept), 1 + top, kept.device)
        for start in range(0, len(kept), self.head.kept.sampler.max_rows):
            part = slice(start, start + self.head.kept.sampler.max_rows)
            rows = kept[part]
            batch = SamplingBatch.from_params(
                [params] * len(rows), vocab_size=self.vocab_size, device=kept.device
            )
            batch.forced_token_ids = token_ids[part].to(torch.int64)
            logprobs = self.head.sample(rows, batch, torch.zeros_like(batch.seed)).logprobs
            assert logprobs is not None
            prompt_logprobs.put(part, logprobs)
        return self._to_vllm_logprobs(
            prompt_logprobs.token_ids, prompt_logprobs.values, prompt_logprobs.ranks
        )

    def _to_vllm_logprobs(self, token_ids: Tensor, values: Tensor, ranks: Tensor) -> Any:
        values = values.nan_to_num(nan=-torch.inf, neginf=-torch.inf).float()
        return self.kind(token_ids.clamp(min=0).to(torch.int32), values, ranks[:, 0])

    def keep_grammar(
        self,
        names: Sequence[str],
        with_grammar: Sequence[str],
        bits: NDArray[np.int32],
        drafts: Mapping[str, Sequence[int]],
    ) -> None:
        """Keep a grammar's bits for the next step: a row for every position of every request.

        Args:
            names: of the rows of the step, in order.
            with_grammar: requests with a grammar.
            bits: theirs, one after the other; vLLM 0.33 has equally many rows for each, so that
                those behind the drafts of some stand for no position.
            drafts: of each request that has some; it has a position more than drafts.

        Raises:
            RuntimeError: a number of rows that no version has, which was tried.
        """
        counts = {name: 1 + len(drafts.get(name, ())) for name in (*names, *with_grammar)}
        rows = {name: np.full((counts[name], bits.shape[1]), -1, np.int32) for name in names}
        steps = [counts[name] for name in with_grammar]
        if len(bits) != sum(steps):
            block, rest = divmod(len(bits), len(steps))
            if rest or block < max(steps):
                raise RuntimeError(
                    f"grammar_bitmask: expected {sum(steps)} rows, one of each position, or "
                    f"{len(steps)} blocks with room for {max(steps)}, got {len(bits)}; this vLLM "
                    "lays its bits out in a way that was not tried"
                )
            steps = [block] * len(steps)
        start = 0
        for name, step in zip(with_grammar, steps, strict=True):
            rows[name] = bits[start : start + counts[name]]
            start += step
        words = -(-self.vocab_size // 32)
        bitmask = torch.from_numpy(np.concatenate([rows[name] for name in names]))
        bitmask = F.pad(bitmask[:, :words], (0, max(0, words - bitmask.shape[1])))
        self.grammar = bitmask.contiguous().to(self.device, non_blocking=True)


class Failures(Sealed):
    """Tells the log which requests had no token, without waiting for the device.

    The status of a step is read before the next one, if the device is done with it by then.

    Args:
        count: counts the failed rows of a status that came from a GPU.
    """

    def __init__(self, device: torch.device, count: Callable[[Tensor], None]) -> None:
        self._on_gpu, self._count = device.type == "cuda", count
        self._last: tuple[list[object], Tensor, Any] | None = None

    def note(self, names: Sequence[object], status: Tensor) -> None:
        """Log the rows of a step that failed; on a GPU those of an earlier step."""
        if not self._on_gpu:
            _log(names, status)
            return
        self.tell()
        host = torch.empty(status.shape, dtype=status.dtype, device="cpu", pin_memory=True)
        host.copy_(status, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._last = (list(names), host, event)

    def tell(self) -> None:
        """Count and log the rows of the remembered step that failed, if the device is done."""
        if self._last is None or not self._last[2].query():
            return
        names, status, _ = self._last
        self._last = None
        self._count(status)
        _log(names, status)


def _log(names: Sequence[object], status: Tensor) -> None:
    for name, code in zip(names, status.tolist(), strict=True):
        if code != Status.OK:
            text = "request %s is ended: no token could be drawn, status %s"
            logger.error(text, name, Status(code).name)
