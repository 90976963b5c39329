"""Faults of scores, of ties, and of the bounds that rule tokens out."""

from tests.faults.fault import Fault

WEIGHTS = "tests/sampler/test_weights_that_change.py::"

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
        "return torch.where(filters.keep_ties.unsqueeze(1), marks | word.TOKEN_MASK, marks)",
        "return marks",
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

SCREENING = [
    Fault(
        "native: the fp32 bound leaves out the sum",
        "tpsample/native/products.py",
        "spread = (hidden_size + 4) * UNIT",
        "spread = 4 * UNIT",
        ("tests/screening/test_bound.py::test_the_fp32_bound_is_its_formula",),
    ),
    Fault(
        "native: the bound of the noise has no margin",
        "tpsample/native/noise.py",
        "math.log2(math.log2(math.e)) + 1e-5)",
        "math.log2(math.log2(math.e)) - 1e-4)",
        ("tests/screening/test_bound.py::test_the_noise_is_below_its_bound",),
    ),
    Fault(
        "native: a block without a proof is trusted",
        "tpsample/native/products.py",
        "        products.values[i] = np.nan",
        "        products.values[i] = -3e38",
        ("tests/screening/test_words.py::test_numbers_that_are_not_finite_or_nearly_so",),
    ),
    Fault(
        "native: a filter takes a NaN for less than its threshold",
        "tpsample/native/store.py",
        "if upper[i, j] == F32(-np.inf) or upper[i, j] < threshold:",
        "if upper[i, j] == F32(-np.inf) or not upper[i, j] >= threshold:",
        ("tests/screening/test_filters.py::test_numbers_that_are_not_finite_or_nearly_so",),
    ),
    Fault(
        "native: the lower end of a product is taken for its upper end",
        "tpsample/native/head.py",
        "if falls else up(products[j] + errors[j])",
        "if falls else up(products[j] - errors[j])",
        ("tests/screening/test_bound.py::test_scores_are_below_their_upper_bounds",),
    ),
    Fault(
        "native: the sign of logit_scale is not looked at",
        "tpsample/native/draw.py",
        "is_plain(head), head.logit_scale < F32(0)",
        "is_plain(head), False",
        ("tests/screening/test_words.py::test_head_and_bias",),
    ),
    Fault(
        "native: a sum that is not decided is trusted",
        "tpsample/native/numbers.py",
        "    if decided or sums_are_exact(",
        "    if True or sums_are_exact(",
        ("tests/core/test_exact_sum.py::test_midpoints",),
    ),
    Fault(
        "native: the threshold of min_p is above the least kept logit",
        "tpsample/native/store.py",
        "step - DOWN * (abs(F64(top)) - step) - 1e-30",
        "step + F64(2.0**-12) * (abs(F64(top)) - step)",
        ("tests/screening/test_filters.py::test_the_threshold_of_min_p_is_reached",),
    ),
    Fault(
        "native: a mask is left out",
        "tpsample/native/head.py",
        "if len(head.mask):",
        "if False:",
        ("tests/screening/test_words.py::test_controls",),
    ),
    Fault(
        "native: drafts are left out of the history",
        "tpsample/native/head.py",
        "                    history[i] += I32(2)",
        "                    history[i] += I32(0)",
        ("tests/screening/test_words.py::test_drafts_count_as_output",),
    ),
    Fault(
        "native: a token stands before itself",
        "tpsample/logits/shard_logits_native.py",
        "self._marks(gathered, filters, count) + 1",
        "self._marks(gathered, filters, count)",
        ("tests/logits/test_shard_logits.py::test_rejection",),
    ),
    Fault(
        "native: a mark is not counted",
        "tpsample/native/passes.py",
        "counts[row, c] += word >= marks[row, c]",
        "counts[row, c] += word > marks[row, c]",
        ("tests/logits/test_shard_logits.py::test_sums_down_to_a_word",),
    ),
    Fault(
        "native: a mass is truncated",
        "tpsample/native/passes.py",
        "F64(TOP_MASS) + INTEGER",
        "F64(TOP_MASS) - 0.5 + INTEGER",
        ("tests/logits/test_shard_logits.py::test_digits",),
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
        "native: the threshold of a top_k is that of one less",
        "tpsample/native/store.py",
        "push(heaps[i], top_k[i], logit)",
        "push(heaps[i], max(top_k[i] - 1, 1), logit)",
        ("tests/screening/test_filters.py::test_filters_that_keep_all_that_is_listed",),
    ),
    Fault(
        "top_p beside top_k counts as bounded",
        "tpsample/request/filters.py",
        "return by_min_p or (by_top_k and (whole or not self.joint))",
        "return by_min_p or by_top_k",
        ("tests/screening/test_filters.py::test_which_rows_need_few_logits",),
    ),
]

SCREEN_KERNELS = [
    Fault(
        "kernel: the bound is 5 % too small",
        "tpsample/kernels/screening.py",
        "bound = tl.load(bounds.residual_ptr + row_v)[:, None] * norm[None, :]",
        "bound = tl.load(bounds.residual_ptr + row_v)[:, None] * (0.95 * norm)[None, :]",
        ("tests/kernels/test_screening_kernels.py::test_the_bound_is_used_up",),
    ),
    Fault(
        "kernel: what the limbs leave of a hidden state is forgotten",
        "tpsample/kernels/limbs.py",
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
        "tpsample/kernels/limbs.py",
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
        "if copy is not None and not copy.is_current():",
        "if False:",
        ("tests/kernels/test_screening_kernels.py::test_a_weight_that_changed_is_noticed",),
    ),
    Fault(
        "a weight that lies elsewhere is not followed",
        "tpsample/agreement/caller_tensors.py",
        "alias.data = its.detach()",
        "pass",
        (f"{WEIGHTS}test_a_bias_is_followed_too",),
    ),
    Fault(
        "a change of the weight that torch does not count is not noticed",
        "tpsample/screening/int8_copy.py",
        "return torch.equal(sum_rows(self._weight[some], self._key), self._sums[some])",
        "return True",
        (f"{WEIGHTS}test_a_change_of_few_rows_is_found_within_a_round[1]",),
    ),
    Fault(
        "the rows that are looked at stay the same",
        "tpsample/screening/int8_copy.py",
        "self._turn += 1",
        "pass",
        (f"{WEIGHTS}test_a_change_of_few_rows_is_found_within_a_round[1]",),
    ),
]
