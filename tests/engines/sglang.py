"""Asks SGLang, in processes of its own, what a vLLM server was asked.

    python -m tests.engines.sglang MODEL ANSWERS.json OUT.json RANKS

It runs in SGLang's environment (`environment.make_sglang`). TPSAMPLE_SGLANG changes SGLang
(`sglang_on_cpu/tpsample_on_cpu.py`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engines.asked import MASKED, TOKENS

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8, "sampling_seed": 1},
    "top_p": {"temperature": 0.9, "top_p": 0.9, "sampling_seed": 2},
}
"""Those kinds that the adapter for SGLang honours, as its arguments."""


WITH_MASKS = [name for name in MASKED if name.startswith(("top_k, prompt", "top_k, top_p, prompt"))]
"""Requests whose masks are compared with those of a vLLM server."""


def masks(engine: Any) -> dict[str, Any]:
    """Return the ids that each token of some requests could have been."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    async def ask(request: Any) -> Any:
        async for found in engine.tokenizer_manager.generate_request(request, None):
            last = found
        return last

    answers = {}
    for name in WITH_MASKS:
        params = dict(MASKED[name]["sampling_params"])
        params |= {"sampling_seed": params.pop("seed"), "ignore_eos": True}
        params["max_new_tokens"] = params.pop("max_tokens")
        request = GenerateReqInput(
            input_ids=MASKED[name]["token_ids"], sampling_params=params, return_sampling_mask=True
        )
        found = engine.loop.run_until_complete(ask(request))
        its = found["meta_info"]["output_token_sampling_mask"]
        answers[name] = {"tokens": found["output_ids"], "masks": [sorted(ids) for ids in its]}
    return answers


def main(model: Path, answers: Path, out: Path, ranks: int) -> None:
    """Write the tokens of each kind, for the prompts that the server made, and a refusal."""
    import sglang

    more: dict[str, Any] = {}
    if os.environ.get("TPSAMPLE_SGLANG") == "deterministic":
        more = {"enable_deterministic_inference": True, "sampling_backend": "tpsample"}
    engine = sglang.Engine(
        model_path=str(model),
        tp_size=ranks,
        device="cpu",
        attention_backend="torch_native",
        dtype="float32",
        mem_fraction_static=0.2,
        max_total_tokens=2048,
        max_running_requests=8,
        context_length=512,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        disable_radix_cache=True,
        skip_server_warmup=True,
        log_level="info",
        **more,
    )
    asked = json.loads(answers.read_text())["kinds"]
    prompts = [asked[name]["prompt_token_ids"] for name in ASKED]
    params = [{**each, "max_new_tokens": TOKENS} for each in ASKED.values()]
    refused = ""
    try:
        engine.generate(input_ids=prompts[0], sampling_params={"presence_penalty": 1.0})
    except ValueError as error:
        refused = str(error)
    found = engine.generate(input_ids=prompts, sampling_params=params)
    unseeded = {"temperature": 1.0, "max_new_tokens": TOKENS}
    both = [unseeded, {**unseeded, "sampling_seed": 42}]
    without, with_42 = engine.generate(input_ids=[prompts[0]] * 2, sampling_params=both)
    record = {
        "sglang": sglang.__version__,
        "refused": refused,
        "masks": masks(engine),
        "seed_is_42": without["output_ids"] == with_42["output_ids"],
        "tokens": {n: f["output_ids"][:TOKENS] for n, f in zip(ASKED, found, strict=True)},
    }
    out.write_text(json.dumps(record))
    engine.shutdown()


if __name__ == "__main__":
    *paths, ranks = sys.argv[1:]
    model, answers, out = map(Path, paths)
    main(model, answers, out, int(ranks))
