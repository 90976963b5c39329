"""Faults of scores, of ties, and of the bounds that rule tokens out."""

from tests.faults.fault import faults

FAULTS = faults(r"""
tpsample/backends/numba_/kernels/numbers.py
    an overflow of native products is a forced token
    - return F32(np.nan) if product == F32(np.inf) else F32(product)
    + return F32(product)
    > test_an_overflow_is_no_token_and_an_infinite_logit_of_the_caller_is_forced
    native: a NaN has the order of its bits
    - return I32((order | is_nan) & ~(is_nan & I32(-(2**31))))
    + return I32(order)
    > backends/screening/test_words.py::test_numbers_that_are_not_finite_or_nearly_so
    native: the largest weight of four runs is that of three
    - larger(size_bits(c, 0), size_bits(e, 0))
    + size_bits(c, 0)
    > test_sums_are_off_by_no_more_than_their_bound[1.0-37-1-float16]
    native: the least weight of four runs is that of three
    - smaller(size_bits(c, -1), size_bits(e, -1))
    + size_bits(c, -1)
    > test_sums_are_off_by_no_more_than_their_bound[1.0-37-3-float16]
    native: lanes outside of a block reach a threshold
    - return lanes & within
    + return lanes
    > test_no_lane_outside_of_a_block_reaches_a_threshold
    native: a proof leaves out the first number of a row
    -     for d in range(size):
    -         at = U64(d)
    -         a, b
    +     for d in range(1, size):
    +         at = U64(d)
    +         a, b
    > test_one_small_weight_takes_the_proof_away
    native: a NaN leaves the sums beside it their proof
    - high if high == high else F32(np.inf)
    + high
    > test_a_weight_that_is_not_finite_takes_the_proof_of_its_neighbours
    native: a sum that is not decided is trusted
    -     if decided or sums_are_exact(
    +     if True or sums_are_exact(
    > test_a_sum_beside_a_midpoint_is_rounded_to_its_side
tpsample/backends/triton_/kernels/interpreter.py
    an array of one element is no index in an older interpreter
    - int(self.handle.data.item())
    + int(self.handle.data)
    > test_a_number_is_an_index_where_tritons_own_interpreter_raises
tpsample/backends/triton_/kernels/head.py
    an overflow of a kernel's products is a forced token
    - if not GIVEN:
    + if False:
    > test_an_overflow_is_no_token_and_an_infinite_logit_of_the_caller_is_forced
    an infinite logit of the caller is no forced token in a kernel
    - if not GIVEN:
    + if True:
    kernel: the tile of a NaN is not found again
    - return pack(best, tl.where(best != best, first_id, token_id))
    + return pack(best, token_id)
    > test_words_of_tiles_are_those_of_the_stored_logits
    kernel: the word of a tile may be of an id outside the shard
    - inside = tl.where(mask_v, offs_v, TOKEN_MASK)
    + inside = offs_v
    kernel: words of a tile lie where those of another row's samples do
    - (slot * (samples - 1) + sample)
    + (slot + sample)
    kernel: the highest id of equal scores
    - token_id = tl.min(tl.where(holds_best, offs_v[:, None], TOKEN_MASK), axis=0)
    + token_id = tl.max(tl.where(holds_best, offs_v[:, None], 0), axis=0)
    > test_greedy_ties_go_to_the_lowest_id
    a listed tile ends with the list's last group
    - return tl.where(in_list, first + place % GROUP, stop)
    -
    + return first + place % GROUP
    +
    > backends/triton_/test_screening_kernels.py::test_screens_of_hard_heads_leave_the_same_words
    kernel: the last tile is not masked
    - return (ids.first < shard.start) | (ids.first + BLOCK_V > shard.stop)
    + return ids.first < shard.start
    > test_a_column_beside_its_shard_is_no_candidate
tpsample/core/score.py
    a greedy row draws
    - return torch.where(row_noise.random, product - noise.double(), product).float()
    + return (product - noise.double()).float()
    > test_greedy_ties_go_to_the_lowest_id
tpsample/core/row_noise.py
    the order of a text's numbers does not matter to its seed
    - seed = int(low | high << 32)
    + seed = (0 if sample == 0 else seed) ^ int(low | high << 32)
    > test_a_seed_follows_from_the_numbers_that_name_a_text
    a temperature above all others is taken as it is
    - temperature.clamp(max=HOTTEST), 1.0)
    + temperature, 1.0)
    > test_a_draft_at_an_infinite_temperature_is_one
tpsample/noise.py
    a position beyond its bits has the noise of another
    - low, bits = (-(2**63) if name == "seed" else 0), _BITS[name]
    + low, bits = -(2**63), 64
    > test_what_is_no_number_of_the_range_has_no_noise
    a mask of tokens is read as ids
    - x.is_complex() or x.dtype == torch.bool:
    + x.is_complex():
    noise inside a transform is asked for its numbers
    - with suppress(RuntimeError):
    + with suppress(KeyError):
    > test_noise_of_a_transform_is_that_of_its_rows
    noise ends where that of fp32 uniforms does, at 16.6
    - u = _round32(word.float().double() * U_SCALE + low)
    + u = _round32(word.float().double() * U_SCALE + low).clamp(min=2.0**-24)
    > test_planted_tails_win
    noise of 32 bits
    - low = ((quad_xor ^ word) & 0xFFFF).double() * LOW_SCALE + LOW_HALF
    + low = ((quad_xor ^ word) & 0).double() * LOW_SCALE + LOW_HALF
    > test_formula_error
    a token takes another's word of its quad
    - word = torch.stack(quad).gather(0, (ids & 3).unsqueeze(0)).squeeze(0)
    + word = torch.stack(quad).gather(0, (ids & 1).unsqueeze(0)).squeeze(0)
    > test_a_tile_is_a_window_of_the_row
tpsample/backends/torch_/launch.py
    noise is that of the index in the shard
    - scores = score_tile(logits, first_id, noise, sample)
    + scores = score_tile(logits, start, noise, sample)
    > test_shards_agree[torch]
    a filtered row's neighbours draw nothing
    - best[:, drawn] = drawn_best
    + pass
    > filters/test_filters.py::test_tokens_are_the_oracles[0-1]
    padding rows of the weight are seen
    - num_rows = len(self._shard)
    + num_rows = len(self._weight)
    > test_padding_is_never_seen[torch]
    chunks leave out the last rows
    - (num_rows * p // parts for p in (part, part + 1))
    + (num_rows // parts * p for p in (part, part + 1))
    > exchange/test_exchanges.py::test_tokens_are_the_oracles[2-7]
    columns behind the shard are taken for its own
    - step.local_logits[:, start:stop].float()
    + step.local_logits[:, -len(self._shard) :][:, start:stop].float()
    > test_columns_behind_the_shard_are_never_read
tpsample/backends/triton_/kernels/noise.py
    kernel: a temperature above all others is taken as it is
    - tl.minimum(temperature, HOTTEST), 1.0)
    + temperature, 1.0)
    > test_masked_tokens_of_hot_rows_stay_masked
    kernel: a scale is the quotient of fp32 alone
    - scale = fma(left, quotient * LN2, quotient)
    + scale = quotient
    > test_the_scale_of_every_temperature_is_the_rounded_quotient[1.0]
    kernel: noise of 32 bits
    - low = (base ^ (word & 0xFFFF)).to(tl.float32, bitcast=True) - LOW_OFFSET
    + low = (base & 0xFFFF0000).to(tl.float32, bitcast=True) - LOW_OFFSET
    > test_jitted_noise_is_the_definition_bit_for_bit[0]
tpsample/core/word.py
    a row of masked tokens draws one
    - nan, empty = word_key == KEY_NAN, word_key <= KEY_MINUS_INF
    + nan, empty = word_key == KEY_NAN, word_key < KEY_MINUS_INF
    > test_special_scores
    the highest id of equal scores
    - return (key(score) << TOKEN_BITS) | (TOKEN_MASK - token_id)
    + return (key(score) << TOKEN_BITS) | token_id
    > test_the_best_score_wins_and_ties_go_to_the_lowest_id
    no word has a NaN
    - key_of(word).clamp(min=KEY_MINUS_INF)
    + key_of(word)
    > test_no_word_has_the_least_number
    -0.0 is below +0.0
    - bits = (score.float() + 0.0).view(torch.int32)
    + bits = score.float().view(torch.int32)
    > core/test_word.py
tpsample/backends/torch_/decode.py
    the status of every row is OK
    - out.status.copy_(status.amax(dim=0))
    + out.status.copy_(status[0] * 0)
    > sampler/test_golden.py::test_one_rank_draws_the_committed_tokens[torch-None-parts0]
    an output shares the batch's seeds
    - out.seeds.copy_(seeds)
    + out.seeds = seeds
    > test_outputs_do_not_change_when_the_batch_does
tpsample/reference.py
    all samples have the scores of the first
    - row_noise.positions.unsqueeze(1), sample)
    + row_noise.positions.unsqueeze(1), 0)
    > test_the_scores_of_a_sample_do_not_wait_for_those_before_it
    the definition draws at a position below 0
    - read_positions(positions, batch)
    + pass
    > test_a_process_alone_is_told[sample of the reference at a position below 0]
    a bias of one value is every row's in the definition
    - check_tensor("bias", bias, (), (rows,), lm_head_weight.device, of_rows)
    + pass
    > test_a_process_alone_is_told[a bias of one value for the reference]
    a row whose scores all overflow keeps what its filters leave
    - kept &= can_be_drawn(logits, view).any(dim=1, keepdim=True)
    + can_be_drawn(logits, view)
    > test_a_row_whose_scores_all_overflow_has_neither_a_token_nor_a_set[torch-None-fields0]
    a raw row has logprobs beside a NaN that a mask removes
    - has_values = (drawn >= 0).all(dim=1) & ~logits.isnan().any(dim=1)
    + has_values = (drawn >= 0).all(dim=1)
    > test_a_logit_that_is_no_number_counts_where_no_mask_has_removed_it
    top_k keeps no ties
    - (keep_ties & (logits == kth))
    + (keep_ties & (logits > kth))
    > test_the_kept_set_is_the_oracles
    top_p keeps no ties
    - before[:, 1:].masked_fill_(keep_ties & (logits[:, 1:] == logits[:, :-1]), 0)
    + pass
    the kept set has k + 1 tokens
    - in_top_k = (rank < top_k) | (keep_ties & (logits == kth))
    + in_top_k = (rank <= top_k) | (keep_ties & (logits == kth))
    > test_kept_sets_worked_out_by_hand
tpsample/backends/triton_/kernels/masses.py
    kernel: a row is weighed by what a caller wrote
    - temperature = safe_temperature(temperature)
    + temperature = temperature
    > sampler/test_written_temperatures.py::test_every_backend_takes_the_token_of_the_definition
tpsample/backends/numba_/kernels/arrays.py
    native: a step makes the caller's tensors unresizable
    - shape, dtype, strides = tuple(tensor.shape), DTYPES[tensor.dtype], None
    + shape, dtype, strides = tuple(tensor.shape), DTYPES[tensor.dtype], None
    +     tensor.detach().numpy() if tensor.dtype != torch.bfloat16 else None
    > test_the_storage_stays_resizable
    native: an array does not keep its tensor
    - memory.tensor = tensor
    + memory.tensor = None
    > test_an_array_keeps_its_tensor
tpsample/backends/numba_/launch.py
    native: a copy begins at the first id of the shard
    - residual, first_id - copy.lane, width)
    + residual, first_id, width)
    > test_a_copy_is_read_to_its_ends_and_no_further
    native: a weight is read where it lay first
    - if self._numbers is None or self._address != self._weight.data_ptr():
    + if self._numbers is None:
    > test_the_next_step_reads_the_new_weight_or_raises
    native: a row made greedy by its temperature has logprobs of few ids
    - whole = is_greedy & np.isin(index, logprob_rows.row_list)
    + whole = is_greedy & False
    > test_logprobs_of_a_row_made_greedy_by_its_temperature_are_of_all_ids
tpsample/backends/numba_/kernels/head.py
    native: every row of a batch with tables has controls
    - return len(head.slots) == 0 or (len(head.mask) == 0 and head.wants[head.slots[row]] == 0)
    + return len(head.slots) == 0
    > test_a_request_with_penalties_leaves_the_other_rows_plain
    native: a row with penalties alone is plain
    - head.wants[head.slots[row]] == 0)
    + head.wants[head.slots[row]] != 2)
    native: the lower end of a product is taken for its upper end
    - out[j] = up(products[j] + error)
    + out[j] = up(products[j] - error)
    > test_scores_are_below_their_upper_bounds
    native: a mask is left out
    -     if len(head.mask):
    -         for i in range(count):
    +     if False:
    +         for i in range(count):
    > backends/screening/test_words.py::test_words_of_many_rows_are_those_of_the_definition
    native: a bias of the head changes the ends of no block
    - changes = head.logit_scale != F32(1) or head.logit_softcap != F32(0) or len(head.bias) > 0
    + changes = head.logit_scale != F32(1) or head.logit_softcap != F32(0)
    native: ids in the second of two blocks of the state have no controls
    - return touched[column // TOUCHED_BLOCK] | touched[(column + count - 1) // TOUCHED_BLOCK]
    + return touched[column // TOUCHED_BLOCK]
    > test_blocks_that_meet_two_of_the_state_have_the_controls_of_both
    native: a bias is not looked for
    - if wants & touched & I32(HAS_BIAS):
    + if False:
    native: a mask is looked for in the first 32 ids of a block
    - for word in range(column >> 5, ((column + block.count - 1) >> 5) + 1):
    + for word in range(column >> 5, (column >> 5) + 1):
    > test_kept_sets_have_the_controls_of_any_part_of_a_block
    native: drafted tokens change the ends of no block that has no history
    - touched |= I32(HAS_HISTORY)
    + touched |= I32(0)
    > test_drafted_tokens_have_penalties_in_blocks_that_have_none
    native: drafted tokens of a block without a history have no penalty
    - if wants & (touched | drafted) & I32(HAS_HISTORY):
    + if wants & touched & I32(HAS_HISTORY):
    native: drafts are left out of the history
    - history[drafts[k] - first_id] += I32(2)
    + history[drafts[k] - first_id] += I32(0)
    > test_drafts_count_as_output
tpsample/backends/numba_/kernels/store.py
    native: a list of first tokens has no masked ones
    - if logits[j] == F32(-np.inf):
    + if False:
    > test_masked_tokens_follow_where_a_head_leaves_fewer_than_are_asked_for
    native: a plain row beside others stores no processed logits
    -             if len(memory.processed):
    -                 memory.processed[stored_row, v] = logit
    -             push(first
    +             push(first
    > test_a_plain_row_stores_its_logits_before_and_after_controls
    native: a whole plain row beside others stores no processed logits
    - if plain[i] and products.proved[i] and not len(memory.processed):
    + if plain[i] and products.proved[i]:
    native: blocks of flat rows are computed id by id
    - return PAIR * pairs > block.count * (FEW_ROWS + num_rows)
    + return False
    > test_flat_rows_compute_whole_blocks
    native: the ids of flat rows wait in vain
    - may_wait[i] &= 2 * stored <= WAITING
    + may_wait[i] &= True
    native: ids of a block with controls wait as those of products do
    - waits[i] = may_wait[i] and products.proved[i] and not changed
    + waits[i] = may_wait[i] and products.proved[i]
    > test_kept_sets_have_the_controls_of_any_part_of_a_block
    native: logits of a listed row are computed behind a NaN
    - lanes if tops[i] == tops[i] else U64(0)
    + lanes
    > test_a_row_with_a_nan_computes_few_logits
    native: a filter takes a NaN for less than its threshold
    - if upper[i, j] < threshold:
    + if not upper[i, j] >= threshold:
    > backends/screening/test_filters.py::test_numbers_that_are_not_finite_or_nearly_so
    native: the threshold of min_p is above the least kept logit
    - step - DOWN * (abs(F64(top)) - step) - 1e-30
    + step + F64(2.0**-12) * (abs(F64(top)) - step)
    > test_the_threshold_of_min_p_is_reached
    native: an id that waits is taken for its upper bound
    - least = -up(products.errors[i] - products.values[i, j])
    + least = upper[i, j]
    > test_logits_nearer_to_the_last_kept_than_their_bounds
    native: ids that waited when there is no more room are forgotten
    - store_waiting(shared, waiting, i, threshold, top_k[i], first, computed)
    -                     ids[i
    + count[i] = 0
    +                     ids[i
    > test_more_ids_than_can_wait
    native: the threshold of a top_k is that of one less
    - push(bounds[i], top_k[i], least)
    + push(bounds[i], max(top_k[i] - 1, 1), least)
    > test_filters_that_keep_all_that_is_listed
    native: listed words are those of another row
    - push(first[stored_row], top_k, pack(
    + push(first[i], top_k, pack(
    > sampler/test_golden.py::test_one_rank_draws_the_committed_tokens
tpsample/backends/numba_/kernels/threads.py
    native: a thread takes one part
    -         builder.branch(loop)
    -         builder.position_at_end(end)
    +         builder.branch(end)
    +         builder.position_at_end(end)
    > test_an_error_of_a_part_is_raised_after_all_parts
    native: subnormal numbers are flushed where the thread flushes them
    - _raw(32)(~FLUSHED)
    + _raw(32)(~0)
    > test_flushed_subnormal_numbers_change_no_word
tpsample/backends/numba_/kernels/inputs.py
    native: a range without ids has a block
    - if end <= begin:
    + if False:
    > test_blocks_have_the_ids_of_a_range_and_no_others
tpsample/core/machine.py
    Numba that compiles nothing is taken
    -  if disabled else None
    +  if None else None
    > core/test_machine.py::test_a_cpu_without_it
    Numba that is not whole is taken
    - modules = {name: importlib.import_module(f"numba.{name}") for name in _NEEDED}
    + modules = {name: importlib.import_module(f"numba.{name}") for name in _NEEDED[:1]}
tpsample/backends/numba_/kernels/kernel_cache.py
    the cache of kernels does not see that the noise has changed
    - "core/*.py", "noise.py")
    + "core/*.py", "noises.py")
    > test_the_folder_is_named_by_every_file_that_decides_what_kernels_compute
    cache: code of a damaged file is loaded
    - if digest != _digest(name.encode(), code):
    + if not digest:
    > test_a_file_that_is_cut_is_compiled_anew
    > test_a_flipped_bit_is_seen_before_anything_is_loaded
    cache: each process names its code anew
    - _digest(_source(code.co_filename), signature.encode()).hex()[:16]
    + hash(signature)
    > test_another_process_compiles_from_the_end
    cache: a file does not say whose code it has
    -     for part in parts:
    +     for part in parts[-1:]:
    > test_the_code_of_another_kernel_is_not_taken
    cache: what the handler of a signal raises is lost
    - if _from_a_signal(error):
    + if False:
    > test_what_the_handler_of_a_signal_raises_reaches_the_caller
    cache: a file that others can write is loaded
    -     if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
    +     if False:
    > test_what_others_can_write_is_not_run
    cache: a file that another user owns is loaded
    - status.st_uid not in (0, os.geteuid()):
    + status.st_uid < 0:
    cache: a folder that went away stays away
    -         path.mkdir(mode=0o700, exist_ok=True)
    +         str(path)
    > test_a_folder_that_goes_away_is_made_again
    cache: everybody may read the folder
    - path.mkdir(mode=0o700, exist_ok=True)
    + path.mkdir(exist_ok=True)
    > test_the_folder_is_its_owners
    cache: code that was seen is forgotten
    -                 self._loaded[name] = code
    -             return name in self._loaded
    +                 return True
    > test_code_that_was_seen_needs_no_file
    cache: what cannot be saved fails a call
    -     except Exception as error:
    +     except ValueError as error:
    > test_a_full_disk
    > test_a_cache_that_cannot_be_made
    cache: what is left of a full disk stays there
    -             os.unlink(temporary)
    +             str(temporary)
    > test_a_full_disk
    cache: all CPUs share a folder
    - binding.get_host_cpu_name(), features
    + features
    > test_another_cpu_has_a_folder_of_its_own
    cache: a setting that changes code is left out
    - *("BOUNDSCHECK", "DEBUGINFO_DEFAULT",
    + *("DEBUGINFO_DEFAULT",
    > test_a_setting_that_changes_code_has_a_folder_of_its_own
tpsample/backends/numba_/kernels/compile_lock.py
    cache: a process that is stuck is waited for
    - elif time.monotonic() > heard + STUCK_S:
    + elif time.monotonic() < heard:
    > test_a_process_that_does_not_end_to_compile_is_not_waited_for
    cache: a process does not say that it compiles
    -         os.utime(file)
    +         str(file)
    > test_a_process_that_compiles_says_that_it_lives
    cache: nobody waits for a process that compiles
    -     return True
    -
    -
    - def _beat(
    +     return True
    +
    +
    + _take = bool
    +
    +
    + def _beat(
    > test_whoever_compiles_is_waited_for_and_the_code_is_loaded
    cache: a child has the locks of its parent
    -     while _opened:
    +     while False:
    > test_a_process_may_fork_while_a_thread_compiles
tpsample/backends/numba_/kernels/products.py
    native: the fp32 bound leaves out the sum
    - spread = (depth_of(products) + 4) * UNIT
    + spread = 4 * UNIT
    > test_the_fp32_bound_is_its_formula
    native: a block without a proof is trusted
    -         products.values[i] = np.nan
    +         products.values[i] = -3e38
    > backends/screening/test_words.py::test_numbers_that_are_not_finite_or_nearly_so
    native: one row is multiplied by a multiple of four ids
    -     for i in range(block.count - 3 * apart):
    -         id_, step
    +     for i in range(apart):
    +         id_, step
    > test_screened_rows_with_filters_draw_as_from_all_logits
    native: the fourth id of four has the product of the third
    - c, d = c + scaled(numbers[third + at]) * h, d + scaled(numbers[fourth + at]) * h
    + c, d = c + scaled(numbers[third + at]) * h, d + scaled(numbers[third + at]) * h
    > test_every_weight_of_16_bits_is_multiplied_exactly
    native: an id alone reads beyond its weights
    - (i + 3 * apart, 0, 1)
    + (i + 3 * apart, 1, 1)
    > test_a_weight_of_any_width_is_read_to_its_end_and_no_further
    native: fp32 rows of any width are multiplied as they lie in memory
    - if size % PADDING != 0:
    + if False:
    > test_a_weight_of_any_width_is_read_to_its_end_and_no_further
    native: sums that are rounded are said to be exact
    - largest <= 2.0**53 * rows.quanta
    + largest <= 2.0**55 * rows.quanta
    > test_a_proof_holds_up_to_its_limit_and_no_further
    native: a sum that is rounded is said to be off by nothing
    - rows_ratio * ratio <= 2.0**53
    + rows_ratio * ratio <= 2.0**55
    native: the norm of weights is that of one of them
    - norm = 1.01 * math.sqrt(products.size) * most
    + norm = 1.01 * most
    native: a weight that is no number is multiplied as a number
    - if len(products.hidden) == 1 and not math.isfinite(most):
    + if False:
    > test_every_weight_of_16_bits_is_multiplied_exactly
tpsample/backends/numba_/kernels/vectors.py
    native: the last id of a block has the product of the one before
    - builder.sub(count, constant(1))
    + builder.sub(count, constant(2))
    > test_products_are_within_the_bound
tpsample/backends/numba_/kernels/noise.py
    native: a temperature above all others is taken as it is
    - smaller(F64(temperature), HOTTEST)
    + F64(temperature)
    > test_the_scale_of_any_temperature_is_that_of_the_definition
    native: the bound of the noise has no margin
    - math.log2(math.log2(math.e)) + 1e-5)
    + math.log2(math.log2(math.e)) - 1e-4)
    > test_the_noise_is_below_its_bound
tpsample/backends/numba_/kernels/first_logits.py
    native: the last of the first tokens is known by its upper end
    - -up(error_bound[i] - near_largest(ends, top_k[i], bins))
    + near_largest(ends, top_k[i], bins)
    > test_logits_nearer_to_the_last_kept_than_their_bounds
    native: a row with a NaN computes the rest of its first tokens
    - is_nan[i] = ends[v] != ends[v]
    + is_nan[i] = False
    > test_a_row_with_a_nan_computes_few_logits
    native: one of the first tokens is left out
    - near_largest(ends, top_k[i], bins)
    + near_largest(ends, larger(top_k[i] - 1, 1), bins)
    > test_no_more_is_computed_than_top_k_asks_for
    native: fewer ends than asked for reach the number near the largest
    - bins[digit] < left
    + bins[digit] <= left
    > test_a_number_that_the_largest_reach
tpsample/backends/numba_/passes.py
    native: beside listed rows the others have no first words
    - listed = NOT_LISTED if self.found is None else self.found.first
    + listed = NOT_LISTED if self.found is None else torch.ones_like(self.found.first)
    > sampler/test_golden.py::test_one_rank_draws_the_committed_tokens
    native: a token stands before itself
    - self._marks(best, thresholds, count) + 1
    + self._marks(best, thresholds, count)
    > test_a_rejection_decides_what_the_definition_does
tpsample/backends/numba_/kernels/draw.py
    native: upper ends have no error_bound
    - slacks[i] = slack_of(ends[i], lower, block)
    + slacks[i] = F32(0)
    > backends/screening/test_words.py::test_rows_that_store_their_logits
    native: the exact logits of a whole block are not stored
    - if storing[i] or whole:
    + if storing[i]:
    > test_the_logits_of_the_best_scores_of_flat_rows_are_stored
    native: logits of a whole block are computed once more
    - : 0 if whole else rows.hidden.shape[1]
    + : rows.hidden.shape[1]
    > test_flat_rows_compute_whole_blocks
    native: order words behind a NaN are computed
    - if key_of(heap[0]) == KEY_NAN:
    + if False:
    > test_a_row_with_a_nan_computes_few_logits
    native: the stored logit of a best word stays an upper end
    -                     stored[local] = logit
    +                     stored[local] = max(stored[local], logit)
    > test_draws_of_rough_rows
    native: the largest logit of a rough row is that of the last block
    - computed += 1
    -         push(heap, len(heap), pack(logit, block.base + j))
    + computed += 1
    +         heap[0] = pack(logit, block.base + j)
    > backends/screening/test_filters.py::test_screened_rows_with_filters_draw_as_from_all_logits
tpsample/backends/numba_/kernels/best_scores.py
    native: a row is decided by a mark that may be kept
    - decided[i] &= word > 0 and word == sure_word
    + decided[i] &= word > 0
    > test_what_is_decided_is_as_from_the_sums
tpsample/backends/numba_/kernels/ends.py
    native: the least sums have the logits that may be below a mark
    - edges[c] = up(marks[c] + error_bound) + F32(TINY)
    + edges[c] = marks[c]
    > test_sums_are_within_their_bounds
    native: the total of a rough row has what min_p cuts
    - marks[num_scores] = value_of(least) if least > LOWEST_DRAWABLE else F32(-np.inf)
    + marks[num_scores] = F32(-np.inf)
    > test_sums_are_within_their_bounds
tpsample/backends/numba_/kernels/passes.py
    native: a total of top_p leaves out what is below every mark
    - if largest < smaller(least, of_total):
    + if largest < least:
    > test_rows_that_are_done_are_left_out
    native: a mark is not counted
    - number += words[j] >= mark
    + number += words[j] > mark
    > test_sums_down_to_a_word
    native: few tokens of every sample have the noise of the first
    - stream_of(noise, i, s))
    + stream_of(noise, i, 0))
    > test_draws_of_top_words_are_those_of_the_definition
tpsample/backends/numba_/kernels/cuts.py
    native: a kept set ends before its last token
    - if words[j] >= least and number < room:
    + if words[j] > least and number < room:
    > test_sums_down_to_a_word
    native: words of a set that differ in one digit of their keys alone stay as they were
    - shared |= number == count
    + shared |= number > 1
    native: equal logits are listed from the last id on
    - for j in range(count):
    -             word = words[j] if first else spare[j]
    + for j in range(count - 1, -1, -1):
    +             word = words[j] if first else spare[j]
    native: the last of some equal logits is left out
    - while left > 0 and column + 1 < len(logits):
    + while left > 1 and column + 1 < len(logits):
    > test_a_search_by_digits_finds_what_the_definition_does
    native: a search passes by the least logit of a prefix
    - near += I32(not (part[j] < lowest or part[j] > highest))
    + near += I32(not (part[j] <= lowest or part[j] > highest))
tpsample/backends/numba_/kernels/masses.py
    native: a mass is truncated
    - low = (power * HALF - (shifted - ROUNDER)) * HALF + ROUNDER
    + low = (power * HALF - (shifted - ROUNDER)) * HALF - F32(0.5) + ROUNDER
    > test_a_search_by_digits_finds_what_the_definition_does
tpsample/backends/screening/int8_copy.py
    residual norms are 5 % too small
    - round_up(lost.norm(dim=1))
    + round_up(0.95 * lost.norm(dim=1))
    > test_the_8_bit_bound_is_tight
    a change of the weight that torch does not count is not noticed
    - return torch.equal(sum_rows(self._weight[some], self._key), self._sums[some])
    + return True
    > test_a_change_of_one_row_is_found_within_a_round
    a copy in blocks begins at the first lane
    - rows = slice(ids.start + lane, ids.start + lane + len(exact))
    + rows = slice(ids.start, ids.start + len(exact))
    > test_a_copy_in_blocks_has_the_numbers_of_the_rows
tpsample/backends/numba_/kernels/byte_dots.py
    native: high bytes count as much as low ones
    - more = builder.shl(builder.load(of_high[r][i]), eight)
    + more = builder.load(of_high[r][i])
    > test_products_of_bytes_are_those_of_whole_numbers
    native: bytes of weights have a sign
    - for bits in (8, 255))
    + for bits in (8, 127))
    > test_processors_without_an_instruction_do_without
tpsample/backends/numba_/kernels/int8.py
    native: no column of hidden states has 16 bits
    - np.empty(num_groups // WIDE, I64)
    + np.empty(num_groups // 2**30, I64)
    > test_columns_far_above_the_others_leave_few_candidates
    native: what hidden states lose is left out of the bound
    - F32((lost + DEFINITION_ERROR
    + F32((0.0 * lost + DEFINITION_ERROR
    > test_products_are_within_the_bound
    native: the residual of the copy is left out of the bound
    - (of_norm * norm[j] + of_residual * residual[j] + rest)
    + (of_norm * norm[j] + rest)
    native: what makes weights unsigned stays in their products
    - I32(sums[j] - surplus)
    + I32(sums[j])
tpsample/backends/screening/bound.py
    norms are rounded to nearest
    - return (values * (1.0 + 4 * UNIT) + TINY).float()
    + return values.float()
    > test_norms_are_rounded_up
tpsample/backends/triton_/kernels/screening.py
    kernel: the bound is 5 % too small
    - bound = tl.load(bounds.residual_ptr + row_v)[:, None] * norm[None, :]
    + bound = tl.load(bounds.residual_ptr + row_v)[:, None] * (0.95 * norm)[None, :]
    > test_the_bound_is_used_up
    kernel: a group that may hold a NaN is not listed
    - upper = tl.where(upper == upper, upper, float("inf"))
    + upper = tl.where(upper == upper, upper, float("-inf"))
    > test_what_is_not_a_number_goes_the_whole_way
tpsample/backends/triton_/kernels/limbs.py
    kernel: what the limbs leave of a hidden state is forgotten
    - error = tl.sqrt(tl.sum(lost_squares, axis=0)) * unit * UP + ACCUMULATION * norm + TINY
    + error = ACCUMULATION * norm + TINY
    > test_what_the_limbs_lose_counts
    kernel: bars of the step before
    - tl.store(row_lower_ptr + sample * num_rows + row, float("-inf"))
    + pass
    > test_a_screen_forgets_the_step_before_at_any_batch_size
tpsample/core/exact_sum.py
    exact sums are made on the default device
    - dtype=torch.float64, device="cpu")
    + dtype=torch.float64)
    > test_a_default_device_enters_no_sum
tpsample/agreement/step_checks.py
    a changed weight is not noticed
    - if copy is not None and not copy.is_current():
    + if False:
    > test_the_next_step_reads_the_new_weight_or_raises
    seeds are drawn before the ranks agree
    - controls, shard = batch._table.controls, self._settings.shard
    + batch._draw_seeds(self._settings.seeds)
    +             controls, shard = batch._table.controls, self._settings.shard
    > test_a_refused_call_draws_no_seeds
""")
