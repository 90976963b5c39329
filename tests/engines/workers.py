"""Workers of vLLM that are watched: the adapter's, and vLLM's own for comparison.

    --worker-cls tests.engines.workers.Watched

They write what they saw into the folder TPSAMPLE_WATCH, one file per rank.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.engines.asked import FAILING_SEED, FAILING_STEP
from tests.engines.traffic import Traffic
from tpsample import reference
from tpsample.integrations.vllm import Worker
from tpsample.output import KeptSets, SampleOutput
from tpsample.request.batch import SamplingBatch

FOLDER = Path(os.environ["TPSAMPLE_WATCH"])
TRAFFIC = Traffic(GroupCoordinator)
# vLLM's shared memory spins until the other rank has written, which takes a core from it on a
# machine with as many cores as ranks. Without, its ranks talk by gloo, which waits.
CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def write(rank: int, **found: Any) -> None:
    """Replace this rank's file at once."""
    path = FOLDER / f"rank-{rank}.json"
    record = {"rank": rank, "pid": os.getpid(), "traffic": TRAFFIC.record(), **found}
    path.with_suffix(".new").write_text(json.dumps(record))
    path.with_suffix(".new").rename(path)


def write_after_steps(worker: Any) -> None:
    """Write now and after every step of a worker, whichever sampler takes it."""
    write(worker.rank)
    sample_tokens = worker.model_runner.sample_tokens

    def watched(grammar_output: Any) -> Any:
        try:
            return sample_tokens(grammar_output)
        finally:
            write(worker.rank)

    worker.model_runner.sample_tokens = watched


class Plain(CPUWorker):
    """vLLM's own worker, whose logits are gathered."""

    def load_model(self, **kwargs: Any) -> None:
        # Triton's interpreter does not run vLLM's kernel of top_k and top_p, so PyTorch does.
        topk_topp_sampler.HAS_TRITON = False
        super().load_model(**kwargs)
        write_after_steps(self)


class Watched(Worker):
    """The adapter's worker; rank 0 holds every token against the oracle, but with drafts."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        if self.vllm_config.speculative_config is not None:  # steps that verify are not sampled
            write_after_steps(self)
            return
        head = self.model_runner.sampler.steps.head
        head.sample = Watcher(self.rank, head.sample, self.model_config.model).sample
        write(self.rank)


class Watcher:
    """Looks at each step of one rank, and spoils the rows of one seed.

    Args:
        model: its folder; the oracle reads the whole LM head from the file, past all ranks.
    """

    def __init__(self, rank: int, sample: Any, model: str) -> None:
        self.rank, self._sample = rank, sample
        self.rows = self.unequal = self.steps = self.failed = 0
        self.sets = self.unequal_sets = 0
        self._seen = 0
        self._weight = whole_head(model) if rank == 0 else None

    def sample(self, kept: Tensor, batch: SamplingBatch, positions: Tensor) -> SampleOutput:
        kept = self.spoiled(kept, batch)
        out: SampleOutput = self._sample(kept, batch, positions)
        self.steps += 1
        self.rows += len(out.token_ids)
        self.failed += int((out.status != 0).sum())
        if self._weight is not None:
            logits = reference.logits(kept, self._weight)
            expected = reference.sample(logits, batch, positions)
            same = (expected.token_ids == out.token_ids) & (expected.status == out.status)
            self.unequal += int((~same).sum())
            if out.kept is not None:
                self.sets += len(kept)
                mask = reference.kept_mask(logits, batch)
                greedy = (batch.temperature == 0).nonzero().flatten()  # which keep what they drew
                mask[greedy] = False
                mask[greedy, out.token_ids[greedy]] = True
                self.unequal_sets += unequal_sets(out.kept, mask)
        write(
            self.rank,
            steps=self.steps,
            rows=self.rows,
            failed=self.failed,
            oracle=self._weight is not None,
            unequal=self.unequal,
            sets=self.sets,
            unequal_sets=self.unequal_sets,
        )
        return out

    def spoiled(self, kept: Tensor, batch: SamplingBatch) -> Tensor:
        """Return hidden states that are NaN in a late step of the request that asks for it."""
        seeds = batch.seed.tolist()
        if FAILING_SEED not in seeds:
            return kept
        self._seen += 1
        if self._seen < FAILING_STEP:
            return kept
        kept = kept.clone()
        kept[seeds.index(FAILING_SEED)] = torch.nan
        return kept


def unequal_sets(kept: KeptSets, mask: Tensor) -> int:
    """Return how many rows list another set than a mask bool [B, V] has; a whole one lists none."""
    found = torch.zeros_like(mask)
    found[torch.arange(len(mask)).repeat_interleave(kept.offsets.diff()), kept.token_ids] = True
    found[kept.whole] = True
    return int((found != mask).any(dim=1).sum())


def whole_head(model: str) -> Tensor:
    """Return the LM head of the bundled model in float64; it is tied to the embedding."""
    from safetensors import safe_open

    with safe_open(Path(model) / "model.safetensors", framework="pt") as file:
        weight: Tensor = file.get_tensor("model.embed_tokens.weight")
    return weight.double()
