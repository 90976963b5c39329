"""Verdicts: each says what was compared, and whether it held.

A comparison takes answers and returns a `Verdict`; nothing here talks to a server.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.engines.asked import BANNED, KINDS, SIXTEEN, TOKENS

Answers = dict[str, Any]


@dataclass
class Verdict:
    """One line of the page.

    Attributes:
        held: None if it was not run.
        found: what was seen, such as "10 of 10 requests equal".
    """

    what: str
    held: bool | None
    found: str


def equal_tokens(what: str, first: Answers, second: Answers, names: Any) -> Verdict:
    """Compare the tokens of requests that two servers answered."""
    unequal = [name for name in names if _tokens(first, name) != _tokens(second, name)]
    told = [f"{name} parts at {_parting(first, second, name)}" for name in unequal]
    count = len(list(names))
    found = f"{count - len(unequal)} of {count} requests equal"
    return Verdict(what, not unequal, "; ".join([found, *told]))


def equal_logprobs(what: str, first: Answers, second: Answers) -> Verdict:
    """Compare the logprobs that two servers reported, up to the order of a sum in fp32.

    Args:
        first: has every request that the second has.
    """
    largest, count = 0.0, 0
    for name in second:
        for one, other in zip(
            first[name].get("logprobs") or [], second[name].get("logprobs") or [], strict=True
        ):
            for (token, value), (token_2, value_2) in zip(one, other, strict=True):
                if token != token_2:
                    return Verdict(what, False, f"{name}: {token!r} beside {token_2!r}")
                largest, count = max(largest, abs(value - value_2)), count + 1
    return Verdict(what, largest < 1e-3 and count > 0, f"{count} logprobs within {largest:.1e}")


def equal_masks(what: str, first: Answers | None, second: Answers | None) -> Verdict:
    """Compare the sets of ids that two servers say each token was drawn from.

    Trunks on other numbers of ranks sum in another order. So one id in a thousand, of a large set,
    may be in one and not in the other; whether each is the definition's is another verdict.
    """
    if first is None or second is None:
        return Verdict(what, None, "it was not run")
    unequal, every, near = [], list[set[int]](), 0
    for name, one in first.items():
        its, others = (each.get("masks") or [] for each in (one, second[name]))
        pairs = [(set(a), set(b)) for a, b in zip(its, others, strict=False) if a != b]
        if not its or len(its) != len(others) or any(1000 * len(a ^ b) > len(a) for a, b in pairs):
            unequal.append(f"{name}: {one.get('error', '') or second[name].get('error', '')}")
        every += map(set, its)
        near += len(pairs)
    ids = sum(map(len, every))
    found = f"{len(every)} sets of {ids} ids, unequal in {len(unequal)} of {len(first)} requests"
    found += f"; {near} differ at most by one id in a thousand" * (near > 0 and not unequal)
    return Verdict(what, not unequal and bool(every), "; ".join([found, *unequal]))


def sets_of_the_definition(name: str, seen: list[dict[str, Any]]) -> Verdict:
    """Look at the sets that rank 0 held against the definition."""
    sets, unequal = (seen[0].get(name, 0) for name in ("sets", "unequal_sets"))
    return Verdict(
        f"every set of {name} is the definition's, from the hidden states of its step",
        bool(sets and not unequal),
        f"{sets - unequal} of {sets} sets",
    )


def known_fields(fields: dict[str, Any]) -> Verdict:
    """Say whether the adapter knows every field of vLLM's requests."""
    return Verdict(
        "every field of vllm.SamplingParams is honoured, left to vLLM or refused",
        not fields["unknown"],
        f"{fields['count']} fields, unknown: {', '.join(fields['unknown']) or 'none'}",
    )


def ways_of_asking(more: Answers, kinds: Answers) -> list[Verdict]:
    """Look at what is not a kind of sampling: streams, n, stop strings, refusals."""
    whole, stream, stop = kinds["temperature"], more["stream"], more["stop"]
    alone = [_tokens(more, f"alone, seed {seed}") for seed in (50, 51, 52)]
    of_n = [choice["tokens"] for choice in more["three of n"].get("choices", [])]
    prompt = [one for one in more["prompt logprobs"].get("prompt_logprobs") or [] if one]
    refused = more["refused"].get("error", "")
    before = stop["whole"].split(stop["stopped_by"])[0]
    return [
        Verdict(
            "a stream has the tokens of the whole answer",
            stream["tokens"] == whole["tokens"] and stream["pieces"] > TOKENS // 2,
            f"{len(stream['tokens'])} tokens in {stream['pieces']} pieces",
        ),
        Verdict(
            "n = 3 with a seed has the tokens of three seeds alone",
            len(of_n) == 3 and of_n == alone,
            f"{sum(a == b for a, b in zip(of_n, alone, strict=False))} of 3 equal",
        ),
        Verdict(
            "a stop string ends the text before it",
            stop["text"] == before and stop["finish"] == "stop",
            f"{stop['text']!r}, {stop['finish']}",
        ),
        Verdict(
            "logprobs of a prompt",
            len(prompt) > 10 and all(len(one) in (1, 2) for one in prompt),
            f"{len(prompt)} positions",
        ),
        Verdict(
            "a field that is not honoured is refused by name, and the server goes on",
            "thinking_token_budget" in refused and _tokens(more, "still there") == whole["tokens"],
            refused[:120],
        ),
        nothing_left(more["nothing left"]),
    ]


def nothing_left(answer: Answers) -> Verdict:
    """Say whether a row whose grammar and masks forbid every token ended as the page says."""
    said = str(answer.get("error") or answer)
    return Verdict(
        "a row that a grammar leaves no token ends with status 500", "code: 500" in said, said[:120]
    )


NOTICED = {
    "tpsample": "PeerLost: exchange: rank 1 did not answer",
    "the trunk's gloo": "/gloo/transport/",
    "vLLM's monitor": "Worker proc VllmWorker-1 died",
}
"""Parts of the lines by which a log says that rank 1 was lost, by who wrote it."""


def lost(log: str, code: int | None, took_s: float, stream: Answers) -> list[Verdict]:
    """Look at what became of a server whose rank 1 was killed in the middle of a stream.

    The first that notices ends the engine, so which of the lines are there is a race.

    Args:
        code: exit code of the server, None if it still runs.
        stream: what the client was answered.
    """
    told = [
        f"{who}: {part}{log.partition(part)[2].splitlines()[0][:100]}"
        for who, part in NOTICED.items()
        if part in log
    ]
    return [
        Verdict(
            "a killed worker ends the server",
            code is not None,
            "it still runs" if code is None else f"exit code {code} after {took_s:.0f} s",
        ),
        Verdict(
            "the client's stream ends with an error",
            "error" in stream,
            f"{stream.get('error', 'none')} after {stream.get('pieces', 0)} pieces",
        ),
        Verdict("the log says that a rank is lost", bool(told), "; ".join(told) or "nothing"),
    ]


def told_of_the_sampler(log: str) -> Verdict:
    """Look for the line by which a worker says who samples, with the exchange that was asked."""
    lines = [line for line in log.splitlines() if "samples, not vLLM: LMHeadSampler(" in line]
    right = [line for line in lines if "exchange='p2p'" in line]
    return Verdict(
        "both workers of the plug-in say that tpsample samples, by the option's exchange",
        len(right) == len(lines) == 2,
        f"{len(right)} of {len(lines)} lines: {lines[0][-160:] if lines else 'none'}",
    )


def told_of_the_first_step(name: str, log: str, ranks: int) -> Verdict:
    """Look for the line by which each worker says that it compared a step before it served."""
    count = log.count("requests returned the definition's tokens")
    what = f"each worker of {name} compared a first step before it served"
    return Verdict(what, count == ranks, f"{count} lines, {ranks} ranks")


def told_of_a_later_version(name: str, log: str, version: str) -> Verdict:
    """Look for the line by which an adapter warns of a version that was not tried."""
    part = f"was tried, {version} is installed; it serves if its first step passes the self-test"
    return Verdict(f"{name} starts with a warning", part in log, part if part in log else "none")


def refused_by_the_first_step(name: str, log: str, *, ended: bool) -> Verdict:
    """Look for the reason for which an engine does not start."""
    lines = [line for line in log.splitlines() if "self-test: a step of" in line]
    held = ended and any("the definition has" in line for line in lines)
    return Verdict(f"{name} does not start, and says why", held, lines[0] if lines else "no line")


def told_of_determinism(name: str, log: str, answers: Answers) -> Verdict:
    """See that deterministic inference keeps the sampler, and gives its seed to a request."""
    line = "tpsample samples in deterministic inference, too"
    return Verdict(
        f"{name}: tpsample stays, and a request without a seed has 42",
        line in log and answers["seed_is_42"],
        f"{log.count(line)} lines; the text of seed 42: {answers['seed_is_42']}",
    )


def nothing_banned(name: str, processed: Answers) -> Verdict:
    """See that no token is one that the processor forbids."""
    tokens = [token for each in processed for token in _tokens(processed, each) or [0]]
    wrong = sum(token % BANNED == 0 for token in tokens)
    return Verdict(f"{name}: no id that it forbids", not wrong, f"{wrong} of {len(tokens)} tokens")


def tuned(name: str, adapter: dict[str, Answers]) -> Verdict:
    """See that an adapter's requests have texts of their own; the oracle holds their tokens."""
    changed = [
        each
        for each in adapter["with"]
        if _tokens(adapter["with"], each) not in (None, _tokens(adapter["without"], each))
    ]
    count = len(adapter["with"])
    what = f"{name}: requests with the adapter are answered, by another model"
    return Verdict(what, len(changed) == count, f"{len(changed)} of {count} texts differ")


def kinds_as_asked(kinds: Answers, sixteen: Answers) -> list[Verdict]:
    """Look at what each kind of request promises by itself."""
    try:
        person = json.loads(kinds["json schema"]["text"])
        valid = set(person) == {"name", "age"} and isinstance(person["age"], int)
    except (TypeError, ValueError):
        person, valid = kinds["json schema"]["text"], False
    allowed = set(KINDS["allowed_token_ids"]["allowed_token_ids"])
    outside = [i for i in _tokens(kinds, "allowed_token_ids") or [-1] if i not in allowed]
    words = kinds["min_tokens, bad_words"]
    listed = kinds["logit_bias, chosen logprobs"].get("logprobs") or [[]]
    distinct = {tuple(_tokens(sixteen, name) or ()) for name in SIXTEEN}
    return [
        Verdict("the JSON is one of the schema", valid, repr(person)),
        Verdict("only allowed ids are drawn", not outside, f"{len(outside)} others"),
        Verdict(
            "min_tokens and bad_words",
            len(words["tokens"]) >= 20 and " gravity" not in words["text"],
            f"{len(words['tokens'])} tokens",
        ),
        Verdict(
            "chosen ids have their logprobs",
            all(len(one) >= 4 for one in listed),
            f"{len(listed[0])} per token, the drawn one's first",
        ),
        Verdict(
            "16 at once, each with its own seed",
            len(distinct) == 16,
            f"{len(distinct)} different texts",
        ),
    ]


def one_row_fails(failing: Answers, kinds: Answers) -> list[Verdict]:
    """Look at a batch in which one row became NaN."""
    others = ("greedy", "temperature", "top_p")
    spoiled = failing["NaN"]
    return [
        equal_tokens("beside a row that is NaN the others are as ever", failing, kinds, others),
        Verdict(
            "the row that is NaN ends, and the server goes on",
            spoiled.get("finish") == "stop"
            and len(spoiled["tokens"]) < TOKENS
            and _tokens(failing, "after") == _tokens(kinds, "temperature"),
            f"{len(spoiled.get('tokens') or [])} tokens, {spoiled.get('finish')}",
        ),
    ]


def accepted(name: str, counts: dict[str, float]) -> Verdict:
    """Say whether drafts were made and accepted, without which nothing was verified."""
    drafted, taken = counts["drafted"], counts["accepted"]
    return Verdict(
        f"{name}: drafts are accepted", 0 < taken <= drafted, f"{taken:.0f} of {drafted:.0f} drafts"
    )


def oracle(name: str, seen: list[dict[str, Any]]) -> Verdict:
    """Look at what rank 0 found when it held each step against the definition."""
    first = seen[0]
    return Verdict(
        f"every token of {name} is the oracle's, from the hidden states of its step",
        bool(first["oracle"] and first["rows"] and not first["unequal"]),
        f"{first['rows'] - first['unequal']} of {first['rows']} rows in {first['steps']} steps",
    )


def gathered(name: str, seen: list[dict[str, Any]], shard: int, *, expected: bool) -> Verdict:
    """Say whether a tensor with an axis as large as a shard of the vocabulary crossed ranks."""
    axes = {
        collective: count["largest_axis"]
        for rank in seen
        for collective, count in rank["traffic"].items()
    }
    large = {collective: axis for collective, axis in axes.items() if axis >= shard}
    biggest = max(axes, key=lambda collective: axes[collective])
    return Verdict(
        f"{name}: {'the' if expected else 'no'} logits cross ranks (axes from {shard} on)",
        bool(large) is expected,
        ", ".join(f"{each}: {axis}" for each, axis in large.items())
        or f"the largest axis is {axes[biggest]} ({biggest})",
    )


def _tokens(answers: Answers, name: str) -> list[int] | None:
    found = answers.get(name, {}).get("tokens")
    return None if found is None else list(found)


def _parting(first: Answers, second: Answers, name: str) -> str:
    one, other = _tokens(first, name), _tokens(second, name)
    if one is None or other is None:
        error = first.get(name, {}).get("error") or second.get(name, {}).get("error")
        return f"an error: {str(error)[:120]}"
    pairs = zip(one, other, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    return f"token {at} of {len(one)} and {len(other)}"
