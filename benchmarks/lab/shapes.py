"""The LM heads that are measured: real models, and a tiny one for CPUs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """An LM head [vocab_size, hidden_size] and a model that has it."""

    vocab_size: int
    hidden_size: int
    model: str

    @property
    def name(self) -> str:
        return f"{self.vocab_size}x{self.hidden_size}"


SHAPES = (
    Shape(128256, 8192, "Llama-3 70B"),
    Shape(151936, 4096, "Qwen3 8B"),
    Shape(128256, 4096, "Llama-3 8B"),
    Shape(151936, 2048, "Qwen3 1.7B"),
    Shape(128256, 2048, "Llama-3.2 1B"),
    Shape(49152, 576, "SmolLM2 135M"),
)
TINY = Shape(1000, 64, "none: for CPUs")

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TINY_BATCHES = (1, 3)


def shape_named(name: str) -> Shape:
    """The shape called `name`, as in "128256x8192".

    Raises:
        ValueError: no such shape.
    """
    for shape in (*SHAPES, TINY):
        if shape.name == name:
            return shape
    raise ValueError(f"shape: expected one of {', '.join(s.name for s in SHAPES)}, got {name!r}")
