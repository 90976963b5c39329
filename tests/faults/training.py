"""Faults of the scores that a trainer takes."""

from tests.faults.fault import faults

FAULTS = faults(r"""
tpsample/training/shards.py
    losses of ranks may differ
    - for which, row in differ.any(dim=0).nonzero()[:1].tolist():
    + for which, row in ():
    > test_a_backward_that_differs_on_one_rank_is_refused_on_all
tpsample/training/trainer_ranks.py
    backwards of different calls are summed
    - require_equal([{"call": record.pop("call")} for record in records], {"call": SAME_CALL})
    + [record.pop("call") for record in records]
    > test_a_backward_that_differs_on_one_rank_is_refused_on_all
    a rank that does not score or learn is not named
    - self.roll.wait(work)
    + work.wait()
    > test_a_rank_that_does_not_score_is_looked_for
    > test_a_rank_that_calls_no_backward_is_named
    a trainer goes on over messages that an interrupt has left
    - if (left := self.shared.left) is not None:
    + if left := None:
    > test_a_call_that_was_interrupted_is_not_gone_on_with
tpsample/training/logprobs.py
    second derivatives are left out in silence
    - if torch.is_grad_enabled():  #
    + if False:  #
    > test_a_second_derivative_is_refused_and_a_kept_graph_is_not
    what was given may be written to before backward
    - given = [self.token_ids, self.temperature, *sets]
    + given = []
    > test_what_was_given_must_not_be_written_to_before_backward
    the entropy's gradient forgets the entropy
    - spread = torch.where(p > 0, p * (log_p + entropies[row]), 0.0)
    + spread = torch.where(p > 0, p * log_p, 0.0)
    > test_gradients_are_those_of_a_masked_softmax_in_float64[torch-{}-False]
    gradients of hidden states lie as these do
    - to_hidden = weight.new_zeros(hidden_states.shape, dtype=torch.float64)
    + to_hidden = torch.zeros_like(hidden_states, dtype=torch.float64)
    > test_numbers_that_lie_in_columns_have_the_same_gradients
    gradients of hidden states are this rank's alone
    - to_hidden = ranks.sum(to_hidden).to(hidden_states.dtype)
    + to_hidden = to_hidden.to(hidden_states.dtype)
    > test_ranks_together_score_and_learn_as_one
    masses are not rounded
    - weights = masses_and_moments if logits.dtype == torch.float32 else _smooth_masses
    + weights = _smooth_masses
    > test_values_are_bit_for_bit_those_of_the_step
    the soft-cap has no slope
    - return grads / temperature[row].double() * slopes(products, scored.head)
    + return grads / temperature[row].double() * scored.head.logit_scale
    > test_gradients_agree_with_small_differences
    the gradient of the whole weight is float64
    - slices(len(used) if for_weight or whole_parts else 0, size, at_once)
    + [slice(0, len(used))]
    > test_memory_grows_with_the_sets_and_not_with_the_head
    a weight's rows take the pairs of their neighbours
    - ends_of_block = ends[part.start : part.stop + 1]
    + ends_of_block = ends[: part.stop - part.start + 1]
    > test_gradients_are_those_of_a_masked_softmax_in_float64
tpsample/backends/torch_/pairs.py
    sums that are undecided are rounded as they come
    - rounded[undecided] = exact_sums(products[undecided])
    + pass
    > test_products_of_pairs_are_exact_on_a_cpu
    plain sums of a part begin at the first pair
    - pairs = slice(first + part.start, first + part.stop)
    + pairs = part
    > test_weighted_rows_are_added_as_by_plain_pytorch
tpsample/backends/numba_/kernels/pairs.py
    native products keep the row of the first pair
    - if rows[t] != taken:
    + if taken < 0:
    > test_products_of_pairs_are_those_of_plain_pytorch
    native sums replace what is there
    - total[d] += factor * F64(as_fp32(part_of_source[d]))
    + total[d] = factor * F64(as_fp32(part_of_source[d]))
    > test_weighted_rows_are_added_as_by_plain_pytorch
tpsample/backends/numba_/pairs.py
    native kernels read columns as rows
    - return numbers.dtype in FORMATS and numbers.stride(1) == 1
    + return numbers.dtype in FORMATS
    > test_products_of_pairs_are_those_of_plain_pytorch
tpsample/backends/triton_/kernels/pairs.py
    a product that overflows is infinite
    - product = tl.where(product == float("inf"), float("nan"), product)
    + product = product
    > test_a_product_that_overflows_is_no_number
    sums take pairs of the next row
    - inside = pair < end
    + inside = pair < first + PAIRS
    > test_weighted_rows_are_added_as_by_plain_pytorch
tpsample/training/products.py
    rows that kept every id are summed in fp32 on a CPU
    - exact = numbers.is_cpu or numbers.dtype == torch.float64
    + exact = numbers.dtype == torch.float64
    > test_values_are_bit_for_bit_those_of_the_step
    a part of the weight's rows is multiplied in the place of the first
    - out=products[:, part])
    + out=products[:, : part.stop - part.start])
    > test_rows_that_kept_every_id_are_summed_in_fp32_on_a_gpu
tpsample/training/call.py
    scores of trainers take wrappers of torch.func
    - require_plain("hidden_states", hidden_states)
    + pass
    > test_transforms_of_functions_are_refused[vmap]
    kernels of a trainer start on another GPU than the weight's
    - check_current("lm_head_weight", weight.device)
    + pass
    > test_a_weight_on_a_gpu_that_is_not_the_current_one_is_refused
    a rank compiles while others wait for its sums
    - room.add_weighted_rows(
    + 0 and room.add_weighted_rows(
    > test_kernels_are_compiled_before_the_ranks_meet
    a tangent of the temperature is dropped in silence
    - if isinstance(given, Tensor) and unpack_dual(given).tangent is not None:
    + if False:
    > test_a_tangent_of_forward_mode_is_refused
    a tensor that autograd cannot keep ends the call of one rank
    - if tensor.is_inference():
    + if False:
    > test_a_backward_that_differs_on_one_rank_is_refused_on_all
    > test_a_tensor_of_inference_mode_is_refused_where_gradients_are_wanted
    a compiler looks into the scores
    - @outside_of_graphs
    + @(lambda function: function)
    > test_a_compiled_trainer_scores_outside_of_its_graph
    a temperature is left without its gradient in silence
    - if isinstance(temperature, Tensor) and temperature.requires_grad and torch.is_grad_enabled():
    + if False:
    > test_one_rank_is_told
    a token outside of its set is scored
    - if missing:
    + if False:
    an id that is listed twice counts twice
    - if len(twice):
    + if False:
    hidden states may differ between ranks
    - "hidden_states": _compared(hidden_states),
    + "hidden_states": list(hidden_states.shape),
    > test_every_rank_is_told_of_what_is_wrong_on_one
""")
