"""`generate` of transformers on a model that is sharded by its own tensor parallelism.

    torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
        launch/examples/transformers_generate.py

Without arguments a small random Llama is made, so that nothing is downloaded; a folder or an id of
the Hugging Face hub loads a model of yours, which is then asked a question.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from tpsample.distributed import Job, join
from tpsample.integrations import transformers as tpsample_transformers

SMALL = LlamaConfig(
    vocab_size=1000,
    hidden_size=96,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=12,
    num_key_value_heads=12,
    initializer_range=0.3,
)


def main(job: Job, name: str | None = None) -> list[list[int]]:
    """Return the new tokens of two rows, the same for any number of ranks."""
    split = DistributedConfig(tp_plan="auto", tp_size=job.world_size)
    sharded = {"distributed_config": split} if job.world_size > 1 else {}
    with tempfile.TemporaryDirectory() as folder:
        if name is None and job.rank == 0:
            torch.manual_seed(0)
            LlamaForCausalLM(SMALL).save_pretrained(folder)
        source = name or job.gather(folder)[0]  # rank 0's, once it is written
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **sharded).eval()
        job.gather("read")  # before rank 0 removes it
    input_ids = torch.tensor([[5, 6, 7], [5, 6, 7]])
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name)
        input_ids = tokenizer(["The sky is blue because"] * 2, return_tensors="pt").input_ids
    input_ids = input_ids.to(model.device)

    token_ids = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=True,
        temperature=0.8,
        top_p=0.9,
        max_new_tokens=8,
        pad_token_id=0,
        seeds=[1, 2],  # one per row, in place of a global random state
        custom_generate=tpsample_transformers.generate,
    )
    new: list[list[int]] = token_ids[:, input_ids.shape[1] :].tolist()
    if name is not None and job.rank == 0:
        print(*tokenizer.batch_decode(new), sep="\n")
    return new


if __name__ == "__main__":
    with join() as job:
        texts = main(job, *sys.argv[1:2])
        if job.rank == 0:
            print(*texts, sep="\n")
