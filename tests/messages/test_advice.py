"""Advice is right: a test does what each says. Advice is found by reading the source.

A text is advice if a clause of it begins with a verb that tells the reader to do something.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tpsample
from tests.faults.fault import name_of_test
from tests.support.pasted import options_of

FOLLOWED: dict[str, tuple[str, ...]] = {
    # --- arguments, as every test of a sampler passes them
    "test_small_integers_give_identical_tokens": (
        *("convert it once with .to", "convert with .to(", "call .contiguous()", "pass .T of it"),
        *("build the sampler of lm_head_weight.T", "got a DTensor; pass", "pass that of the"),
        *("call it as sampler(", "call SamplingBatch.from_params(", "give float(…) of it"),
        *("build the sampler after the weights", "shard=, or pass .T.contiguous()"),
        *("see SamplingBatch.from_params", "pass one SamplingParams per row", "build a new"),
        "pass [params] * B, or params.fork",
        *("build it with device=", "build the sampler with a larger", 'use backend="auto"'),
        *(
            "no column; leave it out",
            "leave out the positions",
            "did you mean",
        ),
    ),
    "test_a_weight_that_was_not_sliced_is_refused": ("pass each rank its own rows",),
    "test_a_copy_of_a_model_samples_with_its_own_weights": (
        *("pass its logits to sample_logits", "adds its bias before", "leave bias= out"),
        *("build another over the copied", "save the weight, and build"),
    ),
    "test_the_next_step_reads_what_took_the_weights_place": (
        *("in each step; assign that", "^pass another weight to refresh"),
    ),
    "test_the_first_row_without_a_token_is_told_of": ("look at out.status, or build the",),
    "test_hidden_states_that_differ_are_told_in_the_first_steps": (
        *("look for a missing all-reduce", "call refresh() and reset() on"),
    ),
    "test_a_process_that_has_peers_does_not_sample_by_itself": (
        "call init_process_group before",
        "vocab_size= where that is meant",
    ),
    "test_a_lone_weight_that_ends_in_zeros_is_warned_of": (
        *("pass vocab_size= or shard=", "pass vocab_size=, which"),
    ),
    "test_rows_of_a_vocabulary_that_have_one_reading": (" ids in two ways, ",),
    "test_padded_is_how_megatron_and_vllm_split": ("name the multiple to which",),
    "test_it_writes_the_same_on_one_rank_and_on_two": (
        *("; pass its .", "makes its logits itself", "hidden_states[:, -1]"),
    ),
    "exchange/test_exchanges.py::test_tokens_are_the_oracles": (
        *("give it on every rank or on none", "or the interpreter with"),
        'use exchange="collective"',
    ),
    "test_shard_and_group_follow_from_the_rows_of_a_mesh": (
        *("leave shard= out", "leave group= out", "redistribute it", ".get_group()"),
    ),
    "test_the_next_step_reads_the_new_weight_or_raises": ("call sampler.refresh()",),
    "test_a_sampler_without_a_weight_takes_no_hidden_states": ("call sample_logits, or",),
    "test_calls_that_torch_records_are_made_outside_compiled_or_exported": (
        "call the sampler outside of it, or",
    ),
    "test_the_same_tokens_with_fullgraph_and_changing_batches": ("leave fullgraph=True out",),
    "test_a_graph_of_a_batch_that_has_changed_or_is_gone_says_so": ("keep it as it was, or",),
    "test_steps_that_draw_again_on_purpose_are_not_told_of": ("pass the index",),
    "test_rows_with_the_same_noise_are_told_of_once": ("give each request a seed of its own, as",),
    "test_written_temperatures_that_count_as_0_are_told_of_once": ("write 0 where that is meant",),
    "test_filters_of_greedy_requests_are_off_at_a_written_temperature": ("call batch.update with",),
    "test_shares_of_an_engine_that_are_out_of_range_are_told_of": ("write a number inside",),
    "test_rows_that_move_while_others_are_dropped_are_told_of_once": (
        "name all that leave in one",
    ),
    "test_a_mask_of_an_earlier_step_is_told_of_once": ("assign that of each step before it",),
    "test_tokens_that_are_appended_once_in_any_way_are_not_told_of": (
        "append each step's tokens o",
    ),
    "test_batches_that_are_built_anew_without_their_output_are_told_of": ("keep one batch and",),
    "test_alternatives_are_no_text": ("append the one that goes on",),
    "test_tokens_of_a_step_are_appended_before_other_slots_are_taken": ("before the next select",),
    "test_a_penalty_of_a_prompt_that_did_not_come_is_told_of": ("pass them, [] for a row without",),
    "test_a_head_of_which_logits_may_lack_a_part_is_refused": ("pass head_applied=True, or",),
    "test_probabilities_are_refused_where_logits_belong": ("pass their logarithm",),
    "test_drafts_that_are_no_draws_of_their_law_are_told_of_once": ("pass the list that sample",),
    "test_drafts_bring_their_law": (
        *("bring their own; leave it out", "pass sample_draft what", "pass draft_logits=, the"),
    ),
    "test_a_slow_backend_that_nobody_chose_is_told_of": ("name it by backend=",),
    "test_what_stays_in_its_place_is_written_there": (
        *("write batch.seed[:]", "write batch.temperature[:]", "give int({})"),
        *("give each request seed=, an", "give it to LMHeadSampler"),
        *("call update, add, drop or arrange", "give it to each request"),
    ),
    # --- requests and batches
    "test_a_request_with_biases_is_copied_and_pickled_and_stays_as_it_is": (
        *("make another by dataclasses.replace", "a name; give it one"),
    ),
    "test_several_samples_per_row": ("with num_samples=",),
    "test_rows_and_samples_are_independent_draws": ("answers are not ranked",),
    "test_a_sampled_token_has_the_value_its_step_reported": ("LMHeadSampler.prompt_logprobs",),
    "test_the_layout_by_hand": ("give logprobs= the number",),
    "test_min_tokens_empties_no_row": ("give them in stop_token_ids",),
    "test_sets_are_the_oracles_and_the_same_everywhere": (
        *("kept_cap: not with select", "kept_cap: not with fixed_rounds"),
    ),
    "test_mixtures_on_one_rank": (
        *("pass [] if there are none", "pass dataclasses.replace", "drop rows, or build"),
        *("call batch.select again", "pad slots with -1"),
        *("set SamplingBatch.grammar_", "see logit_bias", "allow another id"),
        *("call batch.prepare(shard)", "assign it anew, or None"),
    ),
    "test_a_step_that_cannot_see_the_last_token_is_warned_of_once": ("call batch.append(out.",),
    "test_a_captured_step_serves_other_slots_and_other_requests": ("of the step by batch.select",),
    "test_other_numbers_on_the_host_are_refused": ("leave it out where the host does not",),
    "test_seeds_are_drawn_before_a_replay": ("draw them first, see draw_seeds",),
    "test_masks_by_slot_follow_the_slots": ("assign one to the selection", "assign another"),
    "test_a_captured_step_takes_fixed_rounds_by_itself": ("capture a batch without it",),
    "test_every_rank_count_emits_the_oracles_tokens": ('choose "rejection" or "block"',),
    # --- ranks
    "test_a_virtual_rank_alone_refuses_filters_before_it_waits": ("have no process group",),
    "test_a_rank_that_fails_inside_a_step_says_why": ("on every rank first",),
    "test_samplers_with_connections_of_their_own_are_told_apart_once_they_waited": (
        "call reset() of both",
    ),
    "test_a_rank_that_stays_away_is_named_and_reset_recovers": ("{}. If all ranks live",),
    "test_a_rank_that_is_cut_off_from_the_store_says_so_in_time_and_reset_waits_for_it": (
        "does not answer either",
    ),
    "test_a_reset_that_fails_ends_and_the_next_one_recovers": (
        *("did not answer within {} s", "did not come within {} s"),
    ),
    "test_two_ranks_join": ("start with torchrun, or",),
    "test_place_from_environment": ("are; set it",),
    "test_variables_of_a_launcher_and_an_address_are_enough": ("set MASTER_ADDR and MASTER_PORT",),
    "test_more_ranks_than_gpus_raises_on_every_rank": ("GPUs visible",),
    "test_ranks_that_do_not_reach_each_other_are_told_the_variable": ("does not reach all",),
    "test_an_address_of_this_machine_is_the_first_and_a_longer_wait_finds_another": (
        *("give the address of", "give an address of"),
    ),
    "test_threads_draw_their_own_tokens_or_are_told": (
        *("build a sampler per thread", "give each thread a batch"),
    ),
    "test_a_weight_without_its_storage_is_refused_until_that_is_back": (
        "give it its numbers back",
    ),
    "test_a_folder_that_goes_away_is_made_again": ("remove the folder, let its owner",),
    # --- commands and records
    "test_commands_of_messages_are_those_of_the_project": (
        *("triton missing: ", "the package with the weights"),
        "run `make bench` there",
    ),
    "test_on_two_ranks": ("start two with torchrun",),
    "test_every_advice_can_be_followed_on_each_python": (
        *("pip install {}{}", "^pip install {}$", "pip install -e {}"),
    ),
    "test_one_prompt_has_one_answer_and_others_by_request": (
        *("are one; give one", "ask for fewer"),
    ),
    "test_bad_words_may_be_texts_alone": ("got ''; leave it out",),
    "test_one_and_two_ranks_write_the_same_texts": ("leave --tp out: ",),
    "test_two_ranks_split_the_model_and_write_what_it_writes": ("start {} ranks",),
    "test_a_record_of_a_text_is_confirmed_token_by_token": ("use `tpsample verify`",),
    "test_a_model_is_not_downloaded_unless_that_is_allowed": ("see --allow-download",),
    "test_every_step_is_the_oracles": ("ask for them with",),
    # --- engines
    "test_prompts_that_are_padded_are_told_of": ("leave padding out",),
    "test_coupled_drafts_of_other_positions_are_refused": ("give the position of the first draft",),
    "test_other_versions_are_refused_with_the_way_out": ("^pip install '{}=={}.*'",),
    "test_a_streamer_is_given_the_prompt_every_token_and_the_end": ("pass stream_to=",),
    "test_seeds_of_greedy_text_and_no_list_of_seeds_are_refused": ("pass do_sample=True, or",),
    "test_the_module_stands_for_its_function": ("pass seeds=, one per row",),
    "test_a_sampler_of_another_model_reads_this_one": ("pass one of sampler_of(model), or",),
    "test_greedy_text_is_generates_own": (
        *("leave them off", "load it onto one device", "leave it out, or call", "^leave it out$"),
    ),
    "test_every_token_is_the_one_of_its_seed_and_position": (
        *(
            "call model.generate(input_ids,",
            "expected the order {}",
            "an argument of transformers'",
        ),
    ),
    "test_a_row_has_its_text_alone_and_beside_others_with_and_without_a_cache": (
        "padding on the left",
    ),
    "test_the_head_is_not_applied": ("makes its own logits, see",),
    "test_modes_of_the_surroundings_are_refused_too": ("uninstall its package",),
    "test_without_asynchronous_scheduling_or_with_runner_v2_a_server_starts": ("pass --no-async",),
}
"""By test, parts of the advice that it follows, between ^ and $."""

NEEDS_A_GPU = (
    'backend: "numba" needs a CPU',
    "the current device of this process is cuda:{}; call torch.cuda.set_device",
    "without NVLink between all pairs of GPUs, or torch cannot tell",
    "sees one GPU and its peers have others",
    "no GPU is visible: everything runs on the CPU; if there is one, see nvidia-smi",
)
NO_ADVICE = ("compare hidden states", "Write two short sentences")
"""The name of a call, and a prompt."""


PACKAGE = Path(tpsample.__file__).parent
VERBS = (
    "add|allow|append|ask|assign|build|call|capture|check|choose|compare|convert|decode|did you "
    "mean|draw|drop|export|free|give|hide|import|install|keep|leave|let|load|look|make|move|name|"
    "pad|pass|pip install|put|read|redistribute|refresh|remove|repeat|reset|restart|run|say|see|"
    "send|set|start|switch|take|try|turn|uninstall|use|wait|write"
)
ADVICE = re.compile(rf"(?:[;:.,] |^)(?:(?:or|and|else) )*(?:{VERBS})\b[ .]", re.IGNORECASE)


def advices() -> dict[str, str]:
    """Return the texts of the package that have advice, with `{}` for what is filled in, and the
    file of each."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for text in _texts(tree, _docstrings(tree)):
            if " " in text and ADVICE.search(text):
                found[text] = str(path.relative_to(PACKAGE))
    return found


def _docstrings(tree: ast.AST) -> set[int]:
    """Return the nodes of texts that stand alone, which are docstrings."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def _texts(node: ast.AST, docstrings: set[int]) -> Iterator[str]:
    """Yield the texts under a node, those in several parts as one, but no help of options."""
    if id(node) in docstrings and isinstance(node, ast.Constant):
        return
    if isinstance(node, ast.keyword) and node.arg == "help":
        return
    if isinstance(node, ast.JoinedStr):
        parts = (each.value if isinstance(each, ast.Constant) else "{}" for each in node.values)
        yield "".join(map(str, parts))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from _texts(child, docstrings)


def test_every_advice_is_followed_by_a_test_or_needs_a_gpu() -> None:
    parts = [*NEEDS_A_GPU, *NO_ADVICE, *(part for each in FOLLOWED.values() for part in each)]
    found = {f"^{advice}$" for advice in advices()}
    assert len(found) > 90
    unknown = {advice for advice in found if not any(part in advice for part in parts)}
    assert unknown == set(), "nobody tried what these texts advise"
    assert {part for part in parts if not any(part in advice for advice in found)} == set()
    assert all(map(name_of_test, FOLLOWED))


def test_commands_of_messages_are_those_of_the_project() -> None:
    """Extras, pinned packages and targets are there; nothing is installed."""
    pytest.importorskip("rich", reason="needs typer and rich")
    from tpsample.cli.doctor import PACKAGES

    commands = [
        found[1] or found[2]
        for advice in advices()
        if "{}==" not in advice
        and (found := re.search(r"`(make .*?)`|(pip install [^,]+)", advice))
    ]
    assert len(commands) >= 4
    for command in commands:
        for extra in ("cli,hf", *PACKAGES.values()):
            options_of(command.replace("{}", extra))
