"""Asks `generate` of transformers what a server was asked: the same seeds, the same text.

python -m tests.engines.huggingface MODEL ANSWERS.json OUT.json RANKS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.engines.asked import HUGGING_FACE, TOKENS


def main(model: Path, answers: Path, out: Path) -> None:
    """Write the tokens of each kind, for the prompts that the server made."""
    import transformers

    from tpsample.integrations import transformers as tpsample_transformers

    asked = json.loads(answers.read_text())["kinds"]
    causal_lm = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = {}
    for name, arguments in HUGGING_FACE.items():
        own = dict(arguments)
        seed = own.pop("seed", None)
        prompt = torch.tensor([asked[name]["prompt_token_ids"]])
        ids = causal_lm.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=bool(own),
            top_k=own.pop("top_k", 0) if own else None,
            max_new_tokens=TOKENS,
            seeds=[seed] if own else None,
            custom_generate=tpsample_transformers.generate,
            **own,
        )
        found[name] = ids[0, prompt.shape[1] :].tolist()[: len(asked[name]["tokens"])]
        out.write_text(json.dumps({"transformers": transformers.__version__, "tokens": found}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(Path, sys.argv[1:4]))
