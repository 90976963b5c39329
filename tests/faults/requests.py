"""Faults of requests, of the rows of a batch, of slots, and of what lives long."""

from tests.faults.fault import faults

FAULTS = faults(r"""
tpsample/request/controls/tables.py
    bits of masks are made on the default device
    - dtype=torch.bool, device="cpu")
    + dtype=torch.bool)
    > test_random_steps_of_one_rank_are_the_oracles[controls]
    tokens are counted for ever once a request looked at them
    - if not (self._looking or (self.looks_at_output and self.device.type == "cuda")):
    + if not self.looks_at_output:
    > test_tokens_are_counted_while_a_request_looks_at_them
    a request that comes in place of one without penalties is not counted
    - (self._looking.add if looks else self._looking.discard)(slot)
    + self._looking.discard(slot)
    appended ids outside the vocabulary count
    - there = torch.eq(ids, token_ids,
    + there = torch.le(ids, token_ids,
    > test_an_appended_id_outside_the_vocabulary_is_none
    tables are made under inference mode
    -     @ordinary_tensors
    -     def __init__(
    +     def __init__(
    > test_a_mask_may_be_assigned_under_inference_mode
    a batch takes the backend of its last step along to another process
    - return {**vars(self), "append_by": None}
    + return vars(self)
    > test_a_batch_is_pickled_without_the_backend_of_its_last_step
tpsample/core/rules.py
    a top_p of 0 keeps nothing
    - low=2.0**-60,  # leaves one token of any total
    + low=0.0,
    > test_values_out_of_range_have_a_meaning
    an epsilon of a tensor may be more than one
    - high=math.nextafter(1.0, 0.0),
    -     example=0.001,
    + high=5.0,
    +     example=0.001,
    > test_a_number_means_itself_and_one_beyond_the_range_one_within_it
    a small epsilon of a tensor is off
    - high=math.nextafter(1.0, 0.0),
    -     example=0.001,
    + high=math.nextafter(1.0, 0.0),
    +     example=0.001,
    +     cuts=lambda epsilon: epsilon > 0.5,
    the example of epsilon is off
    - example=0.001,
    -     end=_least_of_epsilon,
    + example=0.0,
    +     end=_least_of_epsilon,
    > test_the_numbers_of_a_rule_fit_together[epsilon_cutoff]
tpsample/request/tensor_columns.py
    shares that are out of range are not told of
    - wrong = (column != meant).nonzero()
    + wrong = (column != meant)[:0].nonzero()
    > test_shares_of_an_engine_that_are_out_of_range_are_told_of[top_p-host]
    each step makes the requests of tensors anew
    - @lru_cache(maxsize=2**14)
    + @lru_cache(maxsize=0)
    > test_a_step_builds_a_batch_in_a_fifth_of_the_time_of_requests
    other numbers of the host than those of a tensor are taken
    - (readable(tensor.device) and not _equal(column, tensor.detach()))
    + False
    > test_a_wrong_column_names_the_argument
    a row of tensors that the host does not know has no min_p
    - numbers.log() if _RULES[name].by_logarithm else numbers
    + numbers
    > test_tensors_draw_what_requests_with_these_numbers_draw[top_k-min_p-unknown-sequential]
tpsample/request/batch.py
    a row leaves twice in silence
    - if len(gone) < len(named):
    + if False:
    > test_a_process_alone_is_told[a row that leaves twice]
    the compiler looks into the making of a batch
    -     @outside_of_graphs
    -     def from_params(
    +     def from_params(
    > test_a_batch_may_be_built_in_a_compiled_function[from_params]
    rows that moved while others left are not told of
    - max(gone, default=first) > first:
    + False:
    > test_rows_that_move_while_others_are_dropped_are_told_of_once
    rows that leave one by one from the end are told of
    - max(gone, default=first) > first:
    + True:
    filters that a greedy request has not are not told of
    - if params.greedy and params.filtered and
    + if False and
    > test_filters_of_greedy_requests_are_off_at_a_written_temperature
    a batch that is built by its name has no way out
    - if not isinstance(table, RequestTable):
    + if False:
    > test_a_process_alone_is_told[a batch by its name]
    a plan outlives its rows
    - self._plans, self._handle = {}, handle_of(self, self._handle)
    + self._handle = handle_of(self, self._handle)
    > test_random_steps_of_one_rank_are_the_oracles[mixed]
    repeated rows are of the plan before
    - seed, self._plans[times], self._controls()
    + seed, vars(self).setdefault('_first_plan', self._plans[times]), self._controls()
    > test_rows_updated_between_verifications_of_one_width_are_what_is_verified
    a step of the whole batch draws its empty slots
    - if self._table.empty:
    + if False:
    > test_a_step_of_all_slots_is_refused_while_one_is_empty
    a slot that was freed or filled makes no other version of the rows
    - self._table.load(rows, entries)
    + self._table.load(rows, entries)
    +                 self._table.version -= 1
    > test_a_selection_and_masks_of_rows_that_changed_are_refused[forced_token_ids-free]
tpsample/request/table.py
    the rows of a plan read the columns of other slots
    - slots_read = [slots[row] for row in padded_rows]
    + slots_read = padded_rows
    > test_slots_that_a_host_reads_have_the_plan_of_their_requests
    a joining row takes the request of another
    - joining[old - count] for slot
    + joining[0] for slot
    > test_random_steps_of_one_rank_are_the_oracles[mixed]
    an empty slot is known as such until rows move
    - self.entries = list(map([*entries, *joining].__getitem__, order))
    + both = [*entries, *joining]
    +         self.entries = [both[i]._replace(flags=both[i].flags & ~8) for i in order]
    > test_a_copy_of_a_batch_lives_by_itself[deepcopy-False]
    a seed that was written before the first step is lost
    - written.where(written != WAITING, seeds)
    + written.where(written != written, seeds)
    > test_a_seed_that_was_written_before_the_first_step_is_the_rows
    a request that comes to a slot has the filters of the one before
    - self.numbers[:STATE].index_copy_(1, index, send("numbers", columns))
    + self.numbers[OCCUPANCY:STATE].index_copy_(1, index, columns[OCCUPANCY:])
    > test_a_captured_step_serves_other_slots_and_other_requests[sample]
    a row whose seed was drawn waits for another when rows move
    - self.entries[slot] = entry._replace(flags=entry.flags & ~UNSEEDED)
    + pass
    > test_a_seed_that_was_drawn_moves_with_its_row
    a selection keeps the plan of requests that have left
    - self.plans: dict[tuple[int, ...], BatchPlan] = {}
    + self.plans: dict[tuple[int, ...], BatchPlan] = vars(self).get("plans", {})
    > test_equal_slots_have_one_plan_until_a_request_changes
    filters that are on the device alone count as those of every row
    - known = not _flagged(flags, UNKNOWN)
    + known = True
    > test_tensors_draw_what_requests_with_these_numbers_draw[top_k-top_p-min_p-unknown-sequential]
    numbers of filters stay where a request was that moves
    - numbers = self.numbers
    + numbers = self.numbers[0 if self.stores_logits else OCCUPANCY :]
    > test_a_row_that_moves_has_no_filter_of_one_that_left
tpsample/core/sealed.py
    an unknown field has no way out
    - if name in _ENGINES and
    + if False and
    > test_a_process_alone_is_told[max_tokens]
    an argument by half its name is taken for a field of engines
    - if name in _ENGINES and not any(field.endswith(f"_{name}") for field in fields):
    + if name in _ENGINES:
    > test_a_process_alone_is_told[softcap for LMHeadSampler]
    objects take any attribute
    - if "_sealed" in own and name not in own
    + if False and name not in own
    > test_an_attribute_that_an_object_does_not_have_is_refused
tpsample/request/controls/apply.py
    a forced id below -1 means any id
    - (rows.forced != NO_TOKEN)
    + (rows.forced >= 0)
    > test_a_forced_id_that_is_none_leaves_no_id[torch-1]
    drafts are not penalised
    - history = history + 2 * counted.T.to(torch.int32)
    + history = history + 0
    > test_a_perfect_drafter_needs_a_step_per_k_plus_1_tokens
    repetition divides negative logits
    - scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    + scaled = logits / repetition
    > test_random_steps_of_one_rank_are_the_oracles[texts]
    drafts are not of the length of the output
    - length = tables.length[slots] + (0 if rows.num_drafts is None else rows.num_drafts)
    + length = tables.length[slots]
    > test_the_mask_kernel_is_its_twin
    min_tokens empties a row
    - held_back &= (others != 0).any(dim=1)
    + pass
    > test_min_tokens_empties_no_row[torch-1]
tpsample/request/moving_on.py
    tokens of rows that moved are counted for others
    - if drawn.moves != moves:
    + if False:
    > test_tokens_of_rows_that_moved_are_refused
    tokens of a selection are counted for the rows of its batch
    - if drawn.of_slots:
    + if False:
    > test_tokens_of_a_selection_are_not_those_of_its_batch
    tokens of a step that a graph replays are refused
    - self._is_captured = self._is_captured or capturing(token_ids.device)
    + self._is_captured = False
    > test_replays_of_a_captured_step_are_not_followed
    a batch holds on to the tokens of its last step
    - Drawn(weakref.ref(token_ids), moves, of_slots)
    + Drawn(lambda: token_ids, moves, of_slots)
    > test_a_batch_holds_no_tokens_of_its_caller
    a copy of a batch takes the tokens of a step along
    - return {**vars(self), "_drawn": None}
    + return vars(self)
    > test_tokens_of_a_selection_are_not_those_of_its_batch
    seeds that are written later are not looked at
    - if written != self._written and self._looks:
    + if False:
    > test_seeds_that_are_written_later_are_told_of_once
    > test_written_temperatures_that_count_as_0_are_told_of_once[-1.0]
    tokens of a selection are counted twice in silence
    - return drawn.is_counted and self._is_new("appends")
    + return False
    > test_tokens_of_a_selection_that_are_appended_twice_are_told_of_once
    dropped tokens of chunks are told of
    - ended = self._positions[self.needing_append] >= self.known
    + ended = self._positions[self.needing_append] >= 0
    > test_dropped_tokens_of_chunks_are_not_told_of[False]
    positions that repeat are not told of
    - if self._times > 1 and self._draws_again(rows):
    + if False:
    > test_positions_that_do_not_move_on_are_told_of_once[batch]
    positions from 0 again are not told of
    - if not same and self._draws_again(rows):
    + if False:
    > test_positions_from_0_again_with_other_states_are_told_of
    tokens that are appended twice are not told of
    - elif bool((appended > moved)[self.needing_append].any()):
    + elif False:
    > test_tokens_that_are_appended_twice_are_told_of_once
    a mask of an earlier step is not told of
    - return self._seen == bytes_of(self.tensor) and
    + return False and
    > test_a_mask_of_an_earlier_step_is_told_of_once[forced_token_ids-mask0-4-False]
    a mask that was written anew is told of
    - return self._seen == bytes_of(self.tensor) and
    + return
    rows with the same noise are not told of
    - seen.setdefault((seed, position), row) != row:
    + False:
    > test_rows_with_the_same_noise_are_told_of_once
tpsample/request/step_batch.py
    a batch takes another vocabulary and device
    - _FIXED: ClassVar[Mapping[str, str]] = {
    + _LEFT: ClassVar[Mapping[str, str]] = {
    > test_a_process_alone_is_told[vocab_size of a batch]
    > test_a_process_alone_is_told[max_rows of a batch]
    a view of a selection reads no slots anew
    - rows._read_slots()
    -             return rows._read()
    + return rows._read()
    > test_what_is_written_after_an_interrupted_verification_is_read
    a view of a selection with drafts reads no slots anew
    - if not is_read:
    + if False:
    a written temperature that counts as 0 is not told of
    - if not temperature >= 0:
    + if False:
    > test_written_temperatures_that_count_as_0_are_told_of_once[nan]
    help of a batch lists what a step calls
    - def _check_masks(self, num_rows: int) -> None:
    + def check_masks(self, num_rows: int) -> None: ...
    +     def _check_masks(self, num_rows: int) -> None:
    > test_help_lists_what_is_public_and_nothing_else[SamplingBatch]
    samples are appended as a text
    - if samples > 1 and
    + if False and
    > test_alternatives_are_no_text
    masks of rows that moved are taken
    - if mask.version != self._table.version:
    + if False:
    > test_a_selection_and_masks_of_rows_that_changed_are_refused
    masks of rows without penalties bind nothing
    - if not (masks or tables.has_penalties
    + if not (tables.has_penalties
    > test_masks_by_slot_follow_the_slots
tpsample/backends/triton_/kernels/slots.py
    a slot is drawn for every row that names it
    - drawn = inside & occupied & (earlier == 0)
    + drawn = inside & occupied
    > test_rows_find_the_slots_that_they_name[200]
    rows look for an earlier one in their own block alone
    - for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
    + for start in range(tl.program_id(0) * BLOCK, (tl.program_id(0) + 1) * BLOCK, BLOCK):
    a slot without a request is drawn on a GPU
    - mask=inside, other=-1) >= 0
    + mask=inside, other=-1) >= -1
    > test_rows_find_the_slots_that_they_name[64]
tpsample/backends/triton_/kernels/decode.py
    padding has the status of a wrong slot
    - tl.where(bad, STATUS_BAD_SLOT, 0)
    + STATUS_BAD_SLOT + 0 * bad.to(tl.int32)
    > test_rows_that_are_not_drawn_get_no_token[triton-None]
    padding has the status of its words
    - return tl.where(undrawn, tl.where(bad, STATUS_BAD_SLOT, 0), row_status)
    + return tl.where(bad, STATUS_BAD_SLOT, row_status)
    only the first sample of a row is skipped
    - token_id = tl.where(undrawn, NO_TOKEN, token_id)
    + token_id = tl.where(undrawn & (sample == 0), NO_TOKEN, token_id)
    > test_rows_that_are_not_drawn_get_no_token[triton-3]
tpsample/backends/triton_/kernels/append.py
    tokens of other shards are counted
    - if (token >= shard_start) & (token < shard_stop):
    + if token < shard_stop:
    > test_appended_tokens_are_counted_as_by_plain_pytorch[shards2-both]
    the last tokens are moved from their front
    - num_recent - k
    + k
    > test_appended_tokens_are_counted_as_by_plain_pytorch[shards1-masks]
    an id outside of the vocabulary is counted
    - (token >= 0) & (token < vocab_size)
    + (token >= 0)
    > test_appended_tokens_are_counted_as_by_plain_pytorch[shards0-masks]
tpsample/backends/triton_/arguments.py
    the length of an output counts once per shard
    - words = None, None  # which count once
    + pass
    > test_appended_tokens_are_counted_as_by_plain_pytorch[shards2-both]
tpsample/backends/triton_/kernels/acceptance.py
    kernel: a row of padding recovers a token
    - drawn = tl.load(sampled_ptr + row * num_positions + stop) >= 0
    + drawn = stop >= 0
    > test_every_method_emits_nothing_for_padding[rejection-triton]
tpsample/request/selection.py
    a verification over slots takes the host's slots of the one before
    - _known=None if known is None else [slot for slot in known for _ in range(times)],
    + **({} if known is None else {"_known": [slot for slot in known for _ in range(times)]}),
    > test_a_verification_is_of_its_own_slots
    a selection whose call was interrupted passes for whole
    - vars(self)["_version"] = None  # of no table
    + pass  # of no table
    > test_a_selection_that_was_interrupted_is_refused_or_whole
    later steps read memory that a captured graph has made
    - if not capturing(self.device):  # what
    + if True:  # what
    > test_a_graph_keeps_the_memory_of_its_verification_to_itself
    a selection that steps again reads no seed anew
    - _ = self.temperature, self.seed
    + _ = self._resolved
    > test_a_step_reads_what_was_written_to_the_batch_after_the_selection
    an interrupted selection is taken for one that has found its slots
    - none, (index, (undrawn, bad), *_) = self._table.slots, self._slot_rows
    + vars(self)["_is_resolved"] = True
    +         none, (index, (undrawn, bad), *_) = self._table.slots, self._slot_rows
    > test_a_selection_that_is_used_again_reads_its_own_slots_after_an_interrupt
    slots that the host does not know report no kept sets
    - kept_cap=kept_cap,
    -             fixed_rounds=True,
    + fixed_rounds=True,
    > test_sets_are_those_of_the_definition[unknown slots-1]
    a slot that two rows name is appended to twice
    - torch.ne(winner, self._numbers, out=undrawn)
    + torch.lt(winner, 0, out=undrawn)
    > test_a_slot_that_is_named_twice_counts_its_first_row
    a row that is not drawn reads a row that masks do not have
    - torch.clamp(self._index, max=len(table) - 1, out=inside)
    + torch.clamp(self._index, max=self._table.slots - 1, out=inside)
    > test_masks_of_fewer_rows_than_slots_have_none_for_what_is_not_drawn
    a slot without a request is drawn
    - self._first.copy_(self._table.occupancy)
    + self._first.fill_(2**62)
    > test_a_captured_step_serves_other_slots_and_other_requests[sample]
    a row without filters takes the way of those with top_k alone
    - kinds = [keeps_all(self.vocab_size), *row_filters]
    + kinds = [*row_filters]
    > test_a_row_without_filters_beside_one_with_top_k_keeps_all_of_its_tokens
    a selection is taken after rows have changed
    - if self._version != self._table.version:
    + if False:
    > test_a_selection_and_masks_of_rows_that_changed_are_refused[forced_token_ids-free]
    a selection that is used again keeps its masks
    - self._assigned.clear()
    + pass
    > test_masks_by_slot_follow_the_slots
    masks of a batch do not bind its selections
    - return {name: mask for name, mask in masks.items() if len(mask)}
    + return {}
    a copied selection shares its rows and its masks
    - return copy.deepcopy(self, {id(shared): shared for shared in of_batch})
    + other = object.__new__(type(self))
    +         vars(other).update(vars(self))
    +         return other
    > test_a_copied_selection_keeps_its_slots_and_its_batch
    a step over slots on a CPU does all that any slot may need
    - reads = readable(self.device)
    + reads = False
    > test_a_cpu_searches_no_row_that_is_decided
    slots that the host knows are planned as any slots
    - else None if capturing(self.device) else self._known
    + else None
    > test_one_filtered_slot_of_eight_costs_what_one_filtered_row_costs
    a graph serves the slots of its capture alone
    - else None if capturing(self.device) else self._known
    + else self._known
    > test_a_graph_is_of_any_slots_although_the_host_knows_those_of_its_capture
    the rows of a verification forget what the host knew of its slots
    - [slot for slot in known for _ in range(times)]
    + known[:1] * self.rows * times
    > test_a_step_is_the_same_whether_the_host_knows_its_slots_or_reads_them
    slots of the host may lie on a device, which is waited for
    - if elsewhere or not lists_in_order(listed)
    + if not lists_in_order(listed)
    > test_other_numbers_on_the_host_are_refused
    other slots on the host are believed
    - if len(numbers) != slots.shape[0] or (readable(slots.device) and numbers != slots.tolist()):
    + if len(numbers) != slots.shape[0]:
    a selection of a CPU keeps the plan of other slots
    - key, plans = (fixed, *slots), table.plans
    + key, plans = (fixed, len(slots)), table.plans
    > test_slots_that_a_host_reads_have_the_plan_of_their_requests
    a selection that is loaded under inference mode has tables of its own
    - return super()._of_others(state) | tables | {id(batch): batch}
    + return super()._of_others(state)
    > test_what_is_copied_or_loaded_under_inference_mode_serves_outside[loaded]
tpsample/core/tensors.py
    a pickled batch reads numbers that it no longer writes
    - vars(self).update(state)
    -         self._view()
    + vars(self).update(state)
    > test_a_copy_of_a_batch_lives_by_itself
    a step over slots allocates what it reads of them
    - return torch.index_select(table, dim, index, out=self.take(name, table.dtype, *shape))
    + return torch.index_select(table, dim, index)
    > test_a_step_over_slots_allocates_nothing[controls]
    a request that comes to a slot allocates on the device
    - return self.take(name, values.dtype, *values.shape).copy_(values, non_blocking=True)
    + return values.to(self._device)
    > test_requests_come_and_go_without_allocations_on_the_device[plain]
    memory grows under inference mode
    - with torch.inference_mode(False):  # the next use may be outside of it
    + with torch.no_grad():
    > test_random_steps_of_one_rank_are_the_oracles[controls]
    what is loaded under inference mode keeps tensors of it
    - state = copy.deepcopy(state, self._of_others(state))
    + str(self._of_others(state))
    > test_what_is_copied_or_loaded_under_inference_mode_serves_outside[loaded]
tpsample/request/plan.py
    rows that the host does not know are taken for the first of those that store their logits
    - if self.stores_all and count < self.num_rows:
    + if False:
    > test_rows_without_a_request_may_stand_before_those_that_the_host_does_not_know
    > test_a_request_without_filters_may_stand_before_rows_that_the_host_does_not_know
    the plan of a selection sends to the device
    - return self.numbers
    + return torch.tensor(stored, device=device), self.numbers[1]
    > test_a_captured_step_serves_other_slots_and_other_requests[sample]
tpsample/request/step.py
    the hidden states keep their gradient
    - rows = rows.detach()
    + pass
    > test_steps_with_gradients_leave_nothing_behind
    positions of given logits are in the order of positions
    - rows = self.tensor
    -         if
    + rows = self.tensor.transpose(0, -2)
    +         if
    > test_given_logits_are_verified_alike[1]
tpsample/agreement/held_rows.py
    rows of a weight are joined by what autocast refuses
    - few = weight[[*rows[:16], *rows[-16:]]]
    + few = __import__("torch").cat([weight[:16], weight[-16:]])
    > test_a_sampler_may_be_built_and_called_under_autocast[None-dtype1]
tpsample/agreement/construction.py
    the weight keeps its gradient
    - weight.detach()
    + weight
    > test_steps_with_gradients_leave_nothing_behind
tpsample/agreement/misplaced.py
    a field of a request, given to a call, has no way out
    - if name not in FIELDS:
    + if True:
    > test_a_process_alone_is_told[temperature for LMHeadSampler.__call__]
    an unknown argument has no way out
    - for name in named:
    + for name in ():
    > test_a_process_alone_is_told[softcap for LMHeadSampler]
tpsample/agreement/arguments.py
    a weight on the meta device is taken
    - if weight.is_meta:
    + if False:
    > test_a_process_alone_is_told[a weight without numbers]
tpsample/core/checks.py
    tensors without numbers are taken
    - if by is not None:
    + if False:
    > test_a_process_alone_is_told[rows that are mapped]
    > test_a_process_alone_is_told[tensors that are made up]
    a message is as long as what came
    - return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rstrip()} …"
    + return text
    > test_no_message_of_a_request_is_long[temperature]
    > test_no_message_of_a_record_is_long
    numbers are read that are still to be negated
    - if is_plain and tensor.is_neg():
    + if False:
    > test_numbers_that_are_still_to_be_negated_are_refused
tpsample/record/format.py
    a record of a batch takes a rank's own rows for the head
    - if isinstance(params, SamplingBatch) and "lm_head_weight" in tensors:
    + if False:
    > test_a_head_that_is_not_the_whole_one_is_refused
    a record leaves out filters that only the device knows
    - if batch._table.flagged(UNKNOWN):
    + if False:
    > test_filters_that_only_the_device_knows_are_not_left_out
    a record repeats a prompt that no request looks at beside each token
    - ids if row.reads_output else ()
    + ids
    > test_tokens_that_no_request_looks_at_are_left_out
    a record of penalised rows says nothing of their tokens so far
    - if reading and output_token_ids is None:
    + if False:
    > test_requests_with_tokens_so_far_are_repeated_a_slice_at_a_time
    a record of a batch has the temperatures of its requests
    - replace(request, temperature=temperature)
    + replace(request, temperature=request.temperature)
    > test_a_record_of_a_batch_has_the_temperatures_that_were_written
    a batch with a mask is recorded
    - if getattr(batch, name) is not None:
    + if False:
    > test_a_batch_that_no_record_can_repeat_is_refused
    a file that is not there is no safetensors file
    - raise ValueError(f"cannot be read: {error}") from error
    + raise ValueError(f"not a safetensors file: {error}") from error
    > test_a_file_that_cannot_be_read_is_not_called_a_wrong_one
    a record takes the place of a device
    - if os.path.exists(path) and not os.path.isfile(path):
    + if False:
    > test_a_file_takes_the_place_of_files_alone
    a record takes the place of a link
    - Path(os.path.realpath(_path_of_a_file(name, "written", path)))
    + _path_of_a_file(name, "written", path)
    a record is written whose head nobody can read
    - record.head_of(None)
    + pass
    > test_what_could_not_be_read_again_is_not_written
tpsample/request/as_json.py
    of two values of one name in JSON the last is taken
    - if name in found:
    + if False:
    > test_a_name_that_comes_twice_in_one_object_is_refused
tpsample/cli/generate.py
    more tokens are drawn than a model has positions
    - if max_new_tokens > room:
    + if False:
    > test_more_tokens_than_there_is_room_for_are_refused_before_one_is_drawn[model]
    answers are drawn that no record can hold
    - if record is not None and len(requests) * max_new_tokens > MAX_DRAWS:
    + if False:
    > test_more_tokens_than_there_is_room_for_are_refused_before_one_is_drawn[record]
    a record that rank 0 cannot write stops rank 0 alone
    - if refusal := job.gather(refusal)[0]:
    + if refusal := job.gather(refusal)[job.rank]:
    > test_only_the_rank_that_writes_a_record_needs_its_folder
tpsample/cli/__init__.py
    output that finds no room is a traceback
    - except OSError as error:
    + except ZeroDivisionError as error:
    > test_output_that_finds_no_room_is_one_line
    a reader that closes the pipe makes a command end as after refuted tokens
    - if not isinstance(end.__context__, BrokenPipeError):
    + if True:
    > test_a_reader_that_closes_the_pipe_ends_a_command_without_a_word
tpsample/one_call.py
    one call drops the output so far
    - output_token_ids=output_token_ids,
    + output_token_ids=None,
    > test_one_call_counts_the_tokens_so_far
    requests that are wrong on one rank leave the others waiting
    - sampler.agreement.refuse(wrong)
    + raise
    > test_ranks_are_told_the_same_and_go_on
    draws of no kind on one rank leave the others waiting
    - num_samples) if is_integer(num_samples) else 1
    + num_samples) if 1 // num_samples + 1 else 1
tpsample/agreement/caller_tensors.py
    a weight that was freed is read
    - require_memory(name, tensor)
    + pass
    > test_a_tensor_that_was_freed_on_one_rank_is_named_on_every_rank[torch]
    a mesh in another order than its group is read as the group
    - if mesh.get_coordinate()[axis] != mesh.get_local_rank(axis):
    + if False:
    > agreement/test_dtensor.py::test_anything_else_is_refused_by_name_on_every_rank
tpsample/agreement/step_checks.py
    hidden states that were freed are read
    - require_memory(name, rows)
    + pass
    > test_a_tensor_that_was_freed_on_one_rank_is_named_on_every_rank[torch]
    what was made under inference mode is written to outside of it
    - if tensor.is_inference() and not torch.is_inference_mode_enabled():
    + if False:
    > test_a_step_wrong_on_one_rank_is_told_to_all_in_the_same_words
    a batch that another thread is in is taken
    - self._agreement.hold(batch._table.thread)
    + pass
    > test_a_batch_that_is_busy_on_one_rank_is_told_to_every_rank
    tokens are written over the seeds of a batch
    - ("batch", first, first + held.nbytes),
    + ("batch", first, first),
    > test_a_process_alone_is_told[an output where the batch has its seeds]
    tokens and seeds are written to the same memory
    - if start < other_end and other_start < end:
    + if False:
    > test_a_call_wrong_on_one_rank_raises_the_same_on_every_rank[collective]
tpsample/record/trace.py
    chosen tokens are recorded as likely ones
    - if logprobs is None or shape[0] != rows or shape[1] - chosen <= k:
    + if logprobs is None or shape[0] != rows or shape[1] <= k:
    > test_chosen_tokens_are_not_taken_for_likely_ones
    a trace that is built under inference mode cannot record outside
    -     @ordinary_tensors
    -     def __init__(
    +     def __init__(
    > test_what_is_copied_or_loaded_under_inference_mode_serves_outside[loaded]
tpsample/filters/finish.py
    logprobs do not say how many tokens are chosen
    - logprobs.num_chosen = logprob_rows.chosen.shape[1]
    + pass
    > test_chosen_tokens_are_not_taken_for_likely_ones[step]
""")
