"""Faults of requests, of verification, of what lives long, of adapters and of files."""

from tests.faults.fault import Fault

REQUESTS = [
    Fault(
        "an unknown field has no way out",
        "tpsample/request/unknown_fields.py",
        "if name in _ENGINES:",
        "if False:",
        ("tests/test_messages.py::test_a_process_alone_is_told[max_tokens]",),
    ),
    Fault(
        "an output token counts once in the history",
        "tpsample/request/controls/token_state.py",
        "index_add_(0, place, mine, alpha=2)",
        "index_add_(0, place, mine)",
        ("tests/request/test_controls.py::test_several_tokens_at_once_are_counted_in_order",),
    ),
    Fault(
        "appended ids outside the vocabulary count",
        "tpsample/request/controls/tables.py",
        "there = torch.eq(ids, token_ids,",
        "there = torch.le(ids, token_ids,",
        ("tests/request/test_batch_state.py::test_an_appended_id_outside_the_vocabulary_is_none",),
    ),
    Fault(
        "drafts are not penalised",
        "tpsample/request/controls/apply.py",
        "history = history + 2 * counted.T.to(torch.int32)",
        "history = history + 0",
        ("tests/request/test_controls.py::test_drafts_count_cumulatively_and_leave_no_trace",),
    ),
    Fault(
        "drafts are not of the length of the output",
        "tpsample/request/controls/token_mask.py",
        "length = tables.length[slots] + (0 if rows.num_drafts is None else rows.num_drafts)",
        "length = tables.length[slots]",
        ("tests/request/test_controls.py::test_drafts_count_cumulatively_and_leave_no_trace",),
    ),
    Fault(
        "min_tokens empties a row",
        "tpsample/request/controls/token_mask.py",
        "held_back &= (others != 0).any(dim=1)",
        "pass",
        ("tests/request/test_batch_state.py::test_min_tokens_empties_no_row[torch-1]",),
    ),
    Fault(
        "repetition divides negative logits",
        "tpsample/request/controls/apply.py",
        "scaled = torch.where(logits > 0, logits / repetition, logits * repetition)",
        "scaled = logits / repetition",
        ("tests/request/test_controls.py::test_the_definition_is_what_lists_say",),
    ),
    Fault(
        "masks of rows that moved are taken",
        "tpsample/request/step_batch.py",
        "if version != self.version:",
        "if False:",
        (
            "tests/request/test_batch_state.py::"
            "test_masks_of_rows_that_changed_are_refused_until_they_are_assigned_anew",
        ),
    ),
    Fault(
        "a mask that is assigned anew stays stale",
        "tpsample/request/step_batch.py",
        "self._assigned[name] = mask, self.version",
        "self._assigned[name] = mask, self._assigned.get(name, (None, self.version))[1]",
        (
            "tests/request/test_batch_state.py::"
            "test_masks_of_rows_that_changed_are_refused_until_they_are_assigned_anew",
        ),
    ),
    Fault(
        "one request for all rows loses its prompt",
        "tpsample/request/batch.py",
        "[single] * num_rows)",
        "[type(single)(single.params, (), single.output)] * num_rows)",
        (
            "tests/request/test_batch_state.py::test_one_request_for_all_rows_carries_all_it_was_given",
        ),
    ),
    Fault(
        "one request for all rows loses its temperature",
        "tpsample/request/batch.py",
        "repeated.temperature.copy_(self.temperature.expand(num_rows))",
        "pass",
        (
            "tests/request/test_batch_state.py::test_one_request_for_all_rows_carries_all_it_was_given",
        ),
    ),
    Fault(
        "one request for all rows loses its masks",
        "tpsample/request/batch.py",
        "setattr(repeated, name, mask)",
        "pass",
        (
            "tests/request/test_batch_state.py::test_one_request_for_all_rows_carries_all_it_was_given",
        ),
    ),
    Fault(
        "repeated rows are of the plan before",
        "tpsample/request/batch.py",
        "BatchView(self.temperature, self.seed, self.plan, self._controls())",
        "BatchView(self.temperature, self.seed, "
        'self.__dict__.setdefault("_first_plan", self.plan), self._controls())',
        (
            "tests/request/test_batch_state.py::"
            "test_rows_updated_between_verifications_of_one_width_are_what_is_verified",
        ),
    ),
]

SPECULATIVE = [
    Fault(
        "a draft is accepted without its own law",
        "tpsample/speculative/acceptance.py",
        "return leading((u * q < p) & (q > 0))",
        "return leading((u < p) & (q > 0))",
        ("tests/speculative/test_law.py::test_acceptance_is_exactly_as_published",),
    ),
    Fault(
        "a position without a draft is accepted",
        "tpsample/speculative/acceptance.py",
        "return leading((u * q < p) & (q > 0))",
        "return leading(u * q <= p)",
        ("tests/speculative/test_shards.py::test_special_rows[1]",),
    ),
    Fault(
        "the bonus token is cut off",
        "tpsample/speculative/output.py",
        "return index <= num_accepted.unsqueeze(1)",
        "return index < num_accepted.unsqueeze(1)",
        (
            "tests/speculative/test_coupled.py::test_a_perfect_drafter_needs_a_step_per_k_plus_1_tokens",
        ),
    ),
    Fault(
        "the bonus token is of the residual",
        "tpsample/speculative/laws.py",
        "possible = (logits > -torch.inf) & (self.drafts[:, :positions] >= 0).unsqueeze(2)",
        "possible = logits > -torch.inf",
        ("tests/speculative/test_shards.py::test_every_rank_count_emits_the_oracles_tokens[1]",),
    ),
    Fault(
        "the coefficient of a block is not capped",
        "tpsample/speculative/acceptance.py",
        "chain.append((chain[-1] * ratio).clamp(max=1))",
        "chain.append(chain[-1] * ratio)",
        ("tests/speculative/test_law.py::test_acceptance_is_exactly_as_published",),
    ),
    Fault(
        "a block recovers as token by token",
        "tpsample/speculative/acceptance.py",
        "return stop, coefficient.gather(1, stop.unsqueeze(1)).squeeze(1)",
        "return stop, torch.ones_like(coefficient[:, 0])",
        (
            "tests/speculative/test_shards.py::test_rows_that_stop_within_a_block_recover_at_its_coefficient",
        ),
    ),
]

VERIFY = [
    Fault(
        "every rank brings its own changes",
        "tpsample/ranks/process.py",
        'text = json.dumps(record).encode() if self.rank == src else b""',
        "text, src = json.dumps(record).encode(), self.rank",
        ("tests/request/test_changes.py::test_what_one_rank_knows_reaches_the_batches_of_all[0]",),
    ),
    Fault(
        "changes lose the tokens so far",
        "tpsample/request/changes.py",
        'where, tokens = f"changes: {name}", (prompts, outputs)',
        'where, tokens = f"changes: {name}", (prompts, None)',
        ("tests/request/test_changes.py::test_what_one_rank_knows_reaches_the_batches_of_all[0]",),
    ),
    Fault(
        "a row has one draft more than its length says",
        "tpsample/speculative/checks.py",
        "place < self.lengths.unsqueeze(1)",
        "place <= self.lengths.unsqueeze(1)",
        ("tests/speculative/test_ragged.py::test_lengths_end_the_drafts_of_each_row[coupled]",),
    ),
    Fault(
        "positions of given logits are in the order of positions",
        "tpsample/request/step.py",
        "self.given.detach().flatten(0, -2)",
        "self.given.detach().transpose(0, -2).flatten(0, -2)",
        ("tests/speculative/test_ragged.py::test_given_logits_are_verified_alike[1]",),
    ),
]

LIFETIME = [
    Fault(
        "a draft equal to the token of failed rows is accepted",
        "tpsample/speculative/verify.py",
        "sampler.end(sampler.begin(",
        "sampler.finish(sampler.begin(",
        (
            "tests/sampler/test_on_failed.py::"
            "test_a_verification_stops_at_a_failed_position_even_if_its_draft_is_that_token",
        ),
    ),
    Fault(
        "a row that failed keeps -1",
        "tpsample/steps.py",
        "out.name_failed(self.on_failed)",
        "pass",
        (
            "tests/sampler/test_on_failed.py::"
            "test_rows_that_fail_return_it_and_their_status_still_tells",
        ),
    ),
    Fault(
        "the weight keeps its gradient",
        "tpsample/agreement/construction.py",
        "arguments.weight.detach()",
        "arguments.weight",
        ("tests/request/test_batch_state.py::test_steps_with_gradients_leave_nothing_behind",),
    ),
    Fault(
        "the hidden states keep their gradient",
        "tpsample/request/step.py",
        "self.given.detach().flatten(0, -2)",
        "self.given.flatten(0, -2)",
        ("tests/request/test_batch_state.py::test_steps_with_gradients_leave_nothing_behind",),
    ),
    Fault(
        "a step buffer grows under inference mode",
        "tpsample/core/step_buffer.py",
        "with torch.inference_mode(False):  # the next step may be outside of it",
        "with torch.no_grad():",
        (
            "tests/request/test_batch_state.py::"
            "test_sampler_batch_and_steps_may_each_be_under_another_mode[torch-inference-grad]",
        ),
    ),
    Fault(
        "the state of a shard is made under inference mode",
        "tpsample/request/controls/token_state.py",
        "    @ordinary_tensors\n    def __init__(",
        "    def __init__(",
        (
            "tests/request/test_batch_state.py::test_sampler_batch_and_steps_may_each_be_under_another_mode[torch-grad-inference]",
        ),
    ),
    Fault(
        "tables are made under inference mode",
        "tpsample/request/controls/tables.py",
        "    @ordinary_tensors\n    def __init__(",
        "    def __init__(",
        ("tests/request/test_batch_state.py::test_a_mask_may_be_assigned_under_inference_mode",),
    ),
]

SLOTS = [
    Fault(
        "a slot that two rows name is appended to twice",
        "tpsample/request/rows.py",
        'torch.ne(self.scratch.pick("winner", first, index), self.numbers, out=undrawn)',
        'torch.lt(self.scratch.pick("winner", first, index), 0, out=undrawn)',
        (
            "tests/request/test_slots.py::test_any_trace_of_slots_is_a_dictionary_of_requests[torch-0]",
        ),
    ),
    Fault(
        "a slot without a request is drawn",
        "tpsample/request/rows.py",
        "none + 1).copy_(gate)",
        "none + 1).fill_(OPEN)",
        (
            "tests/request/test_slots.py::test_any_trace_of_slots_is_a_dictionary_of_requests[torch-0]",
        ),
    ),
    Fault(
        "a row that is not drawn writes to the slot that it names",
        "tpsample/request/rows.py",
        "index.masked_fill_(undrawn, none)",
        "index",
        ("tests/request/test_slots.py::test_a_slot_that_is_named_twice_counts_its_first_row",),
    ),
    Fault(
        "a selection is taken after rows have changed",
        "tpsample/request/selection.py",
        "if self.version != self._batch.version:",
        "if False:",
        ("tests/request/test_slots.py::test_a_selection_of_rows_that_changed_is_refused[free]",),
    ),
    Fault(
        "a step of the whole batch draws its empty slots",
        "tpsample/request/batch.py",
        "if self._empty:",
        "if False:",
        ("tests/request/test_slots.py::test_a_step_of_all_slots_is_refused_while_one_is_empty",),
    ),
    Fault(
        "an empty slot is known as such until rows move",
        "tpsample/request/table.py",
        "self.entries = list(map(entries.__getitem__, order))",
        "self.entries = [entries[old]._replace(flags=entries[old].flags & ~8) for old in order]",
        ("tests/request/test_slots.py::test_a_copy_of_a_batch_lives_by_itself[deepcopy]",),
    ),
    Fault(
        "a pickled batch reads numbers that it no longer writes",
        "tpsample/request/changing_rows.py",
        "vars(self).update(state)\n        self._view_rows()",
        "vars(self).update(state)",
        ("tests/request/test_slots.py::test_a_copy_of_a_batch_lives_by_itself",),
    ),
    Fault(
        "a seed that was written before the first step is lost",
        "tpsample/request/table.py",
        "written.where(written != WAITING, seeds)",
        "written.where(written != written, seeds)",
        (
            "tests/request/test_slots.py::"
            "test_a_seed_that_was_written_before_the_first_step_is_the_rows",
        ),
    ),
    Fault(
        "ranks do not compare the order of filters of an engine's tensors",
        "tpsample/request/engine_tensors.py",
        '{"needs": self.needs, "filter_order": self.filter_order}',
        '{"needs": self.needs}',
        (
            "tests/request/test_engine_tensors.py::"
            "test_ranks_with_other_numbers_or_another_order_are_told_each_value",
        ),
    ),
    Fault(
        "masks of an engine's rows do not follow its slots",
        "tpsample/request/selection.py",
        "return {name: mask for name, (mask, _) in its.items() if name not in own}",
        "return {}",
        ("tests/request/test_engine_tensors.py::test_masks_of_all_rows_and_of_slots_bind",),
    ),
    Fault(
        "objects take any attribute",
        "tpsample/core/sealed.py",
        'if "_sealed" in own and',
        "if False and",
        ("tests/test_interface.py::test_an_attribute_that_an_object_does_not_have_is_refused",),
    ),
    Fault(
        "a row without filters takes the way of those with top_k alone",
        "tpsample/request/table.py",
        "kinds = [keeps_all(self.vocab_size), *asked.filters]",
        "kinds = [*asked.filters]",
        (
            "tests/request/test_slots.py::"
            "test_a_row_without_filters_beside_one_with_top_k_keeps_all_of_its_tokens",
        ),
    ),
    Fault(
        "a request that comes to a slot has the filters of the one before",
        "tpsample/request/table.py",
        'self.numbers[:STATE].index_copy_(1, index, send("numbers", columns))',
        "self.numbers[GATE:STATE].index_copy_(1, index, columns[GATE:])",
        (
            "tests/request/test_slots.py::test_a_captured_step_serves_other_slots_and_other_requests[sample]",
        ),
    ),
    Fault(
        "the plan of a selection sends to the device",
        "tpsample/request/plan.py",
        "return self.numbers\n",
        "return torch.tensor(stored, device=device), self.numbers[1]\n",
        (
            "tests/request/test_slots.py::test_a_captured_step_serves_other_slots_and_other_requests[sample]",
        ),
    ),
    Fault(
        "a selection that is used again keeps its masks",
        "tpsample/request/selection.py",
        "self._assigned.clear()",
        "pass",
        ("tests/request/test_slots.py::test_masks_by_slot_follow_the_slots",),
    ),
    Fault(
        "a row whose seed was drawn waits for another when rows move",
        "tpsample/request/table.py",
        "self.entries[slot] = entry._replace(flags=entry.flags & ~UNSEEDED)",
        "pass",
        ("tests/request/test_arrange.py::test_a_seed_that_was_drawn_moves_with_its_row",),
    ),
    Fault(
        "filters stay where they are when rows move",
        "tpsample/request/table.py",
        "self.numbers[0 if self.stores_logits else GATE :]",
        "self.numbers[GATE:]",
        ("tests/request/test_arrange.py::test_any_arrangement_is_the_batch_built_of_its_rows[1]",),
    ),
    Fault(
        "a step over slots allocates what it reads of them",
        "tpsample/core/staging.py",
        "return torch.index_select(table, dim, index, out=self.take(name, table.dtype, *shape))",
        "return torch.index_select(table, dim, index)",
        (
            "tests/request/test_slot_allocations.py::test_a_step_over_slots_allocates_nothing[plain]",
        ),
    ),
    Fault(
        "a request that comes to a slot allocates on the device",
        "tpsample/core/staging.py",
        "return self.take(name, values.dtype, *values.shape).copy_(values)",
        "return values.to(self._device)",
        (
            "tests/request/test_slot_allocations.py::"
            "test_requests_come_and_go_without_allocations_on_the_device[plain]",
        ),
    ),
    Fault(
        "a top_p of 0 keeps nothing",
        "tpsample/request/engine_tensors.py",
        "top_p = p.clamp(min=LEAST_TOP_P).where(there & (p < 1), 1.0)",
        "top_p = p.where(there & (p < 1), 1.0)",
        ("tests/request/test_engine_tensors.py::test_values_out_of_range_have_a_meaning",),
    ),
    Fault(
        "what an engine writes to its tensors is not seen",
        "tpsample/request/engine_tensors.py",
        "self.temperature, self.seed, self.filters = temperature, seed, filters",
        "self.temperature, self.seed, self.filters = temperature.clone(), seed, filters",
        (
            "tests/request/test_engine_tensors.py::"
            "test_tokens_are_those_of_requests_with_these_numbers[torch-sequential]",
        ),
    ),
]

ENGINES = [
    Fault(
        "logits of the caller get the bias of the head",
        "tpsample/local/triton_backend.py",
        "head_arguments(head, None if given else self._bias)",
        "head_arguments(head, self._bias)",
        ("tests/sampler/test_from_logits.py::test_the_head_is_not_applied",),
    ),
    Fault(
        "columns behind the shard are taken for its own",
        "tpsample/local/torch_backend.py",
        "rows.local_logits[:, start:stop].float()",
        "rows.local_logits[:, -len(self._shard) :][:, start:stop].float()",
        ("tests/sampler/test_from_logits.py::test_columns_behind_the_shard_are_never_read",),
    ),
    Fault(
        "a DTensor's rows begin at 0 on every rank",
        "tpsample/agreement/dtensor.py",
        "start = min(offset[0], end)",
        "start = 0",
        ("tests/agreement/test_dtensor.py::test_shard_and_group_follow_from_the_rows_of_a_mesh",),
    ),
    Fault(
        "a DTensor's group is the whole job",
        "tpsample/agreement/dtensor.py",
        "of_mesh = weight.device_mesh.get_group(axis)",
        "of_mesh = dist.group.WORLD",
        ("tests/agreement/test_dtensor.py::test_on_two_axes_the_sharded_one_is_the_group",),
    ),
    Fault(
        "a rank alone waits for its job",
        "tpsample/ranks/process.py",
        "group == ALONE:",
        "False:",
        ("tests/ranks/test_alone.py::test_a_rank_of_two_samples_alone",),
    ),
    Fault(
        "positions of generate count padding",
        "tpsample/integrations/transformers.py",
        "[len(row) for row in prompts.rows]",
        "[prompts.length for _ in prompts.rows]",
        (
            "tests/integrations/test_transformers.py::"
            "test_a_row_has_its_text_alone_and_beside_others_with_and_without_a_cache",
        ),
    ),
    Fault(
        "min_p comes before top_k",
        "tpsample/integrations/transformers_params.py",
        'fields["filter_order"] = "min_p_last"',
        'fields["filter_order"] = "sequential"',
        ("tests/integrations/test_transformers_params.py::test_the_law_is_that_of_the_processors",),
    ),
    Fault(
        "the LM head keeps no forward of its own",
        "tpsample/integrations/transformers_head.py",
        "if was is not None:",
        "if False:",
        (
            "tests/integrations/test_transformers.py::"
            "test_two_ranks_of_tensor_parallelism_write_the_text_of_one",
        ),
    ),
]

FILES = [
    Fault(
        "the end of with leaves a sampler open",
        "tpsample/sampler.py",
        "    def __exit__(self, *_: object) -> None:\n        self.close()",
        "    def __exit__(self, *_: object) -> None:\n        pass",
        ("tests/test_interface.py::test_a_sampler_is_closed_at_the_end_of_with_whatever_happens",),
    ),
    Fault(
        "integers of other libraries are kept as they came",
        "tpsample/core/checks.py",
        "    return int(value)\n",
        "    return value\n",
        ("tests/test_interface.py::test_integers_of_other_libraries_are_integers",),
    ),
    Fault(
        "key-value heads that the ranks cannot share are taken",
        "tpsample/cli/tensor_parallel.py",
        "math.gcd(*_counts(heads), *_counts(key_value_heads))",
        "math.gcd(*_counts(heads))",
        (
            "tests/cli/test_generate_tp.py::"
            "test_ranks_that_cannot_share_the_heads_are_told_which_can",
        ),
    ),
    Fault(
        "generate --tp leaves the model whole",
        "tpsample/cli/model.py",
        "parts = split.loading(model or BUNDLED, read, job)",
        "split.loading(model or BUNDLED, read, job)",
        ("tests/cli/test_generate_tp.py::test_two_ranks_split_the_model_and_write_what_it_writes",),
    ),
    Fault(
        "ranks of a split model do not compare their hidden states",
        "tpsample/cli/report.py",
        "len(set(step)) > 1 for step",
        "len(set(step)) > 9 for step",
        ("tests/cli/test_generate_tp.py::test_ranks_with_other_hidden_states_are_found",),
    ),
    Fault(
        "a stop text stays in the answer",
        "tpsample/cli/requests.py",
        "return text[: min(found, default=None)]",
        "return text",
        (
            "tests/cli/test_generate_answers.py::test_answers_end_where_their_requests_say",
            "tests/cli/test_generate_answers.py::test_a_letter_is_streamed_once_it_is_whole",
        ),
    ),
    Fault(
        "a record forgets the tokens so far",
        "tpsample/cli/requests.py",
        "output_token_ids=[decoded.rows[row][:t] for t, row in kept],",
        "output_token_ids=[[] for t, row in kept],",
        (
            "tests/cli/test_generate_answers.py::"
            "test_a_record_of_a_text_is_confirmed_token_by_token",
        ),
    ),
    Fault(
        "any token of a record is a near tie",
        "tpsample/record/verify.py",
        "near = apart < NEAR_TIE",
        "near = apart < torch.inf",
        (
            "tests/test_record.py::test_a_near_tie_is_confirmed_and_called_one_and_a_filtered_token_is_not",
        ),
    ),
    Fault(
        "a filtered token of a record is a near tie",
        "tpsample/record/verify.py",
        "or expected < 0 or not kept[row, recorded]:",
        "or expected < 0:",
        (
            "tests/test_record.py::test_a_near_tie_is_confirmed_and_called_one_and_a_filtered_token_is_not",
        ),
    ),
    Fault(
        "a trace is one step longer",
        "tpsample/record/trace.py",
        "inside = torch.arange(self.step) < until.unsqueeze(1)",
        "inside = torch.arange(self.step) <= until.unsqueeze(1)",
        ("tests/test_trace.py::test_what_lies_behind_the_end_of_a_row_is_blank",),
    ),
]
