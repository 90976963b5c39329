"""The requests that every server is asked."""

from __future__ import annotations

from typing import Any

TOKENS = 24
FAILING_SEED = 666_666
"""A request with this seed gets NaN hidden states in a late step, from the watched worker."""
FAILING_STEP = 6
LATER_VLLM = "0.99.0"
"""A version of vLLM that nobody has tried, of `changed_workers`."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["name", "age"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
    },
}

Asked = dict[str, Any]


def _ask(prompt: str, **options: Any) -> Asked:
    return {"prompt": prompt, "max_tokens": TOKENS, **options}


KINDS: dict[str, Asked] = {
    "greedy": _ask("Why is the sky blue?", temperature=0),
    "temperature": _ask("Name three fruits.", temperature=0.8, seed=1),
    "top_p": _ask("Tell me a short story about a fox.", temperature=0.9, top_p=0.9, seed=2),
    "top_k, top_p, logprobs": _ask(
        "What is 12 times 12?", top_k=20, top_p=0.95, seed=3, logprobs=True, top_logprobs=2
    ),
    "min_p": _ask("Write a haiku about rain.", temperature=0.7, min_p=0.05, seed=4),
    "three penalties": _ask(
        "Who wrote Hamlet?",
        temperature=0.8,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        seed=5,
    ),
    "logit_bias, chosen logprobs": _ask(
        "List the planets.",
        temperature=0.8,
        logit_bias={"28": -100, "30": 2},
        seed=6,
        logprobs=True,
        logprob_token_ids=[28, 30, 260],
    ),
    "min_tokens, bad_words": _ask(
        "Explain gravity to a child in two sentences.",
        min_tokens=20,
        bad_words=["the", "gravity"],
        seed=7,
    ),
    "allowed_token_ids": _ask("Is water wet?", allowed_token_ids=list(range(300, 700)), seed=8),
    "json schema": _ask(
        "Reply with JSON: a person with a name and an age.",
        temperature=0.6,
        seed=9,
        max_tokens=40,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
        },
    ),
}
"""One request of each kind; they are asked all at once."""

NOTHING_LEFT: Asked = {
    "structured_outputs": {"regex": "[0-9]{3}"},
    "allowed_token_ids": [5000],
}
"""A grammar and a mask that have no token in common."""

GREEDY: dict[str, Asked] = {
    name: _ask(each["prompt"], temperature=0) for name, each in KINDS.items()
}
"""The requests that vLLM's own sampler is asked for comparison; on a CPU its server ends when a
request with a seed is in the middle of its prompt."""

DRAFTED: dict[str, Asked] = {
    name: each for name, each in KINDS.items() if not {"min_p", "logit_bias"} & each.keys()
}
"""The kinds that vLLM takes beside drafts."""

PROCESSED: dict[str, Asked] = {
    name: each for name, each in KINDS.items() if "response_format" not in each
}
"""The kinds that a processor leaves a token, whatever came before."""

BANNED = 3
"""A processor forbids the multiples of this id."""

SIXTEEN: dict[str, Asked] = {
    f"seed {seed}": _ask("Say something surprising.", temperature=1.0, seed=seed, max_tokens=16)
    for seed in range(100, 116)
}
"""Sixteen at once, of one prompt."""

_FILTERS: dict[str, Asked] = {
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_k, top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "large top_k, top_p": {"temperature": 1.0, "top_k": 5000, "top_p": 0.95},
    "min_p, penalty": {"top_k": 40000, "min_p": 0.001, "repetition_penalty": 1.3},
    "allowed ids": {"top_k": 4, "allowed_token_ids": [300, 310, 320, 330, 340, 350]},
    "all ids": {"top_k": 49152},
}
MASKED: dict[str, Asked] = {
    f"{name}, prompt {number}": {
        "token_ids": [(7919 * (number + 1) * (i + 3)) % 40000 + 500 for i in range(9 + number)],
        "sampling_params": {**filters, "seed": 31 * number + place, "max_tokens": 4},
    }
    for place, (name, filters) in enumerate(_FILTERS.items())
    for number in range(4)
}
"""Requests of token ids, whose answers say from which ids each token was drawn."""

HUGGING_FACE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top_p": {"temperature": 0.9, "top_p": 0.9, "seed": 2},
    "top_k, top_p, logprobs": {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "seed": 3},
    "min_p": {"temperature": 0.7, "min_p": 0.05, "seed": 4},
}
"""Those kinds that `generate` of transformers has too, as its arguments."""

OPENAI = (
    *("temperature", "top_p", "seed", "max_tokens", "logprobs", "top_logprobs", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "response_format", "stop", "n"),
)
"""Arguments of the `openai` client; all others go into its `extra_body`."""
