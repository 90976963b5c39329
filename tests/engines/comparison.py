"""The servers, the requests that each is asked, and the answers that are compared."""

from __future__ import annotations

import json
import os
from typing import Any

from benchmarks.engines.server import Kind
from benchmarks.lab.machine import ROOT
from tests.engines import verdicts
from tests.engines.asked import DRAFTED, GREEDY, KINDS, PROCESSED, SIXTEEN
from tests.engines.lora import ADAPTER
from tests.engines.on_hosts import obstacle
from tests.engines.verdicts import Answers, Verdict

WATCHED, WATCHED_PLAIN = "tests.engines.workers.Watched", "tests.engines.workers.Plain"
"""The adapter's worker, whose tokens are compared with the oracle; vLLM's, whose traffic counts."""


def _drafts(method: str, **settings: Any) -> tuple[str, str]:
    """Return the option of three drafts a step."""
    its = {"method": method, "num_speculative_tokens": 3, **settings}
    return "--speculative-config", json.dumps(its)


BY_N_GRAMS = _drafts("ngram", prompt_lookup_min=1, prompt_lookup_max=3)
"""The drafter looks for the last tokens in the text."""
LIKELY = _drafts("draft_model", model="{model}")
"""The drafter is the model itself, and takes its most likely tokens."""
DRAWN = _drafts("draft_model", model="{model}", draft_sample_method="probabilistic")
"""The drafter is the model itself, and draws as the target does."""
KNOWN = _drafts("eagle", model="{model}/eagle", draft_sample_method="probabilistic")
"""The drafter is a head of EAGLE that knows the answers, in a folder of the model."""
V2_ON_CPU = (
    ("PYTHONPATH", f"{ROOT / 'tests' / 'engines' / 'v2_on_cpu'}{os.pathsep}{ROOT}"),
    ("VLLM_USE_V2_MODEL_RUNNER", "1"),
    ("TRITON_INTERPRET", "1"),
    ("TORCHDYNAMO_DISABLE", "1"),
)
"""Variables of vLLM's model runner V2, whose kernels run in Triton's interpreter."""

SCREENED = "--additional-config", '{"tpsample": {"screening": "int8"}}'
"""A server reads an 8-bit copy of the head first, and has the same tokens as the others."""
V1_TP2 = Kind("V1, 2 ranks", 2, WATCHED)
V1_TP1 = Kind("V1, 1 rank", 1, WATCHED, SCREENED)
V1_HOSTS = Kind("V1, 2 hosts", 2, WATCHED)
PLAIN = Kind("vLLM itself, 2 ranks", 2, WATCHED_PLAIN)
V1_LATER, V1_COUNTS = (
    Kind(f"V1 {what}, 1 rank", 1, f"tests.engines.changed_workers.{name}")
    for what, name in (
        ("of a later version", "Later"),
        ("that counts otherwise", "CountsOtherwise"),
    )
)
"""A vLLM that is changed; the second one is to answer nothing."""
DRAFTS_TP2 = Kind("V1 with drafts, 2 ranks", 2, WATCHED, BY_N_GRAMS)
DRAFTS_TP1 = Kind("V1 with drafts, 1 rank", 1, WATCHED, BY_N_GRAMS)
V2_TP2 = Kind("V2, 2 ranks", 2, WATCHED, variables=V2_ON_CPU)
V2_TP1 = Kind("V2, 1 rank", 1, WATCHED, variables=V2_ON_CPU)
N_GRAMS_V2 = Kind("V2 with drafts by n-grams, 1 rank", 1, WATCHED, BY_N_GRAMS, V2_ON_CPU)
LIKELY_TP1 = Kind("V2 with likely drafts of a model, 1 rank", 1, WATCHED, LIKELY, V2_ON_CPU)
DRAWN_TP2 = Kind("V2 with drawn drafts of a model, 2 ranks", 2, WATCHED, DRAWN, V2_ON_CPU)
EAGLE_TP2 = Kind("V2 with drawn drafts of EAGLE, 2 ranks", 2, WATCHED, KNOWN, V2_ON_CPU)
BY_RATIO = tuple(
    Kind(
        f"V2 with drafts verified by a ratio, {ranks}",
        int(ranks[0]),
        WATCHED,
        (*DRAWN, "--additional-config", '{"tpsample": {"verification": "rejection"}}'),
        V2_ON_CPU,
    )
    for ranks in ("1 rank", "2 ranks")
)
"""Servers whose texts follow the target's law, and are not those without drafts. They depend on how
many drafts a step verifies."""
DRAFTING = (DRAFTS_TP2, DRAFTS_TP1, N_GRAMS_V2, LIKELY_TP1, DRAWN_TP2, EAGLE_TP2, *BY_RATIO)
"""The servers with drafts."""
WITH_MASKS = (
    *("--return-sampling-mask", "--logprobs-mode", "processed_logprobs"),
    "--enable-scale-out",  # requests of token ids, which alone are answered with masks
)
PLUG_IN = ("--additional-config", '{"tpsample": {"exchange": "p2p"}}')
IN_ANY_WAY = ("--additional-config", '{"tpsample": {}}')
PLUG_IN_TP2 = Kind("V1 by the plug-in, 2 ranks", 2, None, PLUG_IN)
PLUG_IN_V2 = Kind("V2 by the plug-in, 1 rank", 1, None, IN_ANY_WAY, V2_ON_CPU)
LORA_TP2 = Kind(
    "V1 with LoRA on attention layers, 2 ranks",
    2,
    WATCHED,
    (
        *("--enable-lora", "--lora-target-modules", "q_proj", "v_proj"),
        *("--lora-modules", f"{ADAPTER}={{model}}/{ADAPTER}"),
    ),
)
PROCESSORS = (
    *("--logits-processors", "tests.engines.processors:Bans"),
    *("--logprobs-mode", "processed_logprobs"),
)
PROCESSED_TP1, PROCESSED_TP2 = (
    Kind(
        f"V2 with a processor, {ranks}", int(ranks[0]), None, (*IN_ANY_WAY, *PROCESSORS), V2_ON_CPU
    )
    for ranks in ("1 rank", "2 ranks")
)
PLAIN_PROCESSED = Kind(
    "vLLM itself with a processor, 2 ranks", 2, WATCHED_PLAIN, PROCESSORS, V2_ON_CPU
)
MASKS_TP2 = Kind("V2 with masks, 2 ranks", 2, WATCHED, WITH_MASKS, V2_ON_CPU)
MASKS_TP1 = Kind("V2 with masks, 1 rank", 1, WATCHED, WITH_MASKS, V2_ON_CPU)
PLAIN_MASKS = Kind("vLLM itself with masks, 2 ranks", 2, WATCHED_PLAIN, WITH_MASKS, V2_ON_CPU)
HF = "transformers"
LATER, CHANGED = "SGLang of a later version, 1 rank", "SGLang that counts otherwise, 1 rank"
DETERMINISTIC = "SGLang in deterministic inference, 1 rank"
ENGINES = {
    HF: 1,
    "SGLang, 1 rank": 1,
    "SGLang, 2 ranks": 2,
    LATER: 1,
    CHANGED: 1,
    DETERMINISTIC: 1,
}
"""Other engines that are asked the same, and their ranks."""
CHANGES = {LATER: "later", CHANGED: "counts", DETERMINISTIC: "deterministic"}
"""Those that `sglang_on_cpu` changes, and how."""

PARTS = {
    V1_TP2: ("kinds", "greedy", "sixteen", "more", "failing"),
    V1_TP1: ("kinds", "sixteen", "fields"),
    V1_HOSTS: ("kinds",),
    PLAIN: ("greedy",),
    V2_TP2: ("kinds", "more", "failing"),
    V2_TP1: ("kinds",),
    **dict.fromkeys(DRAFTING, ("drafted",)),
    **dict.fromkeys(BY_RATIO, ("drafted alone",)),
    MASKS_TP2: ("masks", "first masks"),
    MASKS_TP1: ("masks",),
    PLAIN_MASKS: ("first masks",),
    PROCESSED_TP1: ("processed",),
    PROCESSED_TP2: ("processed", "greedy"),
    PLAIN_PROCESSED: ("greedy",),
    PLUG_IN_TP2: ("kinds",),
    PLUG_IN_V2: ("kinds",),
    LORA_TP2: ("adapter",),
    V1_LATER: ("kinds",),
    V1_COUNTS: (),
}
"""Parts of the requests that each server gets."""
VOCAB_SIZE = 49152


def watched(kind: Kind) -> bool:
    """Return whether tokens come from tpsample, and the oracle looks on."""
    return kind.worker == WATCHED or kind is V1_LATER


def sampled_by(kind: Kind) -> str:
    """Return whose tokens a server's are."""
    plug_ins = PLUG_IN_TP2, PLUG_IN_V2, PROCESSED_TP1, PROCESSED_TP2
    return "tpsample" if watched(kind) or kind in plug_ins else "vLLM"


def compare(answers: Answers, seen: dict[str, list[dict[str, Any]]]) -> list[Verdict]:
    """Compare all that was answered.

    Args:
        answers: by server and part; those of other engines by their names.
        seen: what the workers of each server saw.
    """
    found, main = _masks(answers, seen), answers.get(V1_TP2.name)
    if main is None:
        return [*found, Verdict("a server with tpsample on 2 ranks", None, "it did not answer")]
    kinds = main["kinds"]

    def same(other: str, tokens: Answers | None, names: Any, own: Answers = kinds) -> None:
        what = f"{V1_TP2.name} and {other}: the same tokens"
        if tokens is None:
            why = obstacle() if other == V1_HOSTS.name else ""
            found.append(Verdict(what, None, why or "it was not run"))
        else:
            found.append(verdicts.equal_tokens(what, own, tokens, names))

    for kind in (V1_TP1, V1_HOSTS, V1_LATER, V2_TP2, V2_TP1, PLUG_IN_TP2, PLUG_IN_V2):
        same(kind.name, answers.get(kind.name, {}).get("kinds"), KINDS)
    same(f"{PLAIN.name}, greedy", answers.get(PLAIN.name, {}).get("greedy"), KINDS, main["greedy"])
    if V1_TP1.name in answers:
        one = answers[V1_TP1.name]
        what = "16 at once: the same tokens on 1 and 2 ranks"
        found.append(verdicts.equal_tokens(what, main["sixteen"], one["sixteen"], SIXTEEN))
        found.append(verdicts.known_fields(one["fields"]))
        what = "logprobs on 1 and 2 ranks"
        found.append(verdicts.equal_logprobs(what, kinds, one["kinds"]))
    if LORA_TP2.name in answers:
        adapter = answers[LORA_TP2.name]["adapter"]
        same(LORA_TP2.name, adapter["without"], adapter["without"])
        found.append(verdicts.tuned(LORA_TP2.name, adapter))
    for kind in DRAFTING:
        part = answers.get(kind.name, {})
        if kind in BY_RATIO:  # the most likely token is the target's by either rule
            same(kind.name, part.get("drafted alone"), ("greedy",))
        else:
            same(kind.name, part.get("drafted"), DRAFTED)
        if part:
            found.append(verdicts.accepted(kind.name, part["counts"]))
        if part and kind not in BY_RATIO:
            what = f"logprobs of {V1_TP2.name} and {kind.name}"
            found.append(verdicts.equal_logprobs(what, kinds, part["drafted"]))
    one, two = (answers.get(kind.name, {}).get("drafted alone") for kind in BY_RATIO)
    if one and two:
        what = "drafts verified by a ratio: the same tokens on 1 and 2 ranks"
        found.append(verdicts.equal_tokens(what, one, two, DRAFTED))
    two = answers.get(PROCESSED_TP2.name)
    if two:
        for other, part, names in (
            (PROCESSED_TP1, "processed", PROCESSED),
            (PLAIN_PROCESSED, "greedy", GREEDY),
        ):
            if its := answers.get(other.name, {}).get(part):
                what = f"{PROCESSED_TP2.name} and {other.name}: the same tokens"
                found.append(verdicts.equal_tokens(what, two[part], its, names))
        found.append(verdicts.nothing_banned(PROCESSED_TP2.name, two["processed"]))
    for name in ENGINES:
        if name == CHANGED:  # it is to answer nothing
            continue
        part = answers.get(name, {"tokens": {}})
        tokens = {kind: {"tokens": ids} for kind, ids in part["tokens"].items()}
        same(name, tokens or None, tokens)
        if "refused" in part:
            what = f"{name}: a field that is not honoured is refused at its door"
            held = "presence_penalty" in part["refused"]
            found.append(Verdict(what, held, part["refused"]))
    found += verdicts.kinds_as_asked(kinds, main["sixteen"])
    found += verdicts.ways_of_asking(main["more"], kinds)
    found += verdicts.one_row_fails(main["failing"], kinds)
    if V2_TP2.name in answers:
        second = answers[V2_TP2.name]
        for verdict in [
            *verdicts.ways_of_asking(second["more"], second["kinds"]),
            *verdicts.one_row_fails(second["failing"], second["kinds"]),
        ]:
            found.append(Verdict(f"V2: {verdict.what}", verdict.held, verdict.found))
    for kind in PARTS:
        if kind.name in seen and watched(kind) and kind not in DRAFTING:
            found.append(verdicts.oracle(kind.name, seen[kind.name]))
        if seen.get(kind.name) and kind.world_size > 1:
            shard = VOCAB_SIZE // kind.world_size
            its = seen[kind.name]
            found.append(verdicts.gathered(kind.name, its, shard, expected=not watched(kind)))
    return found


def _masks(answers: Answers, seen: dict[str, list[dict[str, Any]]]) -> list[Verdict]:
    """Compare the sets of ids that servers say their tokens were drawn from."""
    found, its = [], answers.get(MASKS_TP2.name, {})
    for part, other in (("masks", MASKS_TP1), ("first masks", PLAIN_MASKS)):
        what = f"{MASKS_TP2.name} and {other.name}: the same sets"
        others = answers.get(other.name, {}).get(part)
        found.append(verdicts.equal_masks(what, its.get(part), others))
    for name in ENGINES:
        if sets := answers.get(name, {}).get("masks"):
            vllm = its.get("masks")
            those = vllm and {n: vllm.get(n, {}) for n in sets}
            what = f"{MASKS_TP2.name} and {name}: the same sets"
            found.append(verdicts.equal_masks(what, those, sets))
    if MASKS_TP2.name in seen:
        found.append(verdicts.sets_of_the_definition(MASKS_TP2.name, seen[MASKS_TP2.name]))
    return found


def texts(answers: Answers) -> dict[str, dict[str, str]]:
    """Return the text of some requests by engine, where they are of one seed."""
    found: dict[str, dict[str, str]] = {}
    for name in ("temperature", "top_p"):
        for kind, parts in PARTS.items():
            part = next((each for each in ("kinds", "drafted") if each in parts), None)
            if watched(kind) and kind.name in answers and part is not None:
                text = answers[kind.name][part][name].get("text", "an error")
                found.setdefault(name, {})[f"vLLM {kind.name}"] = text
        own = answers.get(V1_TP2.name, {}).get("kinds", {}).get(name, {})
        for engine in ENGINES:
            tokens = answers.get(engine, {}).get("tokens", {}).get(name)
            if tokens is not None and own:
                same = tokens == own["tokens"]
                found[name][engine] = own["text"] if same else f"ids {tokens}"
    return found
