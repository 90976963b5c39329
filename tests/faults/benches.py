"""Faults of the benchmarks, of the GPU check, and of what the tests themselves stand on."""

from tests.faults.fault import faults

FAULTS = faults(r"""
benchmarks/scaling.py
    two scaling runs share a folder
    - fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    + fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    > test_two_runs_do_not_share_a_folder
benchmarks/lab/harness.py
    a candidate that is wrong on another rank alone is timed
    - if said := [each for each in self.job.gather(why) if each is not None]:
    + if said := [each for each in self.job.gather(why)[:1] if each is not None]:
    > test_a_candidate_that_is_wrong_on_a_rank_is_left_out_and_said
benchmarks/questions/scaling.py
    a scaling run begins again after a kill
    - if found in run.done:
    + if False:
    > test_a_killed_run_goes_on_where_it_was
benchmarks/lab/quiet.py
    a busy machine is called quiet
    - if busy > BUSY_LOAD * cores:
    + if busy > BUSY_AFTER * cores:
    > test_a_machine_that_was_not_quiet_is_named
benchmarks/lab/results.py
    a busy end of a benchmark is not said
    - "after": quiet.load()}
    + }
    > test_a_page_says_how_busy_the_machine_was
benchmarks/lab/baselines.py
    a baseline with min_p keeps every token
    - logits.masked_fill(logits < least, -torch.inf)
    + logits
    > test_every_sampler_draws_from_the_kept_set_alone_and_all_of_it
benchmarks/questions/scaling_candidates.py
    a baseline may draw what the filters drop
    - least = logits.float().masked_fill(~kept, torch.inf).amin(dim=1)
    + least = logits.float().amin(dim=1)
    > test_a_baseline_may_draw_no_id_that_the_filters_drop
benchmarks/lab/whole_logits.py
    an all-to-all that counts the bytes of its own rows
    - others = rows - len(self.own_rows(rows))
    + others = rows
    > test_both_ways_sample_whole_logits
benchmarks/lab/third_party.py
    packages of others are looked for in no folder
    - sys.path.append(folder)
    + pass
    > test_those_in_the_folder_are_candidates
benchmarks/engines/rounds.py
    fewer tokens per second are told as a gain
    - 1e6 / value if key == THROUGHPUT else 1e3 * value
    + 1e3 * value
    > test_the_page_names_where_tpsample_loses_and_where_that_may_be_chance
benchmarks/engines/bench.py
    servers that write other texts are timed
    - if apart or not all(texts) or not texts:
    + if not all(texts) or not texts:
    > test_texts_have_to_be_the_same_and_to_be_there
benchmarks/lab/launches.py
    every pointer counts as aligned
    - value.data_ptr() % 16 == 0)
    + True)
    > benchmarks/test_gpu_compile.py
    a list of launches leaves out the search of undecided rows
    - return verdict._replace(decided=torch.zeros_like(verdict.decided))
    + return verdict._replace(decided=torch.ones_like(verdict.decided))
    > test_steps_that_do_not_run_search_their_filtered_rows
benchmarks/gpu/features.py
    compiled steps with controls are not compared with those outside
    - for i in (1, 2)]
    + for i in ()]
    > test_a_graph_that_forgets_controls_is_seen
benchmarks/gpu/precompile.py
    a benchmark is rehearsed without its own steps
    - times = self.time({name: each.step for name, each in candidates.items()})
    + times = {}
    > benchmarks/test_gpu_compile.py
benchmarks/gpu/check.py
    a section outlives its run
    - with_parent(command), cwd
    + command, cwd
    > test_a_run_that_is_killed_outright_leaves_its_results_and_no_process
    a killed section loses what it had found
    - "facts": told(stdout),
    + "facts": {} if code else told(stdout),
    > test_a_section_that_fails_keeps_its_facts_beside_its_error
    a run that is told to stop waits for its section
    - time.time() < min(until, ending.at)
    + time.time() < until
    > test_a_run_that_is_told_to_stop_kills_its_section_and_keeps_what_it_knew
benchmarks/gpu/record.py
    a page that cannot be written ends the run
    -         except Exception as error:
    +         except KeyError as error:
    > test_a_page_that_cannot_be_written_costs_the_page_alone
benchmarks/lab/kernels.py
    a read by tiles counts the last row again
    - total = tl.where((offs_v < num_rows)[:, None], total, 0)
    + total = total + 0
    > test_a_read_by_tiles_reads_every_row_once
benchmarks/static/chips.py
    packed instructions have one result
    - found[kind] += 2 if name in _PACKED else 1
    + found[kind] += 1
    > test_instructions_are_told_apart_by_the_unit_that_executes_them
benchmarks/static/least_times.py
    a block that is not full costs nothing
    - blocks = rows * -(-width // int(counts.block))
    + blocks = rows * (width // int(counts.block))
    > test_a_pass_takes_as_long_as_its_busiest_unit
    a reason stays when nothing needs it
    - return found + [f"{name}: a reason that no chip needs" for name in {*PASS_REASONS} - needed]
    + return found
    > test_an_exception_wants_a_reason_and_a_reason_an_exception
benchmarks/questions/tune.py
    candidates of the tuner may be too large
    - tile_table.fitted(tile, gpu) for tile in tried
    + tile for tile in tried
    > backends/triton_/test_tiles.py
tests/support/files.py
    a folder without a layer is listed at the top
    - if top not in LAYERS and (inside
    + if top not in LAYERS and not (inside
    > test_a_file_without_a_sentence_or_a_layer_is_noticed
    packages within folders are left out of the list
    - PACKAGE.rglob("*.*")
    + PACKAGE.glob("*.*")
    > test_the_list_of_files_is_current
tests/support/interpreter.py
    operations count as in place before they are
    - self._in_place |= found
    + self._in_place |= {tl, tl.core}
    > test_interpreter.py
    a constant of another type is taken for one that was made before
    - key = (repr(rhs), lhs.type.name, how, *named.items())
    + key = (repr(rhs), how, *named.items())
    > test_a_kernel_computes_the_same_without_it
benchmarks/lab/machine.py
    a page of results counts as a change of the code
    - code = ("--untracked-files=no", "--", ".", ":!benchmarks/results")
    + code = ()
    > test_a_page_of_results_is_no_change_of_the_code
""")
