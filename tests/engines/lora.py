"""Writes an adapter of LoRA for the model of the servers."""

from __future__ import annotations

import json
from pathlib import Path

import torch

ADAPTER = "tuned"
"""Name of an adapter of LoRA, and of its folder beside the model's files."""


def make_adapter(model: Path) -> None:
    """Write a random adapter of LoRA for two layers of a model's attention, into its folder."""
    from safetensors.torch import save_file

    folder, rank = model / ADAPTER, 4
    folder.mkdir(exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    width, size = config["hidden_size"], config["head_dim"]
    rows = {"q_proj": "num_attention_heads", "v_proj": "num_key_value_heads"}
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, heads in rows.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (rank, width)), ("B", (config[heads] * size, rank))):
                values = 0.05 * torch.randn(shape, generator=generator)
                weights[f"{place}.lora_{part}.weight"] = values
    save_file(weights, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(rows)}
    (folder / "adapter_config.json").write_text(json.dumps(about | {"bias": "none"}))
