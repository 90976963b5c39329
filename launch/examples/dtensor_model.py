"""A model that torch's tensor parallelism has sharded: the head is a DTensor, and brings its shard.

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
        launch/examples/dtensor_model.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams
from tpsample.distributed import Job, join

V, D, STEPS = 1001, 64, 6  # 2 ranks do not divide V


class Model(nn.Module):
    """A language model of one layer; only its head is sharded here."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.trunk = nn.Linear(D, D)
        self.lm_head = nn.Linear(D, V, bias=False)

    def hidden_states(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return [B, D], what the head would be given."""
        found: torch.Tensor = torch.tanh(self.trunk(self.embedding(token_ids)))
        return found


@torch.inference_mode()
def main(job: Job) -> list[list[int]]:
    """Write a text per request, and return the texts."""
    torch.manual_seed(0)
    model = Model().to(job.device)
    mesh = init_device_mesh(job.device.type, (job.world_size,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh["tp"], {"lm_head": ColwiseParallel()})

    # Rows, process group and vocabulary size follow from the DTensor.
    sampler = LMHeadSampler(model.lm_head.weight, max_rows=8)
    params = [SamplingParams(temperature=0.9, top_k=50, seed=seed) for seed in (1, 2, 3)]
    batch = SamplingBatch.from_params(
        params, vocab_size=sampler.vocab_size, device=sampler.weight.device
    )
    token_ids, texts = torch.tensor([5, 6, 7], device=job.device), []
    for position in range(1, 1 + STEPS):
        token_ids = sampler(model.hidden_states(token_ids), batch, position).token_ids
        texts.append(token_ids)
    sampler.close()
    return torch.stack(texts, dim=1).tolist()


if __name__ == "__main__":
    with join() as job:
        if job.world_size == 1:
            raise SystemExit("start two or more ranks with torchrun: a mesh needs a process group")
        texts = main(job)
        if job.rank == 0:
            print(*texts, sep="\n")
