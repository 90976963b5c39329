"""Faults that compiled kernels and graphs show: order of memory, prefetches, overlap, old rows."""

from tests.faults.fault import faults

FAULTS = faults(r"""
tpsample/backends/triton_/screen_launches.py
    the screen asks for rows behind its own
    - PREFETCH=min(tile.num_stages * tile.block_d, padded) if
    + PREFETCH=tile.num_stages * tile.block_d if
    > test_no_more_than_a_row_is_asked_for
tpsample/backends/triton_/kernels/overlap.py
    every thread of a row asks for the whole of it
    - while parts * 2 * rows <= threads and num_bytes
    + while False and num_bytes
    > test_threads_that_hold_the_same_row_share_it
tpsample/backends/triton_/kernels/inbox.py
    compiled: an arrival neither releases nor acquires
    - if tl.atomic_add(arrive, 1, sem="acq_rel", scope="gpu") == num_arrivals - 1:
    + if tl.atomic_add(arrive, 1, sem="relaxed", scope="gpu") == num_arrivals - 1:
    > compiled/test_compiled_kernels.py::test_what_compiled_kernels_of_sm_90_do
tpsample/backends/triton_/kernels/head.py
    compiled: maxima that other programs need not see
    - scope="gpu",
    + scope="cta",
    > compiled/test_compiled_kernels.py::test_what_compiled_kernels_of_sm_90_do
tpsample/compiled.py
    graph: filters and penalties are forgotten
    - batch._handle if batch._reads_tables else PLAIN),
    + PLAIN),
    > test_filters_penalties_and_masks_stand_in_a_full_graph[top_k-aot_eager-torch]
    > test_filters_penalties_and_masks_stand_in_a_full_graph[penalties-aot_eager-torch]
    graph: masks of other rows are taken
    - stale = any(
    + stale = False and any(
    > test_what_needs_the_host_is_refused_in_a_full_graph[stale mask]
    graph: kept sets are left out in silence
    - or batch.plan.kept_cap is not None
    + or False
    > test_what_needs_the_host_is_refused_in_a_full_graph[kept_cap]
    graph: logprobs are left out in silence
    - reports = batch.plan.logprobs is not None
    + reports = False
    > test_what_needs_the_host_is_refused_in_a_full_graph[logprobs]
    graph: another number of rows is refused without our reason
    - or batch.rows != num_rows
    + or False
    > test_what_needs_the_host_is_refused_in_a_full_graph[too few]
    graph: an empty slot is drawn
    - stale or bool(batch._table.empty)
    + stale or False
    > test_what_needs_the_host_is_refused_in_a_full_graph[empty]
    graph: ranks compare no tokens so far
    - GraphRows(object_of(of_batch, "batch"), temperature, seed, given)
    + GraphRows(object_of(of_batch, "batch"), temperature, seed, given)._read()
    > test_ranks_compare_tokens_so_far_inside_a_graph
tpsample/core/handles.py
    a look for samplers meets one that another thread builds
    - objects = [reference() for reference in _objects.valuerefs()]
    + objects = _objects.values()
    > test_a_sampler_that_another_thread_builds_is_not_in_the_way_of_a_look_at_all[living]
    graph: rows that have changed keep their number
    - _objects.pop(before, None)
    + pass
    > test_a_graph_of_a_batch_that_has_changed_or_is_gone_says_so
tpsample/request/batch.py
    graph: a copy of a batch has the number of the first
    - self._handle = handle_of(self)
    + pass
    > test_a_graph_of_a_batch_that_has_changed_or_is_gone_says_so
tpsample/request/graph_rows.py
    graph: temperatures are those before it
    - return self._numbers[0]
    + return self._batch.temperature
    > test_a_graph_may_write_what_the_step_reads
    graph: a step on a GPU waits
    - return plan if readable(self.device) else plan.in_fixed_rounds
    + return plan
    > test_a_step_on_a_gpu_goes_by_fixed_rounds_inside_a_graph
tpsample/request/plan.py
    graph: fixed rounds take memory of the compiler
    - fixed_rounds=True, drawn=self.drawn)
    + fixed_rounds=True)
    > test_after_a_step_outside_the_operator_keeps_no_new_tensor[penalties]
    > test_after_a_step_outside_the_operator_keeps_no_new_tensor[top_k]
""")
