"""The requests that benchmarks make, by name."""

from __future__ import annotations

from typing import Any

PROCESSED = {"logprobs": 5, "logprobs_mode": "processed_logprobs"}

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "penalties and a bias": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "logit_bias": {5: 2.0},
    },
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "top_k 50, top_p 0.9, joint": {"top_k": 50, "top_p": 0.9, "filter_order": "joint"},
    "top_p 0.9": {"top_p": 0.9},
    "T 0.5, top_p 0.9": {"temperature": 0.5, "top_p": 0.9},
    "top_p 0.1": {"top_p": 0.1},
    "min_p 0.05": {"min_p": 0.05},
    "min_p 0.001": {"min_p": 0.001},
    "top_k 1000": {"top_k": 1000},
    "top_k 1000, top_p 0.9": {"top_k": 1000, "top_p": 0.9},
    "logprobs 5": {"logprobs": 5},
    "greedy, logprobs 1": {"temperature": 0.0, "logprobs": 1},
    "top_p 0.9, processed logprobs 5": {"top_p": 0.9, **PROCESSED},
    "top_k 50, processed logprobs 5": {"top_k": 50, **PROCESSED},
}
"""The fields of all rows of a step."""
