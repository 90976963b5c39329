"""A model small enough to be made in a test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

VOCAB_SIZE = 1003
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "initializer_range": 0.5,
    "eos_token_id": VOCAB_SIZE - 1,
}


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """One whose words are w0, w1, …"""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def save_tiny_model(folder: Path) -> Path:
    """A random Gemma 2 with an odd vocabulary and a soft-cap that bends its logits."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    import transformers

    save_tokenizer(folder, VOCAB_SIZE)
    config = transformers.Gemma2Config(
        **SIZES,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        final_logit_softcapping=4.0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    causal_lm = transformers.Gemma2ForCausalLM(config)
    causal_lm.model.embed_tokens.weight.data *= 0.1  # else attention would hardly matter
    causal_lm.save_pretrained(folder)
    return folder


def save_tiny_llama(folder: Path) -> Path:
    """A random Llama whose heads two ranks can share, with a tied head of an odd vocabulary. Its
    cache can forget tokens."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    import transformers

    save_tokenizer(folder, VOCAB_SIZE)
    config = transformers.LlamaConfig(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
