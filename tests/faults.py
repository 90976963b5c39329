"""The faults that `tests.mutants` plants, each with the nearest tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One change of one file.

    Attributes:
        name: for `--only`.
        file: relative to the root of the repository.
        old: what the file has exactly once.
        new: what the fault puts in its place.
        tests: pytest's names of the tests that must notice it, few and fast.
        equivalent: why nothing can notice it; "" if something must.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""


SCREENING = [
    Fault(
        "the fp32 bound leaves out the sum",
        "tpsample/screening/fp32_pass.py",
        "gamma = sum_error(hidden_size + 4)",
        "gamma = sum_error(4)",
        ("tests/screening/test_bound.py::test_the_fp32_bound_is_its_formula",),
    ),
    Fault(
        "the largest weight of the last chunk counts alone",
        "tpsample/screening/fp32_pass.py",
        "extremes += torch.aminmax(chunk)",
        "extremes = [*torch.aminmax(chunk)]",
        ("tests/screening/test_bound.py::test_a_tile_in_chunks_has_one_largest_weight",),
    ),
    Fault(
        "the first pass is cast under autocast",
        "tpsample/screening/fp32_pass.py",
        "torch.mm(hidden, chunk.T, out=columns)",
        "columns.copy_(torch.mm(hidden, chunk.T))",
        ("tests/screening/test_words.py::test_autocast_changes_nothing",),
    ),
    Fault(
        "residual norms are 5 % too small",
        "tpsample/screening/int8_copy.py",
        "norms = block_norms(lost, self.bounds)",
        "norms = 0.95 * block_norms(lost, self.bounds)",
        ("tests/screening/test_bound.py::test_the_8_bit_bound_is_tight",),
    ),
    Fault(
        "norms are rounded to nearest",
        "tpsample/screening/bound.py",
        "return (values * (1.0 + 4 * UNIT) + TINY).float()",
        "return values.float()",
        ("tests/screening/test_bound.py::test_norms_are_rounded_up",),
    ),
    Fault(
        "a gain of the bound is lost at the temperature",
        "tpsample/screening/bound.py",
        "return ScoreSlack(chain.gain * k, extra, proved.squeeze(1))",
        "return ScoreSlack(k.clamp(max=1.0), extra, proved.squeeze(1))",
        ("tests/screening/test_bound.py::test_scores_are_below_their_upper_bounds",),
    ),
    Fault(
        "the bound of the noise has no margin",
        "tpsample/screening/noise_bound.py",
        "NOISE_TOP = 159.0 - math.log2(math.log2(math.e)) + 1e-5",
        "NOISE_TOP = 159.0 - math.log2(math.log2(math.e)) - 1e-6",
        ("tests/screening/test_bound.py::test_the_noise_is_below_its_bound",),
    ),
    Fault(
        "rows with too many candidates are dropped",
        "tpsample/local/screened_backend.py",
        "        return too_many",
        "        return too_many & False",
        ("tests/screening/test_words.py::test_more_candidates_than_the_limit_are_not_dropped",),
    ),
    Fault(
        "rows without a proof are trusted",
        "tpsample/local/screened_backend.py",
        "slack, undecided = bounds.of(approximation.error), ~bounds.proved",
        "slack, undecided = bounds.of(approximation.error), bounds.proved & False",
        ("tests/screening/test_words.py::test_numbers_that_are_not_finite_or_nearly_so",),
    ),
    Fault(
        "a pair's history leaves out drafts",
        "tpsample/request/controls/apply.py",
        "history = history + 2 * drafted.sum(dim=1, dtype=torch.int32)",
        "history = history + 0",
        ("tests/screening/test_words.py::test_drafts_count_as_output",),
    ),
]

FILTERS = [
    Fault(
        "top_k counts one token more",
        "tpsample/logits/shard_logits.py",
        "member &= number < filters.top_k.unsqueeze(1)",
        "member &= number <= filters.top_k.unsqueeze(1)",
        ("tests/logits/test_second_round.py::test_two_rows_keep_their_tokens",),
    ),
    Fault(
        "mass before equal to the limit",
        "tpsample/logits/shard_logits.py",
        "member &= mass < mass_limit(",
        "member &= mass <= mass_limit(",
        ("tests/logits/test_filters.py::test_mass_before_equal_to_the_limit_is_too_much",),
    ),
    Fault(
        "a token stands before itself",
        "tpsample/logits/shard_logits.py",
        "before = words > marks[:, i, None]",
        "before = words >= marks[:, i, None]",
        ("tests/logits/test_filters.py::test_mass_before_equal_to_the_limit_is_too_much",),
    ),
    Fault(
        "the kept set has k + 1 tokens",
        "tpsample/reference.py",
        "in_top_k = (rank < top_k) | (keep_ties & (logits == kth))",
        "in_top_k = (rank <= top_k) | (keep_ties & (logits == kth))",
        ("tests/logits/test_kept_set.py::test_golden",),
    ),
    Fault(
        "the top words are k + 1",
        "tpsample/logits/shard_logits.py",
        "in_top_k = torch.arange(count, device=first.device) < filters.top_k.unsqueeze(1)",
        "in_top_k = torch.arange(count, device=first.device) <= filters.top_k.unsqueeze(1)",
        ("tests/logits/test_filters.py::test_tokens_are_the_oracles[1]",),
    ),
    Fault(
        "the first words are looked for in a group too few",
        "tpsample/logits/shard_logits.py",
        "group = word.token_of(order_words(grouped.amax(dim=2)).topk(count, dim=1).values)",
        "group = word.token_of(order_words(grouped.amax(dim=2)).topk(count - 1, dim=1).values)",
        ("tests/logits/test_shard_logits.py::test_first_words",),
    ),
    Fault(
        "min_p is taken off the total though it comes last",
        "tpsample/request/filters.py",
        "-math.inf if last else log_min_p",
        "log_min_p",
        ("tests/logits/test_kept_set.py::test_the_kept_set_by_hand",),
    ),
    Fault(
        "kernel: min_p is taken off the total though it comes last",
        "tpsample/kernels/sums.py",
        "in_total = in_top_k & is_candidate(logits, below, tl.load(total_log_min_p_ptr + row))",
        "in_total = in_top_k & is_candidate(logits, below, tl.load(log_min_p_ptr + row))",
        (
            "tests/logits/test_shard_logits.py::test_what_min_p_cuts_last_is_of_the_mass_of_the_top_words",
        ),
    ),
    Fault(
        "min_p is exclusive",
        "tpsample/core/order.py",
        "return (word.key_of(order_word) > word.KEY_MINUS_INF) & (below >= log_min_p)",
        "return (word.key_of(order_word) > word.KEY_MINUS_INF) & (below > log_min_p)",
        ("tests/logits/test_kept_set.py::test_the_kept_set_by_hand",),
    ),
    Fault(
        "the threshold renormalises joint rows",
        "tpsample/logits/cut.py",
        "total_cut = torch.where(filters.joint, 0, top_k_cut)",
        "total_cut = top_k_cut",
        (
            "tests/logits/test_filters.py::test_the_second_round_decides_what_the_first_cannot[hot-joint]",
        ),
    ),
    Fault(
        "in fixed rounds undecided rows keep what the rejection found",
        "tpsample/logits/fixed_rounds.py",
        "return torch.where(decided.unsqueeze(1), words, best)",
        "return words",
        (
            "tests/logits/test_fixed_rounds_mixtures.py::test_decided_and_undecided_rows_of_one_step[torch-3-2]",
        ),
    ),
    Fault(
        "in fixed rounds top_p renormalises in top_k where the request does not",
        "tpsample/logits/fixed_rounds.py",
        "total_cut = torch.where(filters.in_top_k, top_k_cut, 0)",
        "total_cut = top_k_cut",
        (
            "tests/logits/test_fixed_rounds_mixtures.py::test_decided_and_undecided_rows_of_one_step[torch-3-2]",
        ),
    ),
    Fault(
        "in fixed rounds decided rows are searched too",
        "tpsample/kernels/digits.py",
        """    if is_done(row_done_ptr, row):
        return
""",
        "",
        ("tests/logits/test_shard_logits.py::test_rows_that_are_done_are_left_out",),
    ),
    Fault(
        "kernel: the search of a row ends a digit early",
        "tpsample/kernels/row_search.py",
        "for place in range(PLACES):",
        "for place in range(PLACES - 1):",
        ("tests/logits/test_shard_logits.py::test_the_search_of_a_row_is_that_of_the_rounds",),
    ),
    Fault(
        "words of as many rows are taken for those of all in order",
        "tpsample/logits/filters.py",
        "if lists_all(index, len(words)):",
        "if len(index) == len(words):",
        ("tests/logits/test_second_round.py::test_two_rows_keep_their_tokens[top-words-1]",),
    ),
    Fault(
        "as many rows are taken for all in order",
        "tpsample/request/filters.py",
        "return index == list(range(count))",
        "return len(index) == count",
        (
            "tests/logits/test_logprobs.py::test_rows_that_are_all_stored_in_another_order_keep_their_own_tokens_and_logprobs",
        ),
    ),
    Fault(
        "a kept set at its cap overflows",
        "tpsample/logits/kept_sets.py",
        "fits = sizes <= cap",
        "fits = sizes < cap",
        ("tests/logits/test_kept_tokens.py::test_by_hand",),
    ),
]

TIES = [
    Fault(
        "top_k keeps no ties",
        "tpsample/reference.py",
        "(keep_ties & (logits == kth))",
        "(keep_ties & (logits > kth))",
        ("tests/logits/test_kept_set.py::test_the_kept_set_by_hand",),
    ),
    Fault(
        "top_p keeps no ties",
        "tpsample/reference.py",
        "before[:, 1:].masked_fill_(keep_ties & (logits[:, 1:] == logits[:, :-1]), 0)",
        "pass",
        ("tests/logits/test_kept_set.py::test_the_kept_set_by_hand",),
    ),
    Fault(
        "exact ties are kept",
        "tpsample/request/filters.py",
        'request.ties == "keep",',
        "True,",
        ("tests/logits/test_kept_set.py::test_the_kept_set_by_hand",),
    ),
    Fault(
        "the rejection keeps no ties",
        "tpsample/logits/shard_logits.py",
        "marks = torch.where(filters.keep_ties.unsqueeze(1), marks | word.TOKEN_MASK, marks)",
        "marks = marks + 0",
        ("tests/logits/test_filters.py::test_tokens_are_the_oracles[1]",),
    ),
    Fault(
        "the threshold keeps no ties",
        "tpsample/logits/cut.py",
        "return torch.where(filters.keep_ties, cut & ~word.TOKEN_MASK, cut)",
        "return cut",
        ("tests/logits/test_kept_tokens.py::test_sets_are_the_oracles_and_the_same_everywhere",),
    ),
    Fault(
        "kernel: the highest id of equal scores",
        "tpsample/kernels/epilogue.py",
        "token_id = tl.min(tl.where(holds_best, offs_v[:, None], TOKEN_MASK), axis=0)",
        "token_id = tl.max(tl.where(holds_best, offs_v[:, None], 0), axis=0)",
        ("tests/kernels/test_kernels.py::test_greedy_ties_go_to_the_lowest_id",),
    ),
    Fault(
        "the highest id of equal scores",
        "tpsample/core/word.py",
        "return (key(score) << TOKEN_BITS) | (TOKEN_MASK - token_id)",
        "return (key(score) << TOKEN_BITS) | token_id",
        ("tests/core/test_word.py::test_the_best_score_wins_and_ties_go_to_the_lowest_id",),
    ),
    Fault(
        "-0.0 is below +0.0",
        "tpsample/core/word.py",
        "bits = (score.float() + 0.0).view(torch.int32)",
        "bits = score.float().view(torch.int32)",
        ("tests/core/test_word.py",),
    ),
]

SCREEN_KERNELS = [
    Fault(
        "kernel: the bound is 5 % too small",
        "tpsample/kernels/screening.py",
        "bound = tl.load(copy.residual_ptr + row_v)[:, None] * norm[None, :]",
        "bound = tl.load(copy.residual_ptr + row_v)[:, None] * (0.95 * norm)[None, :]",
        ("tests/kernels/test_screening_kernels.py::test_the_bound_is_used_up",),
    ),
    Fault(
        "kernel: what the limbs leave of a hidden state is forgotten",
        "tpsample/kernels/screening.py",
        "error = tl.sqrt(tl.sum(lost_squares, axis=0)) * unit * UP + ACCUMULATION * norm + TINY",
        "error = ACCUMULATION * norm + TINY",
        ("tests/kernels/test_screening_kernels.py::test_what_the_limbs_lose_counts",),
    ),
    Fault(
        "kernel: a group that may hold a NaN is not listed",
        "tpsample/kernels/screening.py",
        'upper = tl.where(upper == upper, upper, float("inf"))',
        'upper = tl.where(upper == upper, upper, float("-inf"))',
        ("tests/kernels/test_screening_kernels.py::test_what_is_not_a_number_goes_the_whole_way",),
    ),
    Fault(
        "kernel: bars of the step before",
        "tpsample/kernels/screening.py",
        'tl.store(bar_ptr + sample * num_rows + row, float("-inf"))',
        "pass",
        ("tests/kernels/test_screening_kernels.py::test_batch_sizes",),
    ),
    Fault(
        "a listed tile ends with the list's last group",
        "tpsample/kernels/tile_ids.py",
        "return tl.where(in_list, first + place % GROUP, stop)\n",
        "return first + place % GROUP\n",
        ("tests/kernels/test_screening_kernels.py::test_heads",),
    ),
    Fault(
        "a changed weight is not noticed",
        "tpsample/agreement/step_checks.py",
        "if self.copied is not None and self.weight._version != self.copied:",
        "if False:",
        ("tests/kernels/test_screening_kernels.py::test_a_weight_that_changed_is_noticed",),
    ),
]

SHARDS = [
    Fault(
        "kernel: a tile begins at its shard",
        "tpsample/kernels/lm_head.py",
        "TileIds(vocab_start // 4 * 4 + pid_v * BLOCK_V, None, None)",
        "TileIds(vocab_start + pid_v * BLOCK_V, None, None)",
        ("tests/kernels/test_kernels.py::test_a_shard_may_start_inside_a_quad",),
    ),
    Fault(
        "the state of a shard begins at its shard",
        "tpsample/request/controls/token_state.py",
        "self.shard, self.first_id = shard, shard.start // 4 * 4",
        "self.shard, self.first_id = shard, shard.start",
        ("tests/kernels/test_control_kernels.py::test_virtual_ranks_apply_their_own_shards_state",),
    ),
    Fault(
        "the last shard ends behind the vocabulary",
        "tpsample/core/vocab_shard.py",
        "min((rank + 1) * rows, vocab_size))",
        "(rank + 1) * rows)",
        ("tests/core/test_vocab_shard.py::test_even_is_torch_chunk",),
    ),
    Fault(
        "padding rows of the weight are seen",
        "tpsample/local/torch_backend.py",
        "num_rows = len(self._shard)",
        "num_rows = len(self._weight)",
        ("tests/kernels/test_kernels.py::test_padding_is_never_seen[torch]",),
    ),
    Fault(
        "kernel: the last tile is not masked",
        "tpsample/kernels/epilogue.py",
        "return (ids.first < shard.start) | (ids.first + BLOCK_V > shard.stop)",
        "return ids.first < shard.start",
        ("tests/kernels/test_kernels.py::test_a_column_beside_its_shard_is_no_candidate",),
    ),
    Fault(
        "kernel: the first tile is not masked",
        "tpsample/kernels/epilogue.py",
        "return (ids.first < shard.start) | (ids.first + BLOCK_V > shard.stop)",
        "return ids.first + BLOCK_V > shard.stop",
        ("tests/kernels/test_kernels.py::test_a_column_beside_its_shard_is_no_candidate",),
    ),
    Fault(
        "the ids of other shards are counted",
        "tpsample/request/controls/token_state.py",
        "mine = (token_ids >= self.shard.start) & (token_ids < self.shard.stop)",
        "mine = token_ids >= 0",
        ("tests/request/test_controls.py::test_rows_join_leave_move_and_change_over_64_steps[3]",),
    ),
]

EXCHANGES = [
    Fault(
        "the decoding kernel starts on words that are not there yet",
        "tpsample/kernels/decode.py",
        "    if OVERLAP:\n        wait_for_previous_launch()\n",
        "",
        ("tests/kernels/test_jit_launches.py::test_a_step_compiles_as_it_is_launched[plain]",),
    ),
    Fault(
        "a bulk prefetch at an odd address",
        "tpsample/local/triton_backend.py",
        "if not self._overlap or not aligned:",
        "if not self._overlap:",
        (
            "tests/kernels/test_jit_launches.py::"
            "test_a_step_compiles_as_it_is_launched[weight at an odd address]",
        ),
    ),
    Fault(
        "the parity of the inbox is not written",
        "tpsample/kernels/inbox.py",
        "source = ((epoch & 1) * peers.num_chunks + chunk) * peers.world_size + peers.rank",
        "source = chunk * peers.world_size + peers.rank",
        (
            "tests/exchange/test_peer.py::"
            "test_a_push_writes_each_word_once_to_every_rank_and_nothing_else[None]",
        ),
    ),
    Fault(
        "the epoch is a bit off",
        "tpsample/kernels/inbox.py",
        "words | (epoch << EPOCH_SHIFT)",
        "words | (epoch << (EPOCH_SHIFT + 1))",
        (
            "tests/exchange/test_peer.py::"
            "test_a_push_writes_each_word_once_to_every_rank_and_nothing_else[None]",
        ),
    ),
    Fault(
        "the epoch wraps to the same parity",
        "tpsample/kernels/inbox.py",
        "return tl.where(epoch == EPOCH_MAX, 1, epoch + 1)",
        "return tl.where(epoch == EPOCH_MAX, 2, epoch + 1)",
        ("tests/exchange/test_peer.py::test_steps_of_any_size_through_the_wrap_of_the_epoch",),
    ),
    Fault(
        "a word of an old epoch is taken",
        "tpsample/kernels/inbox.py",
        "return words, mask & ((words >> EPOCH_SHIFT) != epoch) & (words != WORD_LOST)",
        "return words, mask & (words == 0)",
        ("tests/exchange/test_peer.py::test_a_word_of_an_earlier_epoch_does_not_stand_for_a_rank",),
    ),
    Fault(
        "a tile belongs to the chunk before",
        "tpsample/kernels/inbox.py",
        "return ((tile + 1) * num_chunks - 1) // num_tiles",
        "return tile * num_chunks // num_tiles",
        ("tests/exchange/test_peer.py::test_every_chunk_has_tiles_and_they_add_up",),
    ),
    Fault(
        "chunks leave out the last rows",
        "tpsample/local/torch_backend.py",
        "(num_rows * p // parts for p in (part, part + 1))",
        "(num_rows // parts * p for p in (part, part + 1))",
        ("tests/exchange/test_exchanges.py::test_tokens_are_the_oracles[2-7]",),
    ),
    Fault(
        "every chunk is sent in the place of the first",
        "tpsample/exchange/p2p.py",
        "self.words[chunk, :, :rows], chunk)",
        "self.words[0, :, :rows], chunk)",
        ("tests/exchange/test_exchanges.py::test_several_samples_per_row[p2p]",),
    ),
    Fault(
        "words of an unfinished step stay",
        "tpsample/exchange/base.py",
        "        if self._unfinished:\n",
        "        if False:\n",
        (
            "tests/kernels/test_step_launches.py::"
            "test_a_step_that_never_finished_leaves_nothing_to_the_next",
        ),
    ),
    Fault(
        "reset leaves the words",
        "tpsample/exchange/base.py",
        "        self.words.zero_()\n        self._unfinished = False",
        "        self._unfinished = False",
        (
            "tests/kernels/test_step_launches.py::"
            "test_a_step_that_never_finished_leaves_nothing_to_the_next",
        ),
    ),
    Fault(
        "a lost row is settled",
        "tpsample/logits/shard_logits.py",
        "lost = out.status[index] == word.Status.PEER_LOST",
        "lost = out.status[index] > word.Status.PEER_LOST",
        ("tests/logits/test_shard_logits.py::test_settle",),
    ),
    Fault(
        "a digest adds its columns",
        "tpsample/core/digest.py",
        "digest = mix(digest + column)",
        "digest = digest + column",
        ("tests/agreement/test_desync.py::test_the_digest_sees_every_bit_of_every_value",),
    ),
    Fault(
        "every chunk goes by one tag",
        "tpsample/exchange/p2p.py",
        "self.words[chunk, :, :rows], chunk)",
        "self.words[chunk, :, :rows], 0)",
        ("tests/exchange/test_exchanges.py::test_several_samples_per_row[p2p]",),
        equivalent="because gloo and NCCL match what a pair exchanges in the order it was sent",
    ),
    Fault(
        "a column has one rank of each host",
        "tpsample/exchange/two_level.py",
        "for r in host[column::columns]",
        "for r in host[column : column + 1]",
        (
            "tests/exchange/test_two_level.py::test_every_column_has_a_rank_of_every_host_and_every_rank_a_column",
        ),
    ),
]

SCORES = [
    Fault(
        "a greedy row is divided by its temperature",
        "tpsample/core/row_noise.py",
        "return torch.where(random, temperature, 1.0), random",
        "return temperature, random",
        (
            "tests/logits/test_logprobs.py::"
            "test_values_ids_and_ranks_are_the_oracles_and_the_same_everywhere[None-[1, 3]]",
        ),
    ),
    Fault(
        "a greedy row draws",
        "tpsample/core/score.py",
        "return torch.where(random, product - noise.double(), product).float()",
        "return (product - noise.double()).float()",
        ("tests/kernels/test_kernels.py::test_greedy_ties_go_to_the_lowest_id",),
    ),
    Fault(
        "noise of 32 bits",
        "tpsample/noise.py",
        "low = ((quad_xor ^ word) & 0xFFFF).double() * LOW_SCALE + LOW_HALF",
        "low = ((quad_xor ^ word) & 0).double() * LOW_SCALE + LOW_HALF",
        ("tests/test_noise.py::test_formula_error",),
    ),
    Fault(
        "kernel: noise of 32 bits",
        "tpsample/kernels/noise.py",
        "low = (base ^ (word & 0xFFFF)).to(tl.float32, bitcast=True) - LOW_OFFSET",
        "low = (base & 0xFFFF0000).to(tl.float32, bitcast=True) - LOW_OFFSET",
        (
            "tests/kernels/test_jitted_pieces.py::test_jitted_noise_is_the_definition_bit_for_bit[0-10]",
        ),
    ),
    Fault(
        "a token takes another's word of its quad",
        "tpsample/noise.py",
        "word = torch.stack(quad).gather(0, (ids & 3).unsqueeze(0)).squeeze(0)",
        "word = torch.stack(quad).gather(0, (ids & 1).unsqueeze(0)).squeeze(0)",
        ("tests/test_noise.py::test_a_tile_is_a_window_of_the_row",),
    ),
    Fault(
        "kernel: a token takes another's word of its quad",
        "tpsample/kernels/noise.py",
        "joined = tl.join(tl.join(l0, l2), tl.join(l1, l3))",
        "joined = tl.join(tl.join(l0, l1), tl.join(l2, l3))",
        (
            "tests/kernels/test_jitted_pieces.py::test_jitted_noise_is_the_definition_bit_for_bit[0-10]",
        ),
    ),
    Fault(
        "a row of masked tokens draws one",
        "tpsample/core/word.py",
        "nan, empty = word_key == KEY_NAN, word_key <= KEY_MINUS_INF",
        "nan, empty = word_key == KEY_NAN, word_key < KEY_MINUS_INF",
        ("tests/core/test_word.py::test_special_scores",),
    ),
    Fault(
        "the status of every row is OK",
        "tpsample/exchange/decode.py",
        "out.status.copy_(status.amax(dim=0))",
        "out.status.copy_(status[0] * 0)",
        (
            "tests/exchange/test_exchanges.py::test_a_nan_a_masked_and_a_forced_row_are_the_same_on_every_rank",
        ),
    ),
    Fault(
        "a filtered row forgets its NaN",
        "tpsample/logits/shard_logits.py",
        "nan = word.key_of(top_word) == word.KEY_NAN\n",
        "nan = word.key_of(top_word) < 0\n",
        ("tests/logits/test_filters.py::test_special_rows_and_several_samples[1]",),
    ),
]

REQUESTS = [
    Fault(
        "an output token counts once in the history",
        "tpsample/request/controls/token_state.py",
        "self.history[slots, columns] += 2 * mine.to(torch.int32)",
        "self.history[slots, columns] += mine.to(torch.int32)",
        ("tests/request/test_controls.py::test_several_tokens_at_once_are_counted_in_order",),
    ),
    Fault(
        "appended ids outside the vocabulary count",
        "tpsample/request/controls/tables.py",
        "there = (token_ids >= 0) & (token_ids < self.vocab_size)",
        "there = token_ids >= 0",
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
        "tpsample/request/batch_rows.py",
        "self._stale = set(self._masks)",
        "pass",
        (
            "tests/request/test_batch_state.py::"
            "test_masks_of_rows_that_changed_are_refused_until_they_are_assigned_anew",
        ),
    ),
    Fault(
        "a mask that is assigned anew stays stale",
        "tpsample/request/batch.py",
        "self._stale.discard(name)",
        "pass",
        (
            "tests/request/test_batch_state.py::"
            "test_masks_of_rows_that_changed_are_refused_until_they_are_assigned_anew",
        ),
    ),
    Fault(
        "one request for all rows loses its prompt",
        "tpsample/request/batch.py",
        "prompt_token_ids=[single.prompt] * num_rows,",
        "prompt_token_ids=None,",
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

SEEDS = [
    Fault(
        "a joining row takes the request of another",
        "tpsample/request/batch_rows.py",
        "checked[row - rows] for place",
        "checked[0] for place",
        ("tests/request/test_arrange.py::test_any_arrangement_is_the_batch_built_of_its_rows[0]",),
    ),
    Fault(
        "a new row takes over the tokens of the row whose slot it has",
        "tpsample/request/controls/tables.py",
        "old[row] if row < slots else next(unused)",
        "old[row] if row < slots else old[0]",
        ("tests/request/test_arrange.py::test_any_arrangement_is_the_batch_built_of_its_rows[0]",),
    ),
    Fault(
        "seeds that were made ahead are given out again",
        "tpsample/request/seeds.py",
        "start = self.drawn - self._first",
        "start = 0",
        (
            "tests/request/test_arrange.py::"
            "test_seeds_are_the_same_however_many_are_drawn_at_a_time[300]",
        ),
    ),
    Fault(
        "derived seeds have 31 bits",
        "tpsample/request/seeds.py",
        "return (high << 32 | low) & (2**63 - 1)",
        "return (high << 32 | low) & (2**31 - 1)",
        ("tests/request/test_params.py::test_seeds_of_one_root_repeat_and_of_two_roots_differ",),
    ),
    Fault(
        "a forked child repeats its parent's seeds",
        "tpsample/request/seeds.py",
        "if os.getpid() != self._process:",
        "if False:",
        (
            "tests/request/test_batch_state.py::test_a_forked_child_draws_other_seeds_than_its_parent",
        ),
    ),
    Fault(
        "an output shares the batch's seeds",
        "tpsample/exchange/decode.py",
        "out.seeds.copy_(seeds)",
        "out.seeds = seeds",
        ("tests/request/test_batch_state.py::test_outputs_do_not_change_when_the_batch_does",),
    ),
    Fault(
        "seeds are drawn before the ranks agree",
        "tpsample/agreement/step_checks.py",
        "            batch.prepare(self.shard)\n",
        "            batch.prepare(self.shard)\n            batch.draw_seeds(self.seeds)\n",
        ("tests/agreement/test_one_rank_wrong.py::test_a_refused_call_draws_no_seeds",),
    ),
]

AGREEMENT = [
    Fault(
        "ranks do not compare positions",
        "tpsample/agreement/step.py",
        '"positions": _digest(self.positions),',
        '"positions": 0,',
        ("tests/agreement/test_bad_arguments.py::test_a_rank_that_skips_a_step_is_noticed",),
    ),
    Fault(
        "ranks do not compare the number of samples",
        "tpsample/agreement/step.py",
        '"num_samples": self.num_samples,',
        '"num_samples": 0,',
        (
            "tests/agreement/test_one_rank_wrong.py::test_calls_that_differ_raise_the_same_naming_what_does[sample_draft]",
        ),
    ),
    Fault(
        "ranks do not compare requests",
        "tpsample/agreement/step.py",
        'found["batch"] = self.batch.plan.digest',
        'found["batch"] = 0',
        (
            "tests/agreement/test_bad_arguments.py::"
            "test_steps_that_differ_raise_naming_each_value[collective]",
        ),
    ),
    Fault(
        "ranks do not compare masks and tokens so far",
        "tpsample/agreement/step.py",
        "found |= self.batch.state_digests()",
        "pass",
        (
            "tests/agreement/test_one_rank_wrong.py::"
            "test_a_change_refused_or_forgotten_on_one_rank_is_told_by_the_next_step[append]",
        ),
    ),
    Fault(
        "ranks do not compare written temperatures",
        "tpsample/agreement/step.py",
        'found["temperatures"] = _digest(self.batch.temperature)',
        "pass",
        (
            "tests/agreement/test_one_rank_wrong.py::"
            "test_a_change_refused_or_forgotten_on_one_rank_is_told_by_the_next_step[temperature]",
        ),
    ),
    Fault(
        "ranks compare how many rows wait for a seed, not which",
        "tpsample/agreement/step.py",
        'digest_text(f"{waiting}, {self.seeds_drawn}")',
        'digest_text(f"{len(waiting)}, {self.seeds_drawn}")',
        ("tests/agreement/test_one_rank_wrong.py::test_a_refused_call_draws_no_seeds",),
    ),
    Fault(
        "the text of a request lacks a field",
        "tpsample/request/params.py",
        'for name, value in named if name != "seed")',
        'for name, value in named if name not in ("seed", "repetition_scope"))',
        (
            "tests/agreement/test_one_rank_wrong.py::"
            "test_ranks_with_other_requests_are_told_the_row_and_the_field",
        ),
    ),
    Fault(
        "reset keeps the group it replaces",
        "tpsample/ranks/process.py",
        "threading.Thread(target=held.clear, daemon=True).start()",
        'self.__dict__.setdefault("_kept", []).append(held)',
        ("tests/agreement/test_reset.py::test_resets_hold_no_more_than_the_first[collective]",),
    ),
    Fault(
        "ranks do not compare how many seeds were drawn",
        "tpsample/agreement/step.py",
        'digest_text(f"{waiting}, {self.seeds_drawn}")',
        'digest_text(f"{waiting}")',
        (
            "tests/agreement/test_one_rank_wrong.py::test_a_rank_that_drew_other_seeds_is_told_before_rows_are_given_theirs",
        ),
    ),
    Fault(
        "ranks do not compare which call it is",
        "tpsample/agreement/step.py",
        '"call": digest_text(self.name),',
        '"call": 0,',
        (
            "tests/agreement/test_one_rank_wrong.py::test_another_call_on_one_rank_raises_the_same_on_every_rank",
        ),
    ),
    Fault(
        "ranks do not compare drafts",
        "tpsample/agreement/step.py",
        '"token_ids": _digest(self.token_ids),',
        '"token_ids": 0,',
        (
            "tests/agreement/test_one_rank_wrong.py::test_calls_that_differ_raise_the_same_naming_what_does[verify]",
        ),
    ),
]

SPECULATIVE = [
    Fault(
        "a draft is accepted without its own law",
        "tpsample/speculative/tokenwise.py",
        "return leading((u * q < p) & (q > 0))",
        "return leading((u < p) & (q > 0))",
        ("tests/speculative/test_law.py::test_acceptance_is_exactly_as_published",),
    ),
    Fault(
        "a position without a draft is accepted",
        "tpsample/speculative/tokenwise.py",
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
        "tpsample/speculative/block.py",
        "chain.append((chain[-1] * ratio).clamp(max=1))",
        "chain.append(chain[-1] * ratio)",
        ("tests/speculative/test_law.py::test_acceptance_is_exactly_as_published",),
    ),
    Fault(
        "a block recovers as token by token",
        "tpsample/speculative/block.py",
        "return stop, coefficient.gather(1, stop.unsqueeze(1)).squeeze(1)",
        "return stop, torch.ones_like(coefficient[:, 0])",
        (
            "tests/speculative/test_shards.py::test_rows_that_stop_within_a_block_recover_at_its_coefficient",
        ),
    ),
]

LOGPROBS = [
    Fault(
        "a rank counts no ties",
        "tpsample/logits/logprobs.py",
        "_lowest_tie(marks).maximum(",
        "marks.maximum(",
        ("tests/logits/test_logprobs.py::test_the_layout_by_hand",),
    ),
    Fault(
        "entropy has the wrong sign of its moment",
        "tpsample/logits/logprobs.py",
        "log_total.squeeze(1) + sums[:, 1] / sums[:, 0]",
        "log_total.squeeze(1) - sums[:, 1] / sums[:, 0]",
        ("tests/logits/test_logprobs.py::test_the_layout_by_hand",),
    ),
    Fault(
        "raw logprobs are divided by the temperature",
        "tpsample/logits/logprobs.py",
        "temperature = torch.where(asked.processed, rows.temperature, 1.0)",
        "temperature = rows.temperature",
        (
            "tests/logits/test_logprobs.py::"
            "test_values_ids_and_ranks_are_the_oracles_and_the_same_everywhere[None-[1, 3]]",
        ),
    ),
]

LIFETIME = [
    Fault(
        "a draft equal to the token of failed rows is accepted",
        "tpsample/speculative/coupled.py",
        "(drafts >= 0) & drawn)",
        "(drafts >= 0))",
        (
            "tests/sampler/test_on_failed.py::"
            "test_a_verification_stops_at_a_failed_position_even_if_its_draft_is_that_token",
        ),
    ),
    Fault(
        "a filtered row that failed keeps -1",
        "tpsample/logits/finish.py",
        "filters.row_index, out, on_failed)",
        "filters.row_index, out)",
        (
            "tests/sampler/test_on_failed.py::"
            "test_rows_that_fail_return_it_and_their_status_still_tells",
        ),
    ),
    Fault(
        "the weight keeps its gradient",
        "tpsample/sampler.py",
        "given.weight.detach()",
        "given.weight",
        ("tests/request/test_batch_state.py::test_steps_with_gradients_leave_nothing_behind",),
    ),
    Fault(
        "the hidden states keep their gradient",
        "tpsample/sampler.py",
        "self.begin(hidden_states.detach(), call.view,",
        "self.begin(hidden_states, call.view,",
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
        "    @torch.inference_mode(False)\n    def __init__(",
        "    def __init__(",
        (
            "tests/request/test_batch_state.py::test_sampler_batch_and_steps_may_each_be_under_another_mode[torch-grad-inference]",
        ),
    ),
    Fault(
        "tables are made under inference mode",
        "tpsample/request/controls/tables.py",
        "    @torch.inference_mode(False)\n    def __init__(",
        "    def __init__(",
        ("tests/request/test_batch_state.py::test_a_mask_may_be_assigned_under_inference_mode",),
    ),
]

ENGINES = [
    Fault(
        "logits of the caller get the bias of the head",
        "tpsample/local/triton_backend.py",
        '"bias_ptr": None if given else self._bias,',
        '"bias_ptr": self._bias,',
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
        "tpsample/trace.py",
        "inside = torch.arange(self.step) < until.unsqueeze(1)",
        "inside = torch.arange(self.step) <= until.unsqueeze(1)",
        ("tests/test_trace.py::test_what_lies_behind_the_end_of_a_row_is_blank",),
    ),
]

BENCHMARKS = [
    Fault(
        "two scaling runs share a folder",
        "benchmarks/scaling/command.py",
        "fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        ("tests/benchmarks/scaling/test_command.py::test_two_runs_do_not_share_a_folder",),
    ),
    Fault(
        "a forecast for GPUs takes times of a CPU",
        "benchmarks/scaling_model.py",
        'if hardware == "CPU" or result.machine',
        "if result.machine",
        ("tests/benchmarks/test_scaling_model.py::test_what_forecasts_no_gpu_is_refused",),
    ),
    Fault(
        "a forecast shard that is called measured",
        "benchmarks/scaling_model.py",
        "us * TILE_MODEL.high, ASSUMED)",
        "us * TILE_MODEL.high, MEASURED)",
        (
            "tests/benchmarks/test_scaling_model.py::test_without_a_measurement_nothing_is_called_measured",
        ),
    ),
    Fault(
        "a candidate that is wrong on another rank alone is timed",
        "benchmarks/scaling/ranks.py",
        "if why := next((each for each in job.gather(why) if each is not None), None):",
        "if why := next((each for each in job.gather(why)[:1] if each is not None), None):",
        (
            "tests/benchmarks/scaling/test_ranks.py::test_a_candidate_that_is_wrong_on_a_rank_is_left_out_and_said",
        ),
    ),
    Fault(
        "a scaling run begins again after a kill",
        "benchmarks/scaling/record.py",
        "if point not in done]",
        "if done is not None]",
        ("tests/benchmarks/scaling/test_ranks.py::test_a_killed_run_goes_on_where_it_was",),
    ),
    Fault(
        "a busy machine is called quiet",
        "benchmarks/scaling/quiet.py",
        'if before["load"][0] > machine.BUSY_LOAD * cores:',
        'if before["load"][0] > BUSY_AFTER * cores:',
        ("tests/benchmarks/scaling/test_page.py::test_a_machine_that_was_not_quiet_is_named",),
    ),
    Fault(
        "a baseline may draw what the filters drop",
        "benchmarks/scaling/candidates.py",
        "least = logits.float().masked_fill(~kept, torch.inf).amin(dim=1)",
        "least = logits.float().amin(dim=1)",
        (
            "tests/benchmarks/scaling/test_ranks.py::test_a_baseline_may_draw_no_id_that_the_filters_drop",
        ),
    ),
    Fault(
        "an all-to-all that counts the bytes of its own rows",
        "benchmarks/whole_logits.py",
        "others = self.problem.rows - len(self.own)",
        "others = self.problem.rows",
        ("tests/benchmarks/test_whole_logits.py::test_both_ways_sample_whole_logits",),
    ),
    Fault(
        "packages of others are looked for in no folder",
        "benchmarks/third_party.py",
        "sys.path.append(folder)",
        "pass",
        ("tests/benchmarks/test_third_party.py::test_those_in_the_folder_are_candidates",),
    ),
]

GPU_CHECK = [
    Fault(
        "every pointer counts as aligned",
        "benchmarks/launches.py",
        "value.data_ptr() % 16 == 0)",
        "True)",
        ("tests/benchmarks/test_gpu_compile.py",),
    ),
    Fault(
        "a benchmark is rehearsed without its own steps",
        "benchmarks/rehearsal.py",
        "times = self.time({name: each.step for name, each in candidates.items()})",
        "times = {}",
        ("tests/benchmarks/test_gpu_compile.py",),
    ),
    Fault(
        "a section outlives its run",
        "benchmarks/gpu_check.py",
        "with_parent(command), cwd",
        "command, cwd",
        (
            "tests/benchmarks/test_gpu_check_ends.py::test_a_run_that_is_killed_outright_leaves_its_results_and_no_process",
        ),
    ),
    Fault(
        "a read by tiles counts the last row again",
        "benchmarks/baseline_kernels.py",
        "total = tl.where((offs_v < num_rows)[:, None], total, 0)",
        "total = total + 0",
        ("tests/benchmarks/test_ceilings.py::test_a_read_by_tiles_reads_every_row_once",),
    ),
    Fault(
        "candidates of the tuner may be too large",
        "benchmarks/tune.py",
        "tile for tile in tried if fits(tile, gpu)",
        "tile for tile in tried",
        ("tests/local/test_tiles.py",),
    ),
]

FAULTS = [
    *(*SCREENING, *SCREEN_KERNELS, *FILTERS, *TIES, *SHARDS, *EXCHANGES, *SCORES, *REQUESTS),
    *(*SEEDS, *AGREEMENT),
    *(*SPECULATIVE, *LOGPROBS, *LIFETIME, *ENGINES, *FILES, *BENCHMARKS, *GPU_CHECK),
]
