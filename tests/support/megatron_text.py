"""Decodes with a small GPT of Megatron-core, on CPU ranks, from the shards of its output layer.

Prints the texts, and those that the definition draws from the gathered logits.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference

V, ROWS, STEPS = 1000, 3, 12
PADDED = 3 * 384
"""A multiple of 128 times each number of ranks, so that all have the same weights."""


def model() -> Any:
    """Return the model, whose weights do not depend on the number of ranks."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    tracker = type(tensor_parallel.get_cuda_rng_tracker())
    tracker.fork = lambda *_: contextlib.nullcontext()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=96,
        num_attention_heads=6,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        pipeline_dtype=torch.float32,
    )
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec()
    sizes = {"vocab_size": PADDED, "max_sequence_length": 64}
    made = GPTModel(config=config, transformer_layer_spec=spec, parallel_output=True, **sizes)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3)
    return made.eval()


@torch.no_grad()
def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    gpt, group = model(), parallel_state.get_tensor_model_parallel_group()
    shard = VocabShard.padded(V, rank, world_size, multiple=PADDED)
    sampler = LMHeadSampler(gpt.output_layer, vocab_size=V, shard=shard, group=group)
    params = [SamplingParams(top_p=0.9, seed=row) for row in range(ROWS)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    given: list[torch.Tensor] = []
    gpt.output_layer.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    texts = torch.randint(0, V, (ROWS, 8), generator=torch.Generator().manual_seed(1))
    expected = []
    for _ in range(STEPS):
        length = texts.shape[1]
        mask = torch.ones(1, 1, length, length).triu(1).bool()
        local = gpt(texts, torch.arange(length).expand(ROWS, -1), mask)[:, -1].contiguous()
        token_ids = sampler(given[-1][-1].contiguous(), batch, length).token_ids
        parts = [torch.empty_like(local) for _ in range(world_size)]
        dist.all_gather(parts, local, group=group)
        logits = torch.cat(parts, dim=-1)[:, :V]
        expected.append(reference.sample(logits, batch, length).token_ids.tolist())
        texts = torch.cat([texts, token_ids.unsqueeze(1)], dim=1)
    if rank == 0:
        found = texts[:, 8:].T.tolist()
        print(json.dumps({"found": found, "expected": expected}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
