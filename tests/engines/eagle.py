"""A drafter of EAGLE that knows the answers of a server, so that its drafts can be accepted.

    python -m tests.engines.eagle MODEL ANSWERS.json

Its layer adds nothing. So its hidden states are a product with the embedding of a token and the
hidden states of the token before. Least squares find the product that returns those of the answers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.engines.asked import DRAFTED


def make_drafter(model: Path, answers: Path) -> None:
    """Write a drafter of a model into its folder, for what a server with it has answered."""
    kinds = json.loads(answers.read_text())["kinds"]
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).model
    given, wanted = [], []
    for name in DRAFTED:
        prompt, tokens = kinds[name]["prompt_token_ids"], kinds[name]["tokens"]
        token_ids = torch.tensor([[*prompt, *tokens]])
        with torch.inference_mode():
            hidden = whole(token_ids).last_hidden_state[0].double()
            embedded = whole.embed_tokens(token_ids)[0].double()
        its = torch.cat([embedded[1:], hidden[:-1]], dim=1)
        given.append(its[len(prompt) - 2 :])
        wanted.append(hidden[len(prompt) - 1 :])
    product = torch.linalg.lstsq(torch.cat(given), torch.cat(wanted), driver="gelsd").solution

    weights = {
        name.removeprefix("model."): weight.float() * ("o_proj" not in name and "down" not in name)
        for name, weight in load_file(model / "model.safetensors").items()
        if ".layers.0." in name and "input_layernorm" not in name
    }
    weights["fc.weight"] = product.T.float().contiguous()
    out = model / "eagle"
    out.mkdir(exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))


if __name__ == "__main__":
    make_drafter(*map(Path, sys.argv[1:]))
