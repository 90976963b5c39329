"""Faults of the adapters for engines that bring their own servers."""

from tests.faults.fault import Fault

RUNNERS = "tests/integrations/test_vllm_runners.py::"
STEPS = "tpsample/integrations/vllm_steps.py"

SERVERS = [
    Fault(
        "a row without a token goes on in vLLM",
        STEPS,
        "return torch.where(failed, rows.ends, token_ids)",
        "return token_ids",
        (f"{RUNNERS}test_a_row_of_nan_ends_its_request_and_no_other",),
    ),
    Fault(
        "tokens in the middle of a prompt count as output in vLLM",
        STEPS,
        "rows.batch.append(out.token_ids.masked_fill(unfinished, -1))",
        "rows.batch.append(out.token_ids)",
        (f"{RUNNERS}test_rows_in_the_middle_of_their_prompt_count_nothing_and_fail_silently",),
    ),
    Fault(
        "a grammar of vLLM stays for the next step",
        STEPS,
        "rows.batch.grammar_bitmask, self.grammar = self.grammar, None",
        "rows.batch.grammar_bitmask = self.grammar",
        (f"{RUNNERS}test_grammars_reach_their_rows_once_in_runner_v1",),
    ),
    Fault(
        "chosen logprobs of vLLM stand behind the most likely",
        STEPS,
        "token_ids, values = token_ids.gather(1, index), values.gather(1, index)",
        "pass",
        (f"{RUNNERS}test_logprobs_stand_where_vllm_reads_them",),
    ),
    Fault(
        "vLLM takes hidden states twice",
        "tpsample/integrations/heads.py",
        "kept, self._kept = self._kept, None",
        "kept = self._kept",
        ("tests/integrations/test_vllm_head.py::test_what_was_handed_on_comes_back_once",),
    ),
    Fault(
        "a slot of vLLM keeps the request it had",
        "tpsample/integrations/vllm_v2.py",
        "self._joining[req_idx] = sampling_params",
        "self._joining.update({} if req_idx in self._requests else {req_idx: sampling_params})",
        (f"{RUNNERS}test_a_slot_that_is_given_to_another_request_is_loaded_anew",),
    ),
    Fault(
        "rows of an engine keep the order in which they joined",
        "tpsample/integrations/engine_rows.py",
        "[place[name] for name in names],",
        "sorted(place[name] for name in names),",
        (
            "tests/integrations/test_engine_rows.py::"
            "test_a_row_has_the_tokens_it_has_alone_however_the_batch_moves",
        ),
    ),
    Fault(
        "a mode of vLLM that would be wrong is not refused",
        "tpsample/integrations/vllm_modes.py",
        "for name, (asked, why) in REFUSED.items() if asked(runner)]",
        "for name, (asked, why) in [*REFUSED.items()][:2] if asked(runner)]",
        (
            "tests/integrations/test_vllm_params.py::"
            "test_a_mode_that_is_not_honoured_is_refused_by_name",
        ),
    ),
    Fault(
        "a request that has left its slot of vLLM stays",
        "tpsample/integrations/vllm_v2.py",
        "self.batch.free([slot for slot in self._requests if slot not in names])",
        "pass",
        (f"{RUNNERS}test_a_slot_is_free_once_its_request_has_left",),
    ),
    Fault(
        "SGLang's tensors are read for filters that no request has",
        "tpsample/integrations/sglang.py",
        'getattr(info, f"need_{name}_sampling") for name in filters',
        "True for name in filters",
        ("tests/integrations/test_sglang.py::test_a_step_reads_the_filters_that_requests_have",),
    ),
    Fault(
        "SGLang's head hands hidden states on to any sampler",
        "tpsample/integrations/sglang.py",
        "        if not self.armed:\n            return original(processor",
        "        if False:\n            return original(processor",
        (
            "tests/integrations/test_sglang.py::"
            "test_nothing_changes_in_a_server_with_another_backend",
        ),
    ),
    Fault(
        "a page calls unequal tokens equal",
        "tests/engines/verdicts.py",
        "return Verdict(what, not unequal, ",
        "return Verdict(what, True, ",
        ("tests/engines/test_engines.py::test_tokens_that_part_are_named_with_their_place",),
    ),
]
