"""The k most likely tokens and the entropy of every step of a generation.

    entropy = -Σ p_v ln p_v   over the whole vocabulary, p in the mode of the logprobs

All buffers are [B, steps, k] or smaller and are made once; whole logits of every step would be
[B, steps, V]. Recording copies on the device and never waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tpsample.core.checks import check_int, describe, is_integer, lists_in_order
from tpsample.core.sealed import Sealed
from tpsample.core.tensors import KeepsTensors, ordinary_tensors, readable
from tpsample.output import Logprobs, SampleOutput
from tpsample.record.format import write_tensors
from tpsample.request.batch_checks import check_device


class TopKTrace(KeepsTensors, Sealed):
    """Records the logprobs of a generation, step by step.

        trace = TopKTrace(rows=B, steps=200, k=20)          # requests with logprobs=20
        trace.record(sampler(hidden_states, batch, positions))              # every step
        trace.save("run.safetensors", lengths=[...])

    A row of the trace is a row of the batch, so rows that move, leave or join need another trace.
    On a CPU it sees them by the seeds of a step, if it is given the output and not its logprobs.

    Args:
        rows, steps: B, and how many steps there is room for.
        k: how many of the most likely tokens to keep per step; every request asks for as many.
        device: where the logprobs are. Default: the CPU.

    Attributes:
        step: how many steps are recorded.
        token_ids: int32 [B, steps], the tokens drawn.
        logprobs: fp32 [B, steps], their logprobs.
        entropies: fp32 [B, steps], in nats.
        top_token_ids, top_logprobs: int32 and fp32 [B, steps, k], most likely first.

    A place that was not recorded, or whose row had no token, has id -1 and value NaN.
    """

    @ordinary_tensors
    def __init__(
        self, rows: int, steps: int, k: int, *, device: torch.device | str | None = None
    ) -> None:
        for name, value in (("rows", rows), ("steps", steps), ("k", k)):
            check_int(name, value, 1, 2**31 - 1)
        check_device(device)

        def ids(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        def values(*shape: int) -> Tensor:
            return torch.full(shape, torch.nan, dtype=torch.float32, device=device)

        self.step = 0
        self._seeds: list[int] | None = None
        self.token_ids, self.logprobs = ids(rows, steps), values(rows, steps)
        self.entropies = values(rows, steps)
        self.top_token_ids, self.top_logprobs = ids(rows, steps, k), values(rows, steps, k)

    def record(self, step: SampleOutput | Logprobs | None) -> None:
        """Keep one more step.

        Args:
            step: the output of a call without `num_samples`, in which every row asks for at least
                k, or its logprobs.

        Raises:
            TypeError: no output of a step.
            ValueError: another number of rows, fewer than k likely tokens, several samples, no step
                left, or rows of other requests than in the first step.
        """
        logprobs = step.logprobs if isinstance(step, SampleOutput) else step
        if not isinstance(logprobs, (Logprobs, type(None))):
            raise TypeError(
                f"step: expected a SampleOutput or its logprobs, got {type(step).__name__}"
            )
        if isinstance(step, SampleOutput) and step.token_ids.ndim > 1:
            raise ValueError(
                f"step: expected one token per row, got {step.token_ids.shape[1]} samples; take "
                "the step without num_samples"
            )
        rows, steps, k = self.top_token_ids.shape
        shape = (0, 0) if logprobs is None else tuple(logprobs.token_ids.shape)
        chosen = 0 if logprobs is None else logprobs.num_chosen
        if logprobs is None or shape[0] != rows or shape[1] - chosen <= k:
            got = None if logprobs is None else shape
            named = f" with {chosen} from logprob_token_ids" if chosen else ""
            raise ValueError(
                f"logprobs: expected {rows} rows with the token drawn and at least k = {k} more, "
                f"got {got}{named}; ask for them with SamplingParams(logprobs={k})"
            )
        if self.step == steps:
            raise ValueError(f"logprobs: the trace has room for {steps} steps; all are recorded")
        if isinstance(step, SampleOutput) and readable(step.seeds.device):
            seeds = step.seeds.tolist()
            self._seeds = self._seeds or seeds
            if seeds != self._seeds:
                row = next(row for row in range(rows) if seeds[row] != self._seeds[row])
                raise ValueError(
                    f"step: row {row} has another seed than in the first step, so rows have moved, "
                    "left or joined; begin another trace"
                )
        self.token_ids[:, self.step] = logprobs.token_ids[:, 0]
        self.logprobs[:, self.step] = logprobs.values[:, 0]
        self.entropies[:, self.step] = logprobs.entropies
        self.top_token_ids[:, self.step] = logprobs.token_ids[:, 1 : 1 + k]
        self.top_logprobs[:, self.step] = logprobs.values[:, 1 : 1 + k]
        self.step += 1

    def tensors(self, lengths: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Return the recorded steps on the CPU by attribute name, and `lengths`, int64 [B].

        Args:
            lengths: how many steps belong to each row; those behind are blanked. Default: all.

        Raises:
            ValueError: lengths that do not fit the rows and steps.
        """
        rows = len(self.token_ids)
        given = [self.step] * rows if lengths is None else lengths
        numbers = list(given) if lists_in_order(given) else []
        if len(numbers) != rows or not all(is_integer(n) and 0 <= n <= self.step for n in numbers):
            raise ValueError(
                f"lengths: expected {rows} numbers of steps up to {self.step}, got "
                f"{describe(lengths)}"
            )
        until = torch.tensor([int(number) for number in numbers], device="cpu")
        inside = torch.arange(self.step, device="cpu") < until.unsqueeze(1)
        recorded = {"lengths": until}
        for name in ("token_ids", "logprobs", "entropies", "top_token_ids", "top_logprobs"):
            tensor = getattr(self, name)[:, : self.step].cpu()
            blank = -1 if name.endswith("ids") else torch.nan
            shape = inside.shape + (1,) * (tensor.ndim - 2)
            recorded[name] = tensor.where(inside.view(shape), blank)
        return recorded

    def save(
        self,
        path: str | Path,
        *,
        lengths: Sequence[int] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write `tensors(lengths)` as a safetensors file, which waits for the GPU.

        Args:
            metadata: texts by name for the file.

        Raises:
            TypeError, ValueError: lengths that do not fit, a path that cannot be written, or
                metadata that are no texts.
        """
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors(lengths).items()}
        write_tensors(path, tensors, metadata)
