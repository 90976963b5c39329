"""Faults that a GPU alone would show: kernels that compile late, and waits that nobody sees."""

from tests.faults.fault import faults

FAULTS = faults(r"""
tpsample/backends/triton_/tile_table.py
    the highest batch tile is not warmed up
    - + [min(max_rows, MAX_BLOCK_B)]
    +
    > test_every_batch_tile_is_warmed_up
    an MI300 passes for a Hopper
    - return self.arch >= OVERLAP_ARCH and not self.amd
    + return self.arch >= OVERLAP_ARCH
    > test_an_mi300_is_no_hopper_though_it_reports_9_4
    tiles of an AMD GPU have more stages than fit
    - AMD_SHARED_BYTES = 64 * 1024
    + AMD_SHARED_BYTES = 96 * 1024
    > test_tiles_fit_the_local_memory
tpsample/request/kinds.py
    steps in fixed rounds, which steps over slots are, are not warmed up
    - if batch.plan.filters is not None:
    + if False:
    > test_steps_over_slots_are_warm
    slots without filters beside those of first words are not warmed up
    - if by_first:  #
    + if False:  #
    filtered rows of slots are not warmed up
    - for kind in ("plain", *stored):
    + for kind in ("plain",):
    > test_steps_over_slots_are_warm[top_p]
    many logprobs of rows with controls are not warmed up
    - for others in ((), filtered, controlled))
    + for others in ((), filtered))
    > test_many_logprobs_are_warm_too[others2-True]
    a search that comes first in fixed rounds is not warmed up
    - for judged in (False, True)[: 1 + (_SEARCHED in mix)]:
    + for judged in (True,):
    > test_another_request_of_a_kind_launches_nothing_new[top_p in top_k]
    a search that follows best scores in fixed rounds is not warmed up
    - for judged in (False, True)[: 1 + (_SEARCHED in mix)]:
    + for judged in (False,):
    > test_rows_that_their_best_scores_leave_undecided_are_warm
    the search of rows that are undecided is not warmed up
    - kinds = tuple(dict.fromkeys((*kinds, _SEARCHED)))
    + pass
    sets that the LM head tells apart are not warmed up
    - _sets_of(kinds, _OF_THE_HEAD), *_sets
    + _sets_of(kinds[:1], _OF_THE_HEAD), *_sets
    > test_every_mix_that_the_head_tells_apart_is_warm
    verification is not warmed up
    -         if num_drafts:
    +         if False:
    > test_verification_is_warm
    kept sets are not warmed up
    - kept_cap=2 if "kept sets" in mix else None,
    + kept_cap=None,
    > test_kept_sets_of_each_kind_are_warm
    mixes are warmed up with kept sets and logprobs alone
    - for left_out in ((), ("kept sets",), _REPORTS):
    + for left_out in ((), ("kept sets",)):
    > test_a_mix_is_warm_with_kept_sets_and_without[fields0-None]
    first words are warmed up with kept sets alone
    - for report in reports[:1] for kind in by_first
    + for report in reports[:1] for kind in by_first if report == "kept sets"
    > test_logprobs_are_warm_with_each_kind_that_first_words_decide
    plain rows of a verification are not warmed up
    - fewest = 0 if "plain" in kinds else 1
    + fewest = 1
    > test_any_number_of_drafts_up_to_that_of_a_warm_up_is_warm
    a warm-up takes more rows than the sampler has
    - first, rest, width = filters[:1], filters[1:], max(1, most - 1)
    + first, rest, width = filters[:1], filters[1:], len(kinds)
    > test_a_small_sampler_is_warmed_up_by_all_kinds
tpsample/backends/triton_/launcher.py
    a known launch reads words at an address that its binary is not for
    - numbers, *dtypes, *rests, *options
    + numbers, *dtypes, *options
    > test_known_launches_are_those_of_triton
    a known launch reads words of another size
    - numbers, *dtypes, *rests, *options
    + numbers, *rests, *options
    a known launch has the programs of another
    - kind = device, grid, len(arguments)
    + kind = device, len(arguments)
    a known launch has as many warps as another
    - *dtypes, *rests, *options
    + *dtypes, *rests
    a profiler hears nothing of known launches
    - if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
    + if False:
    a kernel starts on another GPU than its tensors are on
    - check_current("a tensor of this call", value.device)
    + pass
    arguments that stay are handed over in another order
    - (*addresses, *numbers, *self._kept)
    + (*addresses, *numbers, *reversed(self._kept))
    a kernel may fuse products
    - {"enable_fp_fusion": False}
    + {}
    > backends/triton_/test_jit_launches.py::test_every_step_compiles_as_it_is_launched
tpsample/backends/triton_/launch.py
    a weight that has moved is read where it was
    - self._launches.clear()  # which know
    + pass  # which know
    > test_known_launches_are_those_of_triton
tpsample/sampler.py
    many logprobs of a prompt are not warmed up
    - for top in (1, min(FEW_LOGPROBS + 1, self.vocab_size)):
    + for top in (1,):
    > test_logprobs_of_a_prompt_are_warm
tpsample/backends/over_zeros.py
    fewer drafts than the most are not warmed up
    - while width < most:
    + while False:
    > test_any_number_of_drafts_up_to_that_of_a_warm_up_is_warm
tpsample/request/step.py
    processed logits begin at any address
    - return 2 * (count + -count % 4) if controlled else count
    + return 2 * count if controlled else count
    > test_filtered_rows_with_controls_are_warm_at_any_number_of_rows
tpsample/backends/triton_/kernels/decode.py
    an output that is a view compiles another kernel
    - *("token_ptr", "status_ptr", "out_seed_ptr"),
    +
    > test_views_at_odd_places_are_warm
tpsample/backends/triton_/kernels/token_mask.py
    a forced id below -1 means any id to a kernel
    - tl.where(forced != -1,
    + tl.where(forced >= 0,
    > test_a_forced_id_that_is_none_leaves_no_id[triton-3]
    a forced id that another mask forbids is not drawn by a kernel
    - free = forced == -1
    + free = forced >= -1
    a grammar that is a view compiles another kernel
    - do_not_specialize_on_alignment=["grammar_ptr", "forced_ptr"],
    +
    > test_views_at_odd_places_are_warm
tpsample/backends/numba_/launch.py
    kernels of a CPU are not loaded by a warm-up
    -         load_all(self._weight, screened=self.copy is not None)
    +         pass
    > test_a_warmed_sampler_of_a_cpu_compiles_nothing_for_random_steps
tpsample/core/tensors.py
    a compiler that refuses a call does not say which
    - called.__name__ = called.__qualname__ = (
    + _ = (
    > test_other_calls_run_outside_of_the_graph
    a request that comes waits for the device
    - .copy_(values, non_blocking=True)
    + .copy_(values)
    > test_a_request_that_comes_waits_for_nothing
    lists are handed to the device by a copy that waits
    - on_host.to(device, non_blocking=True)
    + on_host.to(device)
    > test_numbers_that_are_handed_over_wait_for_nothing
tpsample/request/filters.py
    rows are picked by an index of the host
    - self.row_index[selected],
    + self.row_index[index],
    > test_a_step_of_rows_that_go_different_ways_indexes_by_no_list
tpsample/request/table.py
    rows of one method stand among others
    - rows.sort(key=lambda row: _FILTERS(entries[row]).demand.method_index)
    + pass
    > test_rows_of_one_method_lie_together_and_none_is_copied
tpsample/pipeline.py
    a captured step is kept for good
    - self._captured[id(batch.plan)] = batch.plan
    + self._captured[id(step)] = step
    > test_a_captured_graph_keeps_what_a_batch_forgets
    a graph reads what a batch has forgotten
    -             self._captured[id(batch.plan)] = batch.plan
    +             pass
    a captured step of plain rows is kept for good
    - if batch._stores_logits and batch.undrawn is None and capturing(self.settings.device):
    -             self._captured[id(batch.plan)] = batch.plan
    + if capturing(self.settings.device):
    +             self._captured[id(step)] = step
    > test_a_captured_graph_gives_the_memory_of_its_steps_back[torch]
tpsample/ranks/roll_call.py
    an error of a capture is told as a lost peer
    - if capturing(device):
    + if False:
    > test_an_error_while_a_graph_is_captured_is_no_lost_peer
    nobody is told that a sampler was closed
    - self.leave("closed its sampler")
    + pass
    > ranks/test_lost_ranks.py::test_a_sampler_that_one_rank_closes_is_told_as_that[collective]
tpsample/ranks/process.py
    texts are sent from the current GPU though the weight is on another
    - return ranks.home or torch.device("cuda", torch.cuda.current_device())
    + return torch.device("cuda", 0)
    > test_texts_are_sent_from_the_gpu_of_the_weight_even_if_it_is_not_the_current_one
tpsample/backends/numba_/kernels/compiling.py
    the search for garbage stays off after a kernel was compiled
    - if looks:
    + if False:
    > test_the_search_for_garbage_stops_while_a_kernel_compiles[True]
    a CPU compiles in silence
    - tell_once(function.__name__)
    + pass
    > test_the_first_kernel_that_a_process_compiles_is_told_once
    a CPU makes machine code of a kernel in itself, and again in those that call it
    -     if not entry:
    +     if False:
    > test_only_what_python_calls_becomes_machine_code
tpsample/speculative/acceptance.py
    filtered rows of a verification are picked by a list
    - rows = rows.select(filters.row_index)
    + rows = rows.select([*filters.row_list])
    > test_a_verification_with_filters_in_some_rows_indexes_by_no_list
tpsample/core/machine.py
    a compiler that is known to be wrong is trusted
    - if arch in ASYNC_ARCHS and version < FENCED:
    + if False:
    > test_a_sampler_warns_of_a_compiler_that_is_known_to_be_wrong
    kernels of an MI300 overlap, because it reports (9, 4)
    - if device.type != "cuda" or amd() or interpreted():
    + if device.type != "cuda" or interpreted():
    > test_an_mi300_is_no_hopper_though_it_reports_9_4
tpsample/backends/triton_/arguments.py
    a launch on an AMD GPU has an option that Triton refuses
    - return {"launch_pdl": True} if early else {}
    + return {"launch_pdl": early}
    > test_the_lm_head_and_the_kernel_that_waits_compile
tpsample/backends/triton_/kernels/inbox.py
    the kernel that waits asks the timer of NVIDIA on an AMD GPU
    - elif is_hip():  # 100 MHz; no exchange there asks it
    + elif False:
    > test_the_lm_head_and_the_kernel_that_waits_compile
tpsample/backends/triton_/kernels/noise.py
    a product on an AMD GPU is NVIDIA's assembly
    - if INTERPRET or is_hip():
    + if INTERPRET:
    > test_the_lm_head_and_the_kernel_that_waits_compile
    the tail of the noise on an AMD GPU has the wrong sign
    - tl.where(u < 0.25, head, -tl.log2(1.0 - u))
    + tl.where(u < 0.25, head, tl.log2(1.0 - u))
    > test_the_noise_in_triton_is_that_in_assembly
tpsample/exchange/choice.py
    kernels write to peers of AMD
    - elif device.type == "cuda" and amd():
    + elif False:
    > test_kernels_write_to_no_peer_of_amd
benchmarks/static/amd.py
    the report on AMD's GPUs overlooks spills
    - ("vgpr_spills", "scratch") if row[name]
    + ("scratch",) if row[name]
    > test_the_report_says_no
""")
