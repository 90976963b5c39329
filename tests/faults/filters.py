"""Faults of filters and logprobs."""

from tests.faults.fault import Fault, faults, name_of_test
from tpsample.core.rules import ENDING

OF_RULES = [
    Fault(
        f"{rule.name} keeps every token",
        "tpsample/core/rules.py",
        f"end={rule.end.__name__},",
        "end=lambda rows, _: rows.least_word(_ * 0 - torch.inf, rows.temperature),",
        (name_of_test("test_kept_sets_worked_out_by_hand"),),
    )
    for rule in ENDING
    if rule.end is not None
]
"""Of each rule, so that a new one has a set that was worked out by hand."""
FAULTS = OF_RULES + faults(r"""
tpsample/backends/torch_/passes.py
    a best score counts only if it is the last of the order
    - orders >= orders.cummax(dim=2).values
    + orders >= orders.amax(dim=2, keepdim=True)
    > test_only_best_scores_that_can_decide_are_weighed
    a filtered row forgets its NaN
    - torch.where(top.isnan().unsqueeze(1), word.KEY_NAN << word.TOKEN_BITS, words)
    + words
    > test_rows_with_a_nan_say_so_whichever_filter_they_have[torch]
    the rejection keeps no ties
    - return torch.where(thresholds.keep_ties.unsqueeze(1) > 0, marks | word.TOKEN_MASK, marks)
    + return marks
    > filters/test_filters.py::test_tokens_are_the_oracles[0-1]
    mass before equal to the limit
    - sure = possible & (mass + error < mass_limit(total - of_total, share))
    -         possible &= mass - error < mass_limit(total + of_total, share)
    + sure = possible & (mass + error <= mass_limit(total - of_total, share))
    +         possible &= mass - error <= mass_limit(total + of_total, share)
    > test_mass_before_equal_to_the_limit_is_too_much
    the first words are looked for in a group too few
    - group = word.token_of(order_words(grouped.amax(dim=2)).topk(count, dim=1).values)
    + group = word.token_of(order_words(grouped.amax(dim=2)).topk(count - 1, dim=1).values)
    > test_first_words_are_those_of_the_definition
    first words: a greedy row keeps what its top_k left
    - .last_cut(last, of_greedy=first[:, 0])
    + .last_cut(last)
    > test_first_words_of_rows_without_a_token_and_of_greedy_ones[torch-step]
    a row with a NaN keeps its first words
    - & ~top.isnan().unsqueeze(1)
    + & True
    > test_what_is_kept_of_first_words
    a given total is not taken
    - total = thresholds.total.where(thresholds.total >= 0, total)
    + pass
tpsample/backends/torch_/decode.py
    a filtered row that is lost has a token
    - (place < own.shape[1]) & ~lost, best)
    + (place < own.shape[1]), best)
    > test_filtered_rows_get_the_tokens_of_their_own_words[torch-None]
    a row that stores its logits for something else has the token of a filtered one
    - (place >= 0) & (place < own.shape[1])
    + (place >= 0)
tpsample/request/plan.py
    filtered rows are found among all that are stored
    - if filters is not None and self.stores_all and len(filters) < self.num_rows:
    + if False:
    > test_a_request_without_filters_may_stand_before_rows_that_the_host_does_not_know
    rows that store bounds are taken for rows whose logprobs lie among first words
    - all_ask = self.logprobs.row_list == self.filters.row_list
    + all_ask = True
    > test_a_row_without_filters_has_logprobs_of_its_own
    processed logprobs of all filtered rows are searched for anew
    - return processed or (all_ask
    + return (all_ask
    > test_each_kind_of_call_is_as_dear_as_its_page_says
tpsample/request/row_filter.py
    rows with a small top_p have as few candidates as others
    - if self.top_p < SMALL_TOP_P:
    + if False:
    > test_more_candidates_decide_flat_rows
    rows with a large top_k have as few candidates as others
    - return MANY_BEST_SCORES // 2 if
    + return BEST_SCORES if
    masses of upper ends are taken for masses
    - exact=not known,
    + exact=False,
    > test_a_mass_one_unit_below_epsilon_goes[numba]
    two columns of a row are swapped
    - ways = self.demand.first > 0, self.demand.searched
    + ways = self.demand.searched, self.demand.first > 0
    > test_decided_and_undecided_rows_of_one_step[torch-3-2]
    exact ties are kept
    - request.ties == "keep"
    + True
    > test_the_kept_set_is_the_oracles
    top_p beside top_k counts as bounded
    - within_top_k = counts and not top_k_behind
    + within_top_k = counts
    > test_which_rows_need_few_logits
    rows with ties go by first words
    - self.top_k if by_first and not self.keep_ties else 0
    + self.top_k if by_first else 0
    > filters/test_filters.py::test_tokens_are_the_oracles[0-1]
    a top_k beside top_p weighs its first tokens alone
    - total=by_first and top_k_behind and not self.keep_ties,
    + total=False,
    the most likely tokens that were asked for are not listed
    - most=max(self.most, count) if listed else 0
    + most=self.most if listed else 0
    > test_logprobs_of_a_row_made_greedy_by_its_temperature_are_of_all_ids
tpsample/request/filters.py
    as many rows are taken for all in order
    - return index == list(range(count))
    + return len(index) == count
    > test_rows_that_are_all_stored_in_another_order_keep_their_own_tokens_and_logprobs
tpsample/filters/kept_sets.py
    a verification reports the tokens that a step would have drawn
    - return of_first._replace(words=ends, drawn=None, one_of_greedy=one)
    + return of_first._replace(words=ends, one_of_greedy=one)
    > test_logprobs_of_rows_that_first_words_decide_are_of_the_emitted_tokens
    the threshold renormalises joint rows
    - before_top_p = cut.masked_fill(filters.column(behind(TOP_K.name)), 0)
    + before_top_p = cut
    > test_sampling_by_an_explicit_threshold_is_the_same[zipf-True]
    masses are summed from the top and not from the cut of top_k
    - masses = ranks.sum_integers(cuts_of(rows).sums_of_bins(total_cut))
    + masses = ranks.sum_integers(cuts_of(rows).sums_of_bins(total_cut * 0))
    rounds of joint rows renormalise
    - before_top_p = by_number.masked_fill(filters.column(behind(TOP_K.name)), 0)
    + before_top_p = by_number
    > test_sampling_by_an_explicit_threshold_is_the_same[zipf-False]
    a greedy row keeps what its top_k left
    - of_first.rows.last_cut(of_first.words, of_greedy=of_greedy)
    + of_first.rows.last_cut(of_first.words, of_greedy=None)
    > test_first_words_of_rows_without_a_token_and_of_greedy_ones[torch-rejection]
    a row that its bin leaves open forgets its other rules
    - words = some.last_cut(least[index].maximum(words), of_greedy=kept)
    + words = some.last_cut(words, of_greedy=kept)
    > filters/test_kept_set.py
    words that lie beside masses are read as if they lay alone
    - return largest_of(words).contiguous(), cut
    + return largest_of(words), cut
    > test_a_row_whose_scores_all_overflow_has_neither_a_token_nor_a_set[triton-None-fields0]
    every round of a search takes a share of what is left
    -         share = None
    -     return search, LastDigits(
    +     return search, LastDigits(
    > test_tokens_and_logprobs_are_the_oracles_without_a_host_read[1-None]
    kept sets in fixed rounds are cut off at the first of their rank
    - width = longest = min(cap, rows.vocab_size)
    + width = longest = min(cap // 2, rows.vocab_size)
    > test_sets_are_those_of_the_definition[fixed rounds-1]
    a list takes its total for that of its own words
    - words, of_first = _of_first(rows, first, thresholds._replace(total=masses.total))
    + words, of_first = _of_first(rows, first, thresholds)
    > test_a_list_says_what_a_search_does[None-1]
    > test_a_list_says_what_a_search_does[50-1]
    rows with ties at the end go by lists
    - ties = any(kind.keep_ties for kind in filters.kinds)
    + ties = False
    > test_a_list_says_what_a_search_does[50-1]
    a list has no more words than the top_p keeps
    - cut, room = cuts.list_end(masses.bins, masses.total, thresholds.share, number)
    + cut, room = cuts.list_end(masses.bins, masses.total, thresholds.share, 1)
    > test_a_list_says_what_a_search_does[None-1]
    the logprobs of a greedy row with kept sets end with its token
    - if not self.one_of_greedy:
    + if True:
    > test_processed_logprobs_of_rows_made_greedy_are_of_all_ids
    a bin of many words is not listed
    - wanted = [bound if bound <= most else LISTED for bound in bounds]
    + wanted = [min(bound, LISTED) for bound in bounds]
    > test_flat_rows_are_searched_by_lists[torch-1]
    each rank has room for the words of all
    - 2 * max(LISTED, n) // (1 + world_size)
    + 2 * max(LISTED, n)
    > test_flat_rows_are_searched_by_lists[torch-2]
    one row that needs much room makes the message of all rows large
    - if room * len(rooms) > max(MAX_PAYLOAD, 2 * sum(rooms)):
    + if False:
    > test_one_flat_row_among_many_is_left_to_digits
    a few words take the room of many
    - rooms = [min(n, 2 * max(LISTED, n)
    + rooms = [min(LISTED, 2 * max(LISTED, n)
    > test_bytes_and_memory_follow_the_sizes_that_fit
tpsample/backends/torch_/cuts.py
    masses of kept sets are of one rank
    - mass, sizes = masses.sum(dim=0)
    + mass, sizes = masses[0]
    > test_sets_are_the_oracles_and_the_same_everywhere
    a kept set ends before its last token
    - kept = (words > 0) & (words >= sets.cut.unsqueeze(1))
    + kept = (words > 0) & (words > sets.cut.unsqueeze(1))
    > test_sets_one_behind_the_other
    a kept set at its cap overflows
    - listed = (sizes <= cap) & ~whole
    + listed = (sizes < cap) & ~whole
    > test_which_sets_are_listed
    padding and drafts that were not emitted have kept sets
    - (cut < ABOVE_ALL).to(sizes.dtype)) * drawn
    + (cut < ABOVE_ALL).to(sizes.dtype))
    a top_p of 1 cuts
    - torch.where(share < 1, largest, least)
    + largest
    > test_the_last_cut_of_several
    a rank's own equal logits stand before its own
    - search.reached - weights[: last.place].sum(dim=0)
    + search.reached - weights[: last.place + 1].sum(dim=0)
    > test_any_order_of_the_ranks_keeps_the_least_ids
    a list ends one bin too early
    - cut = rows.least_word((end + (1 + BIN_MARGIN)).double() / -BINS_PER_Y, rows.temperature)
    + cut = rows.least_word((end + BIN_MARGIN).double() / -BINS_PER_Y, rows.temperature)
    > test_a_list_ends_below_what_top_p_keeps
    a list of a greedy row is bounded by its top_p
    - bounded = (end + 1 < COUNTED_BINS) & rows.noise.random.squeeze(1)
    + bounded = end + 1 < COUNTED_BINS
    a bin is taken to have the fewest words of its mass
    - words = (tokens_per_mass(bins.device)[1, place] * words)
    + words = (tokens_per_mass(bins.device)[0, place] * words)
    > test_the_cut_in_a_bin
    a search keeps no ties
    - cut = torch.where(keep_ties > 0, cut & ~word.TOKEN_MASK, cut)
    + pass
    > test_the_cut_in_a_bin
    a limit above all weights is looked for in a bin
    - prefix = (BINS - 1 - search.prefix).where(reached, BINS)
    + prefix = BINS - 1 - search.prefix
    a bin with more words than ranks list is believed
    - left = (listed[:, :, 0] >= listed.shape[2])
    + left = (listed[:, :, 0] >= 2**40)
    > test_sampling_by_an_explicit_threshold_is_the_same[all-equal-True]
tpsample/backends/numba_/kernels/passes.py
    native: a row with a NaN keeps its first words
    - and before < limit and not is_nan
    + and before < limit
    > test_what_is_kept_of_first_words
    native: a given total is not taken
    - total = given if given >= 0 else total
    + total = total + 0
    native: the token of a set is its best score although it has none
    - drawn[i, s] = first[i, j] if key_of(word) > KEY_MINUS_INF else I64(0)
    + drawn[i, s] = first[i, 0]
    > test_what_is_kept_of_first_words
    native: a set ends at the first word that it does not keep
    - last[i] = first[i, j]
    + last[i] = first[i, min(j + 1, count - 1)]
    native: an id before the shard has a word
    - if 0 <= v < num_ids:
    + if v < num_ids:
    > test_kernels_tell_the_logprobs_of_the_definition
    native: first words lie in no order
    - sort(heap)
    + sort(heap[:1])
    > test_first_words_are_those_of_the_definition
    native: a threshold is rounded to the nearest logit
    - least = of_ordered(I32(ordered(floor) + I32(1))) if floor < exact else floor
    + least = floor
    > test_least_words
    native: a greedy row ends where its filters do
    - cut = least if is_random(temperature) else of_greedy
    + cut = least
    > test_the_last_cut_of_several
    native: a mass at its limit does not reach it
    - if mass[j] >= limit and
    + if mass[j] > limit and
    > test_least_words_of_masses
tpsample/backends/triton_/passes.py
    many logprobs are told by what a caller wrote
    - plain.listed_words(safe_temperature(self.temperature)[0], logprob_rows
    + plain.listed_words(self.temperature, logprob_rows
    > test_written_temperatures_are_made_safe_however_many_words_are_listed
    only 256 of many first words are read
    - BLOCK=MAX_TOP_WORDS if count <= MAX_TOP_WORDS else MAX_WEIGHED_WORDS,
    + BLOCK=MAX_TOP_WORDS,
    > test_what_is_kept_of_first_words
    words of tiles of rows that are done are looked at
    - first, best = self.of_undone(first), self.of_undone(best)
    + first, best = first.contiguous(), best.contiguous()
    > test_rows_that_are_done_are_left_out
    an empty shard has a group that nobody writes
    - // size) if width else 0
    + // size)
    > test_an_empty_shard_has_no_group_that_nobody_writes
tpsample/backends/triton_/kernels/cuts.py
    kernel: the most words of one rank are those of the last
    - size, most = size + count, tl.maximum(most, count)
    + size, most = size + count, count
    > test_sets_of_more_rows_than_one_block
    kernel: listed sets begin anew with each block of rows
    - total + tl.cumsum(kept, axis=0)
    + tl.cumsum(kept, axis=0)
    kernel: a greedy row that keeps what its mask left ends at any word
    - of_greedy = tl.where(keeps_greedy != 0, LOWEST_DRAWABLE, of_greedy)
    + of_greedy = tl.where(keeps_greedy != 1, LOWEST_DRAWABLE, of_greedy)
    > test_the_cut_in_a_bin[5-777-True]
    a kernel writes kept sets behind the row before
    - place = tl.load(offset_ptr + row) + offs
    + place = tl.load(offset_ptr) + offs
    > test_sets_one_behind_the_other
tpsample/backends/triton_/kernels/digits.py
    kernel: shares of a search are those of its limit
    - limit = mass_limit(whole, tl.load(share_ptr + row))
    + limit = mass_limit(limit, tl.load(share_ptr + row))
    > test_a_search_by_digits_finds_what_the_definition_does
    kernel: a search keeps ties that nobody asks for
    - if (left + each <= weight) & (tl.load(keep_ties_ptr + row) == 0):
    + if left < 0:
    kernel: a rank's own equal logits come before its own
    - for source in range(place):
    + for source in range(place + 1):
    kernel: one equal logit too many is kept
    - token += tl.where(inside < left, half, 0)
    + token += tl.where(inside <= left, half, 0)
    kernel: a top_p of 1 cuts after the last digit
    - cut = tl.where(tl.load(share_ptr + row) < 1, cut, least)
    + cut = tl.where(tl.load(share_ptr + row) <= 1, cut, least)
    kernel: a digit is counted that follows the prefix before
    - found = digits_of(logits, prefix, shift, DIGIT_BITS)
    + found = digits_of(logits, tl.load(prefix_ptr + row), shift, DIGIT_BITS)
    kernel: a search reaches only what its last digit did
    - return prefix, reached + before, limit, index
    + return prefix, before, limit, index
    kernel: a kept set that ends in the pass of its best score ends at the cut of top_p alone
    - cut = tl.maximum(cut, least)
    + pass
    kernel: the words of a summed digit are weighed twice
    - left = tl.where(own, none, left)
    kernel: words that a total leaves out are in the first digit
    - lowest = tl.maximum(tl.load(least_ptr + row), LOWEST_DRAWABLE)
    + lowest = tl.full((), LOWEST_DRAWABLE, tl.int64)
    > test_a_first_digit_has_no_words_below_a_least_one
    in fixed rounds decided rows are searched too
    -         return
    -     if has_digit != 0:
    +         pass
    +     if has_digit != 0:
    > test_rows_that_are_done_are_left_out
tpsample/backends/triton_/kernels/largest.py
    kernel: the largest words are left in the order of their places
    - tl.store(largest + place, own, mask=offs < count)
    + tl.store(largest + offs, own, mask=offs < count)
    > test_they_are_those_of_topk
    kernel: the largest words of few are left in the order of their places
    - tl.store(largest + place, own, mask=present & (place < count))
    + tl.store(largest + offs, own, mask=present & (offs < count))
    kernel: of three counts the second is the third
    - of_third = counts >> (2 * COUNT_BITS)
    + of_third = (counts >> COUNT_BITS) & COUNT_MASK
    kernel: words behind their number are looked at
    - number = tl.minimum(num_words, tl.load(number_ptr + row))
    + number = num_words
    > test_words_behind_a_number_do_not_count
tpsample/backends/triton_/kernels/reorder.py
    kernel: a reshape that takes no such argument is asked to reorder
    - return "can_reorder" in inspect.signature(reshape).parameters
    + return callable(reshape)
    > test_a_reshape_is_asked_to_reorder_where_it_takes_that
tpsample/backends/triton_/kernels/order.py
    kernel: a sum by threads leaves numbers out where no reshape reorders
    - (2, values.shape[0] // 8, 4)), axis=2), axis=0)
    + (2, values.shape[0] // 8, 4)), axis=2), axis=0) & 1
    > test_where_no_reshape_may_every_number_is_in_one_sum
    kernel: a sum is that of one of its warps
    - of_warps, sem="relaxed")
    + tl.where(tl.arange(0, of_warps.shape[0]) < 1, of_warps, 0), sem="relaxed")
    > test_sums_down_to_a_word
    kernel: of equal logits all reach a mark
    - return logits >= tl.where(ids <= mark.token, mark.at, mark.after)
    + return logits >= mark.at
    > test_tokens_reach_a_mark_as_their_words_do
    kernel: the word of a logit of -0.0 is compared with no token
    - absent = (key < KEY_MINUS_INF) | (key == KEY_MINUS_ZERO)
    + absent = key < KEY_MINUS_INF
    kernel: the words of a group are written a place late
    - tl.cumsum(listed.to(tl.int32), axis=0) - 1
    + tl.cumsum(listed.to(tl.int32), axis=0)
    > test_first_words_are_those_of_the_definition
    kernel: a group that is not chosen lists its words
    - if group > 0:
    + if group >= 0:
    > test_a_group_that_is_not_chosen_lists_nothing_where_its_word_has_an_id
    kernel: of equal scores of a place the last id wins
    - beats = (values > best.numbers) |
    + beats = (values >= best.numbers) |
    > test_programs_of_several_blocks[3]
    kernel: a program leaves its last block out
    - return first, tl.minimum(first + blocks_each, tl.cdiv(lead + width, BLOCK))
    + return first, tl.minimum(first + blocks_each, (lead + width) // BLOCK)
tpsample/backends/triton_/kernels/best_scores.py
    an index of words overflows 32 bits
    - sample, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    + sample, row = tl.program_id(0), tl.program_id(1)
    > test_the_words_of_many_samples_and_tiles_are_found
    kernel: best scores are taken of a group that nobody chose
    - mask = (group_word > 0) & (columns >= 0)
    + mask = (columns >= 0)
    > test_a_group_that_is_not_chosen_lists_nothing_where_its_word_has_an_id
    kernel: best scores that decide nothing are weighed
    - if order > record:
    + if order > 0:
    > test_only_best_scores_that_can_decide_are_weighed
    kernel: best scores that decide nothing are kept
    - (orders >= least) & (orders >= records(orders))
    + (orders >= least)
    > test_a_rejection_decides_what_the_definition_does
    kernel: a token comes before itself
    - mark_of((order | tie_bits) + 1)
    + mark_of(order | tie_bits)
    kernel: the best scores of all ranks begin with the first logit of one
    - first = tl.load(of_first, mask=offs < num_sources, other=0)
    + first = tl.load(of_first, mask=offs == num_sources - 1, other=0)
    kernel: about the mass before a score is off by a little
    - power = tl.exp2((logits - top) * scale)
    + power = tl.exp2((logits - top) * scale * 1.0001)
    kernel: an error beside the limit of a top_p is forgotten
    - sure = tl.max(tl.where(kept & (mass + error < fewest), words, 0), axis=0)
    + sure = best_word
    > test_a_limit_within_the_error_of_masses_is_searched
    kernel: a block whose largest logit is the least mark has nothing before it
    - if largest >= lowest:
    + if largest > lowest:
    kernel: numbers before the best scores are not asked for
    - if counts != 0:
    + if counts == 0:
    > test_programs_of_several_blocks[1]
    kernel: the comparison with the least word is turned
    - kept = (orders >= least) &
    + kept = (orders <= least) &
    > test_decided_and_undecided_rows_of_one_step[triton-2-None]
tpsample/backends/triton_/kernels/sums.py
    the word of the first kept token stands for that of the drawn one
    - drawn = tl.max(tl.where((words == best) & (best > 0), orders, 0), axis=0)
    + drawn = tl.max(tl.where(kept, orders, 0), axis=0)
    > test_what_is_kept_of_first_words
    kernel: a greedy row keeps what its top_k left
    - cut = tl.where(tl.load(temperature_ptr + row) >= GREEDY_BELOW, cut, first)
    + cut = tl.where(tl.load(temperature_ptr + row) >= -1.0, cut, first)
    kernel: a row with a NaN keeps its first words
    - kept = kept & ~is_nan
    + kept = kept & True
    kernel: a given total is not taken
    - total = tl.where(given >= 0, given, total)
    + total = tl.where(given < -1, given, total)
    kernel: min_p is taken off the total though it comes last
    - in_total = within & (orders >= tl.load(least_of_total_ptr + row))
    + in_total = within & (orders >= tl.load(least_ptr + row))
    > test_what_min_p_cuts_last_is_of_the_mass_of_the_top_words
    kernel: a distance is cut off rather than rounded
    - d = tl.where(units < INTEGERS_FROM, rounded, units).to(tl.int64)
    + d = units.to(tl.int64)
    > test_spreads_are_those_of_the_definition
    kernel: the best of a kept set is no NaN where the largest logit is one
    - word = tl.where(top != top, nan_word(), word_of_best(best))
    + word = word_of_best(best)
    > test_sums_down_to_a_word
    kernel: the mass of a kept set is of all tokens
    - masses_of_threads(high, low, kept)
    + masses_of_threads(high, low, ids >= 0)
    kernel: the largest logit is that of the last rank
    - word = tl.maximum(word, tl.load(own))
    + word = tl.load(own)
    > test_the_cut_in_a_bin
    kernel: a mass is of a program's last block
    - mass += own_mass
    + mass = own_mass
    > test_programs_of_several_blocks[3]
tpsample/core/spread.py
    a masked logit counts in the spread
    - unmasked = logits > -torch.inf
    + unmasked = logits == logits
    > test_spreads_are_those_of_the_definition
tpsample/core/order.py
    the least logit is exclusive
    - least = word.key(least_logit(top, temperature, y)) << word.TOKEN_BITS
    + least = (word.key(least_logit(top, temperature, y)) + 1) << word.TOKEN_BITS
    > test_the_kept_set_is_the_oracles
    the least logit of min_p is rounded to nearest
    - return torch.where(floor < exact, floor.nextafter(torch.full_like(floor, torch.inf)), floor)
    + return floor
    > test_the_vectors_are_what_the_package_computes
tpsample/core/rules.py
    a standard deviation is of logits after temperature
    - -n * rows.spread(), -torch.inf)
    -     return rows.least_word(y, torch.ones_like(rows.temperature))
    + -n * rows.spread(), -torch.inf)
    +     return rows.least_word(y, rows.temperature)
    > test_kept_sets_worked_out_by_hand[sigma-of-logits-before-temperature]
    no standard deviation at all cuts
    - torch.where(n > 0, -n * rows.spread(), -torch.inf)
    + -n * rows.spread()
    > test_a_rule_that_is_off_keeps_every_token[top_n_sigma]
    a number is taken for a distance
    - end=_least_of_sigma,
    + end=_least_of_sigma, known=True,
    > test_a_known_rule_ends_at_its_distance[top_n_sigma]
    an epsilon goes through a power that neighbours change
    - rows.total_mass().double() * epsilon
    + rows.total_mass().double() * epsilon.log2().exp2()
    > test_a_rule_rounds_as_it_would_alone[epsilon_cutoff]
    the entropy's part of eta has no square root
    - by_entropy = eta.sqrt() * TOP_MASS
    + by_entropy = eta * TOP_MASS
    > test_kept_sets_worked_out_by_hand[eta]
    the limit of eta is that of the entropy alone
    - (eta * total).minimum(by_entropy)
    + by_entropy
    > test_kept_sets_worked_out_by_hand[eta-itself-is-the-lesser]
    the power of eta has too few terms
    - for n in range(18, 0, -1):
    + for n in range(9, 0, -1):
    > test_the_limit_of_eta_is_exact_to_half_a_unit_of_a_mass
    a limit of masses removes the likeliest token
    - limit.round().clamp(max=TOP_MASS)
    + limit.round()
    > test_kept_sets_worked_out_by_hand[epsilon-keeps-the-likeliest]
    the limit of a mass is rounded down
    - limit.round().clamp
    + limit.floor().clamp
    > test_a_rule_ends_at_the_number_at_which_the_oracles_does[epsilon_cutoff-3]
    epsilon is of the likeliest token
    - rows.total_mass().double() * epsilon
    + 0.0 * rows.total_mass() + TOP_MASS * epsilon
    > test_a_mass_one_unit_below_epsilon_goes[torch]
    top_p takes a share of what min_p leaves though it comes last
    - "min_p_last": (MIN_P,),
    + "min_p_last": (),
    > test_the_kept_set_is_the_oracles
tpsample/filters/thresholds.py
    a rule behind top_p is taken off its total
    - word.masked_fill(filters.column(behind(rule.name)), LOWEST_DRAWABLE)
    + word
    > filters/test_filters.py::test_tokens_are_the_oracles[0-1]
    the moment of all tokens is their mass
    - return mass, moment
    + return mass, mass
    > test_facts_of_stored_rows_are_those_of_whole_rows[total_moment]
    all first words take a share of all tokens
    - total=total.where(of_others, -1)
    + total=total
    > test_rows_of_both_orders_weigh_what_is_theirs
tpsample/core/masses.py
    quick sums are taken to be nearer than they are
    - ABOUT_ERROR = 2.0**-17
    + ABOUT_ERROR = 2.0**-18
    > test_quick_sums_are_within_their_error_in_the_worst_row
    a coefficient of 2^f is one unit off
    - 0.24022647738456726,
    + 0.24022649228572845,
    > test_the_vectors_are_what_the_package_computes
    a row far from 0 takes no difference first
    - near = (top * scale).abs() < NEAR
    + near = (top * scale).abs() < 2**20
    > test_masses_and_entropies_are_within_their_bounds
tpsample/backends/triton_/kernels/masses.py
    kernel: a power of f is fused with the sum after it
    - power = power * f + POLYNOMIAL[i]
    + power = fma(power, f, POLYNOMIAL[i] + 0 * f)
    > test_every_backend_finds_the_bits_of_the_page[_triton]
    kernel: a moment has its whole part alone
    - moment += (sums_of(high_rest).to(tl.int64) << 20) + sums_of(low_rest).to(tl.int64)
tpsample/filters/finish.py
    the rows of a prompt are made anew in each call
    - @lru_cache(16)
    + @lru_cache(0)
    > test_the_rows_of_a_prompt_are_made_once
    logprobs before penalties are of words behind them
    - elif among is not None and rows.logits is rows.raw:
    + elif among is not None:
    > test_words_that_decided_the_rows_serve_their_logprobs
    chosen ids are not looked up where first words decide
    - if first is None or cut.drawn is None or logprob_rows.chosen.shape[1]:
    + if first is None or cut.drawn is None:
    fewer of the most likely tokens are reported than were asked for
    - return logprob_rows.row_list == filters.row_list and logprob_rows.top <= first.shape[1]
    + return logprob_rows.row_list == filters.row_list
    logprobs of some rows are of others' words
    - return logprob_rows.row_list == filters.row_list and logprob_rows.top <= first.shape[1]
    + return logprob_rows.top <= first.shape[1]
    > test_a_row_without_filters_has_logprobs_of_its_own
    raw logprobs are those of the kept set
    - of_sets = logprob_rows.asks is None and all(logprob_rows.processed_list)
    + of_sets = logprob_rows.asks is None
    > test_a_list_says_what_a_search_does[50-1]
    rows that the first words decide are taken for random ones
    - if among is not None and among.none_greedy and of_sets:
    + if among is not None and of_sets:
    > test_processed_logprobs_of_rows_made_greedy_are_of_all_ids
    own best words are taken row by row, and not sample by sample
    - words.view(-1, step.batch.rows).T
    + words.view(step.batch.rows, -1)
    > test_a_step_is_one_message_to_every_peer_and_with_top_p_two
    raw logprobs list the first words of processed logits
    - return rows.logits is rows.raw and rows.rough is None
    + return rows.rough is None
    > test_raw_logprobs_beside_a_top_k_are_of_logits_without_a_bias
    logprobs have the first words of filtered rows
    - own_first, first = first[plan.filtered_places], first[logprob_rows.places]
    + own_first = first = first[plan.filtered_places]
    > filters/test_fixed_rounds.py
    logprobs and filters each find their first words
    - return rows.logits is rows.raw and rows.rough is None
    + return False
    > backends/triton_/test_jit_launches.py
tpsample/backends/triton_/kernels/bins.py
    kernel: a share of nearly all keeps tokens without mass
    - stops = limit <= total
    + stops = limit < total
    > test_a_share_of_nearly_all_keeps_no_token_without_mass[False-triton]
    kernel: the bound of a list leaves out the bin that rounding reaches
    - room = tl.sum(tl.where(offs <= end + 1, most, 0), axis=0)
    + room = tl.sum(tl.where(offs <= end, most, 0), axis=0)
    > test_a_list_ends_below_what_top_p_keeps
    a kernel takes the bin of the top for the last one
    - steps = tl.where(logits < top, steps, 0.0)
    + steps = tl.where(logits < top, steps, LAST_BIN)
    > test_bins_and_their_words
    a kernel's list ends one word late
    - tl.where(words >= middle, weight, 0), axis=0) < limit:
    + tl.where(words >= middle, weight, 0), axis=0) <= limit:
    > test_the_cut_in_a_bin
    a kernel's search forgets the bins before its own
    - reached = tl.sum(tl.where(offs < index, bins, 0), axis=0)
    + reached = tl.sum(tl.where(offs < index, 0, 0), axis=0).to(tl.int64)
    > test_the_cut_in_a_bin[5-777-True]
tpsample/backends/triton_/kernels/logprobs.py
    kernel: a few first words are of one group
    - groups = tl.where(groups == best, 0, groups)
    + pass
    > test_kernels_tell_the_logprobs_of_the_definition[triton-5-0]
    kernel: the first of a few words is each of them
    - words = tl.where(words == best, 0, words)
    + pass
    a kernel tells the value of a logit over another temperature
    - temperature = tl.where(tl.load(processed_ptr + row), temperature, 1.0)
    + temperature = tl.load(temperature_ptr + row)
    kernel: given ids behind the first block have no words
    - for start in range(0, num_ids, MOST):
    + for start in range(0, tl.minimum(num_ids, MOST), MOST):
    > test_kernels_tell_the_logprobs_of_the_definition[triton-20-40]
    kernel: ranks of logprobs count words outside of the kept set
    - reached = kept & (words >= (mark & ~TOKEN_MASK))
    + reached = words >= (mark & ~TOKEN_MASK)
    > test_sums_of_logprobs_from_first_words
tpsample/filters/by_cuts.py
    a greedy row is taken for one that keeps all ids
    - partial &= rows.noise.random.squeeze(1)
    + pass
    > test_kept_sets_of_all_ids_are_counted
    sets of all ids are taken for whole
    - if partial[filters.unfiltered].any():
    + if False:
    a greedy row keeps what its masks left
    - of_greedy = top_word if sets else None
    + of_greedy = None
    > test_sets_are_those_of_the_definition[batch-1]
    rows that are searched for their sets are not counted
    - if may_read and filters.demand.weighed:
    + if False:
    > test_steps_that_search_for_sets_are_counted
tpsample/filters/sample.py
    in fixed rounds undecided rows keep what the rejection found
    - return torch.where(decided.unsqueeze(1), words, undecided_words)
    + return words
    > test_decided_and_undecided_rows_of_one_step[torch-3-2]
    a rejection decides rows with a top_p in a large top_k
    - decided &= ~filters.column(SEARCHED) | top.isnan()
    + pass
    rows that begin with the search are not counted
    -         ranks.counters.second_rounds += len(filters)
    +         pass
    > test_the_search_decides_what_the_rejection_cannot[flat-in-top-k]
    second rounds are not counted
    - ranks.counters.second_rounds += len(undecided)
    + ranks.counters.second_rounds += bool(undecided)
    > test_the_search_decides_what_the_rejection_cannot[hot-joint]
    a row that bounds leave open keeps the token of the lower one
    - differ = (words != others[0]).any(dim=1).tolist()
    + differ = [False] * len(words)
    > test_rows_that_their_bounds_leave_open
    rows that only a search decides are judged before
    - return Method.SEARCH if searched or not filters.demand.weighed else method
    + return Method.SEARCH if not filters.demand.weighed else method
    > test_a_search_that_no_request_needs_is_left_out
    rows that nothing is looked for in have their best scores listed
    - if method is not Method.REJECTION or rows.rough is not None:
    + if method is Method.REJECTION:
    > test_the_search_decides_what_the_rejection_cannot[flat-min-p]
tpsample/pipeline.py
    the failed rows of a step are not counted
    - self.count_failed(out.status)
    + pass
    > test_fixed_rounds_and_logits_of_the_caller_return_it_too
    a step is returned before its digests are compared
    -         self.agreement.compare()
    > test_a_step_that_differs_changes_nothing_and_the_next_is_right[rows]
    rows are counted once per sample
    - counters.rows += out.status.shape[0]
    + counters.rows += out.token_ids.numel()
    > test_a_rank_alone_counts_what_it_does[torch]
    a row that failed keeps -1
    - out.fill_failed(self.settings.on_failed)
    + pass
    > test_rows_that_fail_return_it_and_their_status_still_tells
    filters are a part of the head in a profile
    - with range_of("filters"):
    -                 rows, ranks = self.stored_logits(step)
    + with range_of("head"):
    +                 rows, ranks = self.stored_logits(step)
    > test_a_profile_shows_the_parts_of_a_step
tpsample/core/ranges.py
    ranges are made while nobody records
    - if not profiler._is_profiler_enabled:
    + if False:
    > test_no_range_is_made_while_nobody_records
tpsample/backends/torch_/logprobs.py
    a rank counts no ties
    - marks = torch.cat([own, first[:, -1:]], dim=1) & ~word.TOKEN_MASK
    + marks = torch.cat([own, first[:, -1:]], dim=1)
    > test_the_layout_by_hand
    entropy has the wrong sign of its moment
    - log_total + LN2 * (moment.double() / total.double())
    + log_total - LN2 * (moment.double() / total.double())
    raw logprobs are divided by the temperature
    - temperature = torch.where(logprob_rows.processed, temperature, 1.0)
    + temperature = 1.0 * temperature
    > test_kernels_tell_the_logprobs_of_the_definition[numba-0-0]
tpsample/sampler.py
    words are not among the bytes that are sent
    - {"bytes_sent": words + self.ranks.bytes_sent}
    + {"bytes_sent": self.ranks.bytes_sent}
    > test_ranks_count_bytes_and_how_long_they_waited
tpsample/filters/logprobs.py
    the best token of another rank stands for the drawn one
    - best *= word.token_of(best) == sampled
    + best *= word.token_of(best) >= 0
    > test_a_step_is_one_message_to_every_peer_and_with_top_p_two
    ranks are counted beyond the kept set
    - marks = marks.maximum(cut.unsqueeze(1))
    + marks = marks.minimum(marks)
    > test_a_rank_counts_no_tie_that_was_cut_away
tpsample/backends/numba_/passes.py
    native: the best of a kept set is no NaN where the largest logit is one
    - best[np.isnan(array_of(self.largest))] = word.KEY_NAN << word.TOKEN_BITS
    > test_sums_down_to_a_word
    native: a set of all tokens counts masked ones
    - np.count_nonzero(self._stored.logits[row] > -np.inf)
    + len(self._stored.logits[row])
    > test_kept_sets_of_all_ids_are_counted
    native: the best words of upper ends are drawn from them
    - rows = rows[bound[rows] == 0]
    > test_best_words_of_upper_ends_are_those_that_were_found
    native: rows that are cut out have gaps, for which a kernel is compiled in a step
    - *known, bound = arrays_of(self.rough[:3])
    + *known, bound = map(array_of, self.rough[:3])
    > test_a_warmed_sampler_of_a_cpu_compiles_nothing_for_rows_of_every_method
    native: the tokens of kept sets are drawn from upper ends
    - rows = rows[error_bound[rows] == 0]
    > test_best_words_of_upper_ends_are_those_that_were_found
tpsample/backends/numba_/row_kinds.py
    native: rows in fixed rounds store upper ends
    - () if plan.fixed_rounds else _filtered(plan)
    + _filtered(plan)
    > test_random_steps_of_ranks_are_the_oracles[2-200-150-12-controls+texts]
    native: rows whose logprobs are read again store upper ends
    - if decided and row not in asking:
    + if decided:
    > test_which_rows_need_few_logits
    native: a greedy row stores upper ends to count what it keeps
    - and not plan.requests[row].greedy
    > test_kept_sets_of_all_ids_are_counted
tpsample/backends/numba_/kernels/cuts.py
    native bins count masked tokens
    - bins[j] = index if logits[j] > F32(-np.inf) else I32(-1)
    + bins[j] = index
    > test_bins_and_their_words
    a native list ends one word late
    - while column < len(words) - 1 and (column < 0 or upto < limit):
    + while column < len(words) - 1 and (column < 0 or upto <= limit):
    > test_the_first_word_at_which_a_sum_reaches_its_limit
    native: masses bound the list of a greedy row
    - is_bounded = end + 1 < order.COUNTED_BINS and is_random(temperature[row])
    + is_bounded = end + 1 < order.COUNTED_BINS
    > test_a_list_ends_below_what_top_p_keeps
    native: a list has fewer words than were asked for
    - few += listed < number
    + few += listed < 1
    native: a whole mass needs a search
    - reached = larger(wanted, I64(1)) <= whole if len(share) else wanted < whole
    + reached = wanted <= whole
    > test_the_cut_in_a_bin
    native: a bin is taken to have the fewest words of its mass
    - number = I64(math.floor(F32(number) * per_mass[1, index]))
    + number = I64(math.floor(F32(number) * per_mass[0, index]))
    native: what another rank did not list is not missed
    - left[row] |= listed[rank, row, 0] >= width
    + left[row] = listed[rank, row, 0] >= width
    native: a cut of bins is above those of other rules
    - found = last_cut(top[row], given[row], larger(least[row], found), other)
    + found = last_cut(top[row], given[row], found, other)
    native: ties of the last word are cut away
    - found = found & ~I64(TOKEN_MASK) if keep_ties[row] > 0 else found
    native: a greedy row keeps what its mask leaves
    - total, size = I64(TOP_MASS), I64(end[row] < ABOVE_ALL)
    + total += I64(0)
    > test_which_sets_are_listed
    native: a set over the cap is listed
    - whole[row], overflow[row] = size == vocab_size, size != vocab_size and size > cap
    + whole[row], overflow[row] = size == vocab_size, False
    native: a row that drew nothing has a set
    - size = size if drawn[row] else I64(0)
    native: sets of two ranks are as large as that of one
    - longest = larger(longest, gathered[rank, row, 1])
    + longest = gathered[rank, row, 1]
    > test_sets_of_more_rows_than_one_block
    native log masses are of the top alone
    - log_masses[first + j] = below - log_totals[row]
    + log_masses[first + j] = below
    > test_sets_one_behind_the_other
tpsample/backends/numba_/kernels/best_scores.py
    native: a best score decides although a better one stands before it
    - if orders[better] > orders[c]:
    + if orders[better] < orders[c]:
    > test_a_rejection_decides_what_the_definition_does
    native: a best score below the least word is kept
    - if mark < leasts[i] or mark == 0:
    + if mark == 0:
    native: a row without a number is decided by its words
    - decided[i] |= key <= KEY_MINUS_INF or key == KEY_NAN
    + decided[i] |= key == KEY_NAN
    native: what may be kept counts as not kept
    - possible = before < high
    + possible = sure
    > test_what_is_decided_is_as_from_the_sums
    native: the best scores of upper ends lie in no order
    - sort(scores)
    + sort(scores[:1])
    > test_best_words_of_upper_ends_are_those_that_were_found
    native: a masked row has the first word of memory that nobody wrote
    - if top == 0 and error_bound[i] < F32(np.inf):  # all are masked
    + if top == 0:
    > test_a_masked_row_has_no_first_word
    native: the order words of best scores are those of other ids
    - orders[c] = pack(logits[i, token_id - first_id], token_id)
    + orders[c] = pack(logits[i, 0], token_id)
    > test_best_words_of_upper_ends_are_those_that_were_found
tpsample/backends/numba_/kernels/logprobs.py
    native: the words of an id are those of the first rank
    - word = larger(word, gathered[rank, i, count + c])
    + word = larger(word, I64(0))
    > test_kernels_tell_the_logprobs_of_the_definition
    native: raw logprobs are divided by the temperature
    - temperature[i] = given[i] if processed[i] else F32(1)
    + temperature[i] = given[i]
    native: what ties with the last of the first words is not counted
    - marks[i, num_own] = first[i, count - 1] & ~I64(TOKEN_MASK)
    + marks[i, num_own] = first[i, count - 1]
    native: a rank exceeds its kept set
    - else smaller(rank, num_kept)
    + else rank
    > test_kernels_tell_the_logprobs_of_the_definition
    native: equal logits have ranks of their own
    - if of_top + 1 == count or key_of(word) != key_of(first[i, of_top + 1]):
    + if True:
    native: a token outside of its set has a logprob
    - value = value if kept else -np.inf
    + value = value
tpsample/backends/numba_/kernels/decode.py
    native: a filtered row that is lost has a token
    - if not lost and 0 <= its_place < len(filtered):
    + if 0 <= its_place < len(filtered):
    > test_filtered_rows_get_the_tokens_of_their_own_words[numba-None]
    native: a row has the words of a filtered one that is not there
    - if not lost and 0 <= its_place < len(filtered):
    + if not lost and 0 <= its_place < len(filtered) + 2:
tpsample/backends/triton_/kernels/decode.py
    kernel: a filtered row that is lost has a token
    - (place < num_filtered) & (lost == 0)
    + (place < num_filtered)
    > test_filtered_rows_get_the_tokens_of_their_own_words[triton-None]
    kernel: a row has the words of a filtered one that is not there
    - found = (place >= 0) & (place < num_filtered)
    + found = (place >= 0)
    kernel: all samples of a filtered row are its first
    - filtered_ptr + place * num_samples + sample
    + filtered_ptr + place * num_samples
    > test_filtered_rows_get_the_tokens_of_their_own_words[triton-3]
tpsample/exchange/peer.py
    integers on lost ranks are not among the bytes that are sent
    - self._all.bytes_sent += ring_bytes(self._ranks, self.lost.numel())
    + pass
    > test_peer_inside_the_hosts
    filtered rows of peers keep their unfiltered draws
    - if filtered is not None or self._between:
    + if self._between:
    > test_peers_in_one_process_draw_the_committed_tokens[shards0-parts0]
tpsample/backends/numba_/launch.py
    native: what a min_p leaves open stores all logits
    - whole, many = (most == 0) & (least == -np.inf), most > HEAPED
    + whole, many = most == 0, most > HEAPED
    > test_a_row_that_is_open_stores_what_its_rule_keeps
    native: what a top_k leaves open stores all logits
    - most = np.array([demand.most for demand in demands], np.int64)
    + most = np.array([0 for demand in demands], np.int64)
    native: one first word of a rough row is found
    - listed = np.array([max(1, demand.first) for demand in demands])
    + listed = np.array([1 for demand in demands])
    > test_draws_of_rough_rows
tpsample/backends/numba_/kernels/draw.py
    native: a min_p leaves out what it keeps
    - logits[j] = F32(-np.inf) if logits[j] < threshold else logits[j]
    + logits[j] = F32(-np.inf) if logits[j] < threshold + F32(1) else logits[j]
    > test_draws_of_rough_rows
    native: a row of first words has no others
    - return listed > 1
    + return True
""")
