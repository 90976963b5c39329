"""Faults of filters and logprobs."""

from tests.faults.fault import Fault

FILTERS = [
    Fault(
        "top_k counts one token more",
        "tpsample/logits/shard_logits.py",
        "member &= number < filters.top_k.unsqueeze(1)",
        "member &= number <= filters.top_k.unsqueeze(1)",
        ("tests/logits/test_filters.py::test_tokens_are_the_oracles[1]",),
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
            "tests/logits/test_filters.py::test_the_threshold_decides_what_the_rejection_cannot[hot-joint]",
        ),
    ),
    Fault(
        "in fixed rounds undecided rows keep what the rejection found",
        "tpsample/logits/filters.py",
        "return torch.where(decided.unsqueeze(1), words, best)",
        "return words",
        (
            "tests/logits/test_fixed_rounds_mixtures.py::test_decided_and_undecided_rows_of_one_step[torch-3-2]",
        ),
    ),
    Fault(
        "a rejection decides rows with a top_p in a large top_k",
        "tpsample/logits/filters.py",
        "decided &= ~filters.by_threshold | is_nan",
        "pass",
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
        "words of as many rows are taken for those of all in order",
        "tpsample/logits/filters.py",
        "if lists_all(index, len(words)):",
        "if len(index) == len(words):",
        ("tests/logits/test_threshold.py::test_two_rows_keep_their_tokens[1]",),
    ),
    Fault(
        "rows with ties go by top words",
        "tpsample/request/filters.py",
        'if top_k <= MAX_TOP_WORDS and request.ties == "exact":',
        "if top_k <= MAX_TOP_WORDS:",
        ("tests/logits/test_filters.py::test_tokens_are_the_oracles[1]",),
    ),
    Fault(
        "a filtered row's neighbours draw nothing",
        "tpsample/local/torch_backend.py",
        "best[:, drawn] = drawn_best",
        "pass",
        ("tests/local/test_rows_of_a_step.py::test_each_row_has_its_token",),
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
    Fault(
        "second rounds are not counted",
        "tpsample/logits/filters.py",
        "ranks.counters.second_rounds += len(undecided)",
        "ranks.counters.second_rounds += bool(undecided)",
        (
            "tests/logits/test_filters.py::"
            "test_the_threshold_decides_what_the_rejection_cannot[hot-joint]",
        ),
    ),
    Fault(
        "the failed rows of a step are not counted",
        "tpsample/steps.py",
        "self.count_own(out.status)",
        "pass",
        (
            "tests/sampler/test_on_failed.py::"
            "test_fixed_rounds_and_logits_of_the_caller_return_it_too",
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
