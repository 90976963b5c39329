"""Faults of drafts and of their verification."""

from tests.faults.fault import faults

FAULTS = faults(r"""
tpsample/speculative/drawn_drafts.py
    drafts of another law are not told of
    - if self._variance < 1 or abs(
    + if True or abs(
    > test_drafts_that_are_no_draws_of_their_law_are_told_of_once[sharper]
    drafts are compared with the law of another temperature
    - mean += (q * log).sum(dim=2)
    + mean += (q * log).sum(dim=2) * 1.2
    > test_drafts_that_are_no_draws_of_their_law_are_told_of_once[right]
    drafts of greedy rows are looked at
    - random = verification.rows.noise.random.view(laws.drafts.shape) & (laws.drafts >= 0)
    + random = laws.drafts >= 0
    > test_drafts_that_are_no_draws_of_their_law_are_told_of_once[greedy]
tpsample/speculative/acceptance.py
    a position without a token has a set
    - emitted = (verified.token_ids >= 0).flatten()
    + emitted = (verified.token_ids >= -1).flatten()
    > test_a_position_without_a_token_has_no_set
    calls that differ are not compared before a verification draws
    - sampler.agreement.compare()
    + pass
    > test_calls_that_differ_raise_the_same_naming_what_does
    what travels with the words is of one rank
    - if payloads is None else payloads[0]
    + if payloads is None else payloads[0][:1]
    > test_every_rank_count_emits_the_oracles_tokens
    a draft that a ratio refused has a kept set
    - kept_sets_of(cut, batch, ranks, emitted)
    + kept_sets_of(cut, batch, ranks, emitted | True)
    > test_sets_are_those_of_the_definition[rejection-1]
    an output without drafts has the seeds of the batch
    - seed=batch.seed[::width].clone(),
    + seed=batch.seed[::width].contiguous(),
    > test_without_a_draft_every_row_takes_its_plain_step[torch]
    a verification keeps what a filter cuts
    - cut = ends.maximum(cut)
    + cut = ends.minimum(cut)
    > test_special_rows[1]
tpsample/core/acceptance.py
    every position of a verification has the noise of the first
    - return (positions.unsqueeze(1) + index).flatten()
    + return (positions.unsqueeze(1) + 0 * index).flatten()
    > test_a_perfect_drafter_needs_a_step_per_k_plus_1_tokens
    a draft is accepted without its own law
    - return leading((u * q < p) & (q > 0))
    + return leading((u < p) & (q > 0))
    > test_acceptance_is_exactly_as_published
    a position without a draft is accepted
    - return leading((u * q < p) & (q > 0))
    + return leading(u * q <= p)
    > test_special_rows[1]
    recovery shares the noise of the drafts
    - DOMAIN_DRAFT = 0x61636370, 0x72637672, 0x64726674
    + DOMAIN_DRAFT = 0x61636370, 0x64726674, 0x64726674
    > test_the_emitted_law_is_the_targets
    the next call meets the numbers of the last one
    - at = seed.unsqueeze(1), positions.unsqueeze(1) + index, index
    + at = seed.unsqueeze(1), positions.unsqueeze(1) + index, 0
    > test_the_streams_are_uniform_independent_and_pinned
tpsample/backends/torch_/verification.py
    a block recovers as token by token
    - residual.share_weight(coefficient, total.gather(1, index)),
    + residual.share_weight(torch.ones_like(coefficient), total.gather(1, index)),
    > test_rows_that_stop_within_a_block_recover_at_its_coefficient[torch]
    the bonus token is of the residual
    - q *= (own > -torch.inf) & (drafts[:, :count] >= 0).unsqueeze(2)
    + q *= own > -torch.inf
    > test_every_rank_count_emits_the_oracles_tokens[1]
    a row of padding recovers a token
    - good &= self.sampled.gather(1, last) >= 0
    + pass
    > test_every_method_emits_nothing_for_padding[block-torch]
tpsample/core/residual.py
    a residual has its sign lost
    - draft_weight)).clamp_(min=0)
    + draft_weight)).abs_()
    > test_the_emitted_law_is_the_targets
    the lowest bits of a weight do not count
    - rest = mass * middle + (mass * low >> LIMB)
    + rest = mass * middle
    > test_a_share_is_the_product_rounded_down
tpsample/backends/triton_/kernels/laws.py
    a kernel of laws cuts the last token that is kept
    - mark, key = mark_of(cut),
    + mark, key = mark_of(cut + 1),
    > test_every_stage_finds_the_integers_of_the_definition[triton-rejection-None]
    a kernel of laws keeps no NaN
    - upto(between(logits, LOWEST, HIGHEST), ids, mark)
    + upto(logits, ids, mark)
    a program leaves out all blocks but its first
    - last = tl.minimum(first + blocks_each,
    + last = tl.minimum(first + 1,
    the lower half of a mass has no part in the lower half of a share
    - (product(l, b) >> 20))
    + 0)
    > test_every_stage_finds_the_integers_of_the_definition[triton-block-torch.float32]
    a kernel sums what the draft has over the target
    - by_thread(tl.maximum(left, tl.zeros_like(left)))
    + by_thread(tl.abs(left))
tpsample/backends/triton_/kernels/acceptance.py
    a kernel does not see a forced token
    - tl.load(temperature_ptr + place) >= GREEDY_BELOW) | (top == float("inf"))
    + tl.load(temperature_ptr + place) >= GREEDY_BELOW)
    > test_every_stage_finds_the_integers_of_the_definition[triton-rejection-None]
    a kernel keeps a draft that its drafter excludes
    - tl.where(draft_mass > 0, draft, NO_TOKEN)
    + draft
    > test_every_stage_finds_the_integers_of_the_definition[triton-block-torch.float32]
    a kernel does not cap the coefficient of a block
    - last = tl.minimum(last * at_index(ratios, index, i), 1.0)
    + last = last * at_index(ratios, index, i)
    a kernel emits a token of a failed row
    - token = tl.where(drawn & (status == 0), token, NO_TOKEN)
    + token = token + 0 * status
    > test_special_rows_by_kernels[triton]
tpsample/backends/numba_/kernels/laws.py
    a native kernel recovers every position by the noise of the first
    - U32(step), U32(step >> U64(32)), U32(i), DOMAIN_RECOVERY,
    + U32(step), U32(step >> U64(32)), U32(0), DOMAIN_RECOVERY,
    > test_every_stage_finds_the_integers_of_the_definition[numba-rejection-None]
    native: a draft of a NaN's law is accepted
    - if key_of(draft_word) == KEY_NAN and given[row, i] >= 0 and status[row, i] == OK:
    + if False:
    > test_every_stage_finds_the_integers_of_the_definition
    native: a greedy law keeps more than its first token
    - cut[row, i] = word if certain else I64(LOWEST_DRAWABLE)
    + cut[row, i] = I64(LOWEST_DRAWABLE)
    native: a draft that its drafter excludes stays
    - if draft_mass <= 0:
    + if False:
    native: a chance above one passes the next position
    - chain = smaller(chain * (p / q if q > 0.0 else 0.0), 1.0)
    + chain = chain * (p / q if q > 0.0 else 0.0)
    native: a uniform is that of the next position
    - elif stop < 0 and not (q > 0.0 and uniform(seed[row], position[row], i) * q < p):
    + elif stop < 0 and not (q > 0.0 and uniform(seed[row], position[row], i + 1) * q < p):
    native: the shortest prefix that passes is taken
    - if uniform(seed, position, i - 1) * (left + 1.0 - c) < left:
    + if accepted == 0 and uniform(seed, position, i - 1) * (left + 1.0 - c) < left:
    native: the residuals of one rank decide
    - sums[i] += gathered[rank, 1, row, i]
    + sums[i] = gathered[rank, 1, row, i]
    native: a row that has failed emits a token
    - good = status[row, stop] == OK and sampled[row, stop] >= 0
    + good = True
    native: tokens behind the last are emitted
    - token_ids[row, i] = drafts[row, i] if i < stop else I64(NO_TOKEN)
    + token_ids[row, i] = drafts[row, i]
    a native kernel bounds logarithms from below
    - ABOVE = F32(0.0872 - 127.0)
    + ABOVE = F32(-2.0 - 127.0)
    > test_every_rank_count_emits_the_oracles_tokens[1]
    a native kernel lets a residual be negative
    - left[j] = larger(share, I64(0))
    + left[j] = abs(share)
    > test_every_stage_finds_the_integers_of_the_definition[numba-block-torch.float32]
tpsample/backends/triton_/kernels/drafts.py
    a kernel drafts by the noise of another index
    - block_scores(logits.to(tl.float32), first_id, draw, sample, DOMAIN)
    + block_scores(logits.to(tl.float32), first_id, draw, 0, DOMAIN)
    > test_words_of_drafts_are_those_of_the_definition[triton-0-torch.float32]
tpsample/backends/numba_/drafts.py
    a native kernel drafts by the noise of tokens
    - first_sample=sample, domain=domain)
    + first_sample=sample)
    > test_words_of_drafts_are_those_of_the_definition[numba-0-torch.float32]
tpsample/backends/numba_/kernels/noise.py
    a native kernel draws drafts of greedy rows
    - scale[i], random[i] = F32(1), F32(0)
    + scale[i], random[i] = F32(1), F32(1)
    > test_words_of_drafts_are_those_of_the_definition[numba-0-torch.float32]
tpsample/sampler.py
    seeds are drawn in the middle of another thread's step
    -         with self.agreement:
    -             try:
    -                 self.checks.ready()
    -                 check_batch(
    +         if True:
    +             try:
    +                 self.checks.ready()
    +                 check_batch(
    > test_a_call_in_the_middle_of_another_is_told
    a refresh that is wrong on one rank leaves the others waiting
    -                 self.local.refresh()
    -             except Exception as error:
    +                 self.local.refresh()
    +             except ZeroDivisionError as error:
    > test_a_refusal_of_a_call_that_waits_for_no_rank_is_told_to_every_rank
    a warm-up compiles no verification by ratio
    - if num_drafts and compiled:
    + if False:
    > test_verification_is_warm[plain-rejection]
tpsample/output.py
    the bonus token is cut off
    - return index <= num_accepted.unsqueeze(1)
    + return index < num_accepted.unsqueeze(1)
    > test_a_perfect_drafter_needs_a_step_per_k_plus_1_tokens
tpsample/speculative/drafting.py
    an index of NumPy is handed to a launch
    - logits, number = draft_logits.detach(), call.num_samples
    + logits, number = draft_logits.detach(), index
    > test_an_index_of_another_library_is_its_number[numpy]
    no rows are drafted as some are
    - if call.rows == 0:
    + if False:
    > test_no_rows_have_no_drafts[numba-2]
    drafts of another position are taken
    - here & (at != positions + draft.index)
    + here & (at != at)
    > test_drafts_of_other_positions_are_refused[rejection]
    drafts of another temperature are taken
    - if theirs is not None and (differs
    + if theirs is None and (differs
    > test_drafts_of_another_temperature_are_refused[rejection]
    the logits of a draft may be written over
    - written = None if logits.is_inference() else logits._version
    + written = None
    > test_logits_that_were_written_over_those_of_another_draft_are_refused[rejection]
    drafts know the temperature that their batch has now
    - temperature = noise.temperature.clone() if
    + temperature = noise.temperature if
    > test_drafts_of_another_temperature_are_refused[rejection]
    drafts of another verification are taken
    - if (draft.method, draft.index) != (method, index):
    + if False:
    > test_drafts_bring_their_law[rejection]
tpsample/speculative/reference.py
    the definition drafts for rows that are not drawn
    - outside |= undrawn.rows.unsqueeze(1)
    + pass
    > test_every_method_emits_nothing_for_padding[rejection-torch]
tpsample/record/verify.py
    any of several infinite scores is near to the best
    - return torch.inf if math.isnan(apart) else apart
    + return apart
    > test_another_token_of_an_infinite_score_is_refuted
tpsample/record/format.py
    a record has the token that stands for a failed row
    - "token_ids": ids.masked_fill(failed, word.NO_TOKEN),
    + "token_ids": ids,
    > test_a_row_that_failed_has_no_token_whatever_names_it
    a record has rows that were not drawn
    - if undrawn:
    + if False:
    > test_what_could_not_be_read_again_is_not_written
tpsample/record/trace.py
    a trace mixes rows that have moved
    - if seeds != self._seeds:
    + if False:
    > test_rows_that_moved_are_seen_by_their_seeds
tpsample/agreement/construction.py
    a process alone takes the shard that it holds as the head
    - if isinstance(group, str) and named_by == (None, None)
    + if isinstance(group, str) and False
    > test_a_process_that_has_peers_does_not_sample_by_itself
tpsample/request/batch_checks.py
    padding is text
    - if len(padded) < len(prompts):
    + if False:
    > test_prompts_that_are_padded_are_told_of[padded]
tpsample/agreement/ready_made.py
    probabilities pass as logits
    - looked == LOOKS or not
    + True or not
    > test_a_drafters_probabilities_are_refused
    > test_probabilities_are_refused_where_logits_belong
    two logits, of which one is 1, pass as probabilities
    - logits.shape[-1] < FEW_COLUMNS or
    + logits.shape[-1] < 2 or
    > test_few_logits_may_look_like_probabilities
    logits pass as probabilities
    - sums = sums[sums != 0]
    + sums = sums[:0] + 1 if len(sums) == 0 else sums * 0 + 1
    > test_probabilities_are_refused_where_logits_belong
    the head of a sampler is dropped in silence
    - if any(has.values()) and not inputs.head_applied:
    + if False:
    > test_a_head_of_which_logits_may_lack_a_part_is_refused
tpsample/speculative/verify.py
    a row has one draft more than its length says
    - column < lengths.unsqueeze(1)
    + column <= lengths.unsqueeze(1)
    > test_lengths_end_the_drafts_of_each_row[coupled]
    positions of drafts leave the range of 64 bits
    - if largest + num_drafts >= 2**63:
    + if False:
    > test_positions_after_the_last_one_of_all_are_refused[block]
    positions of drafts in a selection leave the range of 64 bits
    - if not call.position_bytes:
    + if not call.position_bytes or call.batch._undrawn_rows is not None:
    > test_positions_of_a_selection_are_those_of_its_drawn_rows[block]
    a draft that was not emitted has a kept set
    - kept_sets_of(cut, batch, sampler.ranks, has_token)
    + kept_sets_of(cut, batch, sampler.ranks, has_token | True)
    > test_sets_are_those_of_the_definition[coupled-1]
    a draft equal to the token of failed rows is accepted
    - sampler.pipeline.end(step)
    + sampler.pipeline.finish(step)
    > test_a_verification_stops_at_a_failed_position_even_if_its_draft_is_that_token
tpsample/core/checks.py
    a row of a selection is drawn at a position below 0
    - positions if undrawn is None else positions.masked_fill(undrawn.rows, 0)
    + positions if undrawn is None else positions.clamp(min=0)
    > test_positions_of_a_selection_are_those_of_its_drawn_rows[block]
""")
