"""Asks a server by the `openai` client, and writes its answers.

    python -m tests.engines.client URL OUT.json PART…

It runs in vLLM's environment. Parts: kinds; greedy; drafted (alone); processed; sixteen; more
(stream, n, stop, logprobs of a prompt, a refused field); masks (the ids that each token could be);
first masks (those of the first token, without seeds); adapter (with one of LoRA and without);
failing (one row has NaN); lost (a stream during which a worker is killed); fields (of vLLM's
requests, without asking).
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from openai import APIError, AsyncOpenAI

from benchmarks.engines.server import NAME
from tests.engines.asked import (
    DRAFTED,
    FAILING_SEED,
    GREEDY,
    KINDS,
    MASKED,
    NOTHING_LEFT,
    OPENAI,
    PROCESSED,
    SIXTEEN,
    TOKENS,
    Asked,
)
from tests.engines.lora import ADAPTER

Answer = dict[str, Any]


def arguments(asked: Asked) -> dict[str, Any]:
    """Return a request as arguments of the client."""
    body = {
        name: value for name, value in asked.items() if name not in (*OPENAI, "prompt", "model")
    }
    return {
        "model": asked.get("model", NAME),
        "messages": [{"role": "user", "content": asked["prompt"]}],
        **{name: value for name, value in asked.items() if name in OPENAI},
        "extra_body": {**body, "return_token_ids": True},
    }


async def ask(client: AsyncOpenAI, asked: Asked) -> Answer:
    """Return what a request was answered, or its error."""
    try:
        found = await client.chat.completions.create(**arguments(asked))
    except APIError as error:
        return {"error": str(error)}
    answer = found.model_dump()
    choices = [
        {
            "tokens": choice.get("token_ids"),
            "text": choice["message"]["content"],
            "finish": choice["finish_reason"],
            "logprobs": listed(choice.get("logprobs")),
        }
        for choice in answer["choices"]
    ]
    return {
        **choices[0],
        "choices": choices,
        "prompt_token_ids": answer.get("prompt_token_ids"),
        "prompt_logprobs": answer.get("prompt_logprobs"),
    }


def listed(logprobs: Any) -> Any:
    """Return per token its logprob, then those of the tokens listed with it."""
    if not logprobs or not logprobs.get("content"):
        return None
    return [
        [
            (one["token"], one["logprob"]),
            *((top["token"], top["logprob"]) for top in one["top_logprobs"]),
        ]
        for one in logprobs["content"]
    ]


async def together(client: AsyncOpenAI, asked: dict[str, Asked]) -> dict[str, Answer]:
    """Ask all at once."""
    answers = await asyncio.gather(*(ask(client, each) for each in asked.values()))
    return dict(zip(asked, answers, strict=True))


async def stream(client: AsyncOpenAI, asked: Asked) -> Answer:
    """Return the tokens of a stream, and in how many pieces they came."""
    tokens: list[int] = []
    pieces, text = 0, ""
    try:
        chunks = await client.chat.completions.create(**arguments(asked), stream=True)
        async for chunk in chunks:
            for choice in chunk.model_dump()["choices"]:
                text += choice["delta"].get("content") or ""
                tokens += choice.get("token_ids") or []
                pieces += 1
    except APIError as error:
        return {"error": str(error), "tokens": tokens, "text": text, "pieces": pieces}
    return {"tokens": tokens, "text": text, "pieces": pieces}


async def more(client: AsyncOpenAI) -> dict[str, Answer]:
    """The ways of asking that are not kinds of sampling."""
    first = KINDS["temperature"]
    found = {"stream": await stream(client, first)}
    whole = (await ask(client, first))["text"]
    found["stop"] = await ask(client, {**first, "stop": [whole[20:26]]})
    found["stop"]["whole"], found["stop"]["stopped_by"] = whole, whole[20:26]
    found["three of n"] = await ask(client, {**first, "seed": 50, "n": 3})
    for seed in (50, 51, 52):
        found[f"alone, seed {seed}"] = await ask(client, {**first, "seed": seed})
    found["prompt logprobs"] = await ask(client, {**KINDS["greedy"], "prompt_logprobs": 1})
    found["refused"] = await ask(client, {**first, "thinking_token_budget": 5})
    found["nothing left"] = await ask(client, {**first, **NOTHING_LEFT})
    found["still there"] = await ask(client, first)
    return found


async def failing(client: AsyncOpenAI) -> dict[str, Answer]:
    """Ask for a row that becomes NaN, beside others."""
    others = {name: KINDS[name] for name in ("greedy", "temperature", "top_p")}
    spoiled = {**KINDS["temperature"], "seed": FAILING_SEED, "logprobs": True, "max_tokens": TOKENS}
    found = await together(client, {**others, "NaN": spoiled})
    return {**found, "after": await ask(client, KINDS["temperature"])}


async def masks(client: AsyncOpenAI, *, first: bool = False) -> dict[str, Answer]:
    """Ask by token ids, four at a time, for the ids that each token could have been.

    Args:
        first: of the first token, without seeds: on a CPU vLLM's own server ends with them.
    """
    url = f"{str(client.base_url).removesuffix('/v1/')}/inference/v1/generate"

    def ask_one(asked: Asked) -> Answer:
        its = {**asked["sampling_params"], "logprobs": 0}
        if first:
            its = {name: its[name] for name in its if name != "seed"} | {"max_tokens": 1}
        body = json.dumps({**asked, "sampling_params": its}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                choice = json.load(answer)["choices"][0]
        except urllib.error.HTTPError as error:
            return {"error": error.read().decode()[:300]}
        return {"tokens": choice["token_ids"], "masks": choice["sampling_mask"]}

    found: dict[str, Answer] = {}
    for start in range(0, len(MASKED), 4):
        names = list(MASKED)[start : start + 4]
        answers = (asyncio.to_thread(ask_one, MASKED[name]) for name in names)
        found |= zip(names, await asyncio.gather(*answers), strict=True)
    return found


async def adapter(client: AsyncOpenAI) -> dict[str, dict[str, Answer]]:
    """Ask the same without an adapter of LoRA, then with it.

    On a CPU vLLM's own server gives all requests of a step the adapter of one of them.
    """
    asked = {name: KINDS[name] for name in ("greedy", "temperature", "top_p", "three penalties")}
    tuned = {name: {**each, "model": ADAPTER} for name, each in asked.items()}
    return {"without": await together(client, asked), "with": await together(client, tuned)}


async def alone(client: AsyncOpenAI) -> dict[str, Answer]:
    """Ask one by one, so that no other request decides how many drafts a step verifies."""
    return {name: await ask(client, each) for name, each in DRAFTED.items()}


async def lost(client: AsyncOpenAI) -> dict[str, Answer]:
    """Start a stream that is not over when a worker is killed."""
    return {
        "stream": await stream(client, {**KINDS["greedy"], "min_tokens": 400, "max_tokens": 400})
    }


async def fields(client: AsyncOpenAI) -> dict[str, Any]:
    """Hold the fields of vLLM's requests against those that the adapter knows; nobody is asked."""
    from vllm.sampling_params import SamplingParams

    from tpsample.integrations.vllm_params import LEFT_TO_VLLM, REFUSED, SAMPLED

    found, known = set(SamplingParams.__struct_fields__), {*SAMPLED, *LEFT_TO_VLLM, *REFUSED}
    return {"count": len(found), "unknown": sorted(found ^ known)}


PARTS: dict[str, Callable[[AsyncOpenAI], Awaitable[Any]]] = {
    "kinds": lambda client: together(client, KINDS),
    "greedy": lambda client: together(client, GREEDY),
    "drafted": lambda client: together(client, DRAFTED),
    "drafted alone": alone,
    "processed": lambda client: together(client, PROCESSED),
    "sixteen": lambda client: together(client, SIXTEEN),
    "more": more,
    "failing": failing,
    "masks": masks,
    "first masks": partial(masks, first=True),
    "fields": fields,
    "adapter": adapter,
    "lost": lost,
}


async def run(url: str, path: Path, parts: list[str]) -> None:
    """Ask part after part, and write the answers after each."""
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)
    found: dict[str, Any] = {}
    for part in parts:
        found[part] = await PARTS[part](client)
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
