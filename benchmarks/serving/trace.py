"""The requests of a run: lengths of a published trace, arrivals of a Poisson process."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# fmt: off
LENGTHS = (
    (374, 44), (396, 109), (879, 55), (91, 16), (91, 16), (381, 84), (1313, 142), (388, 84),
    (242, 14), (209, 152), (394, 124), (394, 59), (1315, 174), (2221, 15), (389, 90), (415, 106),
    (120, 12), (369, 74), (206, 162), (1353, 142), (197, 152), (181, 154), (388, 54), (4085, 62),
    (2584, 170), (203, 147), (126, 194), (389, 87), (2548, 116), (91, 16), (4081, 74), (181, 123),
    (191, 217), (27, 183), (203, 217), (398, 81), (126, 172), (209, 181), (209, 181), (28, 175),
    (437, 88), (181, 104), (203, 138), (200, 177), (4073, 58), (91, 16), (1087, 401), (382, 64),
    (412, 102), (194, 217), (203, 217), (200, 217), (64, 174), (458, 123), (1352, 158), (874, 404),
    (378, 58), (91, 16), (4074, 50), (389, 89), (212, 183), (1085, 394), (407, 131), (396, 82),
)
# fmt: on
"""Tokens of the prompt and of the answer: the first 64 requests of AzureLLMInferenceTrace_conv, a
trace of conversations taken in November 2023 (github.com/Azure/AzurePublicDataset, CC-BY 4.0;
Patel et al., "Splitwise", ISCA 2024)."""


@dataclass(frozen=True)
class Request:
    """One request; its answer has a fixed length, whatever is drawn.

    Attributes:
        arrival_s: seconds after the start.
        seed: of its noise.
    """

    arrival_s: float
    prompt: tuple[int, ...]
    output_tokens: int
    seed: int


def requests(count: int, scale: float, rate: float, vocab_size: int) -> list[Request]:
    """Return the first requests of the trace, repeated if need be; the same on every rank.

    Args:
        scale: of both lengths, so that a slow machine can take part; at least two tokens each.
        rate: requests per second of a Poisson process; infinity lets all arrive at the start.
        vocab_size: prompts are random ids below it, since only their number takes time.
    """
    generator = torch.Generator().manual_seed(0)
    gaps = torch.zeros(count)
    if rate != float("inf"):
        gaps = torch.empty(count).exponential_(rate, generator=generator)
        gaps[0] = 0.0
    arrivals, made = gaps.cumsum(0).tolist(), []
    for number, arrival in enumerate(arrivals):
        prompt, output = (max(2, round(n * scale)) for n in LENGTHS[number % len(LENGTHS)])
        ids = torch.randint(vocab_size, (prompt,), generator=generator)
        made.append(Request(arrival, tuple(ids.tolist()), output, seed=1000 + number))
    return made
