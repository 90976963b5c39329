"""Faults of the benchmarks and of the GPU check."""

from tests.faults.fault import Fault

BENCHMARKS = [
    Fault(
        "two scaling runs share a folder",
        "benchmarks/scaling/command.py",
        "fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        ("tests/benchmarks/scaling/test_command.py::test_two_runs_do_not_share_a_folder",),
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
        "benchmarks/scaling/plan.py",
        "if point not in done]",
        "if done is not None]",
        ("tests/benchmarks/scaling/test_ranks.py::test_a_killed_run_goes_on_where_it_was",),
    ),
    Fault(
        "a busy machine is called quiet",
        "benchmarks/lab/quiet.py",
        "if busy > BUSY_LOAD * cores:",
        "if busy > BUSY_AFTER * cores:",
        ("tests/benchmarks/test_page.py::test_a_machine_that_was_not_quiet_is_named",),
    ),
    Fault(
        "a busy end of a benchmark is not said",
        "benchmarks/lab/harness.py",
        '"after": quiet.load()}',
        "}",
        ("tests/benchmarks/test_benchmarks.py::test_a_page_says_how_busy_the_machine_was",),
    ),
    Fault(
        "a baseline with min_p keeps every token",
        "benchmarks/lab/baselines.py",
        "softmax_race(logits.masked_fill(logits < least, -torch.inf))",
        "softmax_race(logits)",
        (
            "tests/benchmarks/test_filter_baselines.py::"
            "test_every_sampler_draws_from_the_kept_set_alone_and_all_of_it",
        ),
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
        "benchmarks/lab/whole_logits.py",
        "others = rows - len(self.own_rows(rows))",
        "others = rows",
        ("tests/benchmarks/test_whole_logits.py::test_both_ways_sample_whole_logits",),
    ),
    Fault(
        "packages of others are looked for in no folder",
        "benchmarks/lab/third_party.py",
        "sys.path.append(folder)",
        "pass",
        ("tests/benchmarks/test_third_party.py::test_those_in_the_folder_are_candidates",),
    ),
    Fault(
        "fewer tokens per second are told as a gain",
        "benchmarks/engines/rounds.py",
        "1e6 / value if key == THROUGHPUT else 1e3 * value",
        "1e3 * value",
        (
            "tests/benchmarks/test_engines_bench.py::"
            "test_the_page_names_where_tpsample_loses_and_where_that_may_be_chance",
        ),
    ),
    Fault(
        "drafts of which none was accepted count as compared",
        "tests/engines/verdicts.py",
        "0 < taken <= drafted",
        "taken <= drafted",
        ("tests/engines/test_engines.py::test_drafts_have_to_be_accepted_to_be_compared",),
    ),
    Fault(
        "servers that write other texts are timed",
        "benchmarks/engines/bench.py",
        "if apart or not all(texts) or not texts:",
        "if not all(texts) or not texts:",
        ("tests/benchmarks/test_engines_bench.py::test_texts_have_to_be_the_same_and_to_be_there",),
    ),
]

GPU_CHECK = [
    Fault(
        "every pointer counts as aligned",
        "benchmarks/lab/launches.py",
        "value.data_ptr() % 16 == 0)",
        "True)",
        ("tests/benchmarks/test_gpu_compile.py",),
    ),
    Fault(
        "a benchmark is rehearsed without its own steps",
        "benchmarks/gpu/precompile.py",
        "times = self.time({name: each.step for name, each in candidates.items()})",
        "times = {}",
        ("tests/benchmarks/test_gpu_compile.py",),
    ),
    Fault(
        "a section outlives its run",
        "benchmarks/gpu/check.py",
        "with_parent(command), cwd",
        "command, cwd",
        (
            "tests/benchmarks/test_gpu_check_ends.py::test_a_run_that_is_killed_outright_leaves_its_results_and_no_process",
        ),
    ),
    Fault(
        "a page that cannot be written ends the run",
        "benchmarks/gpu/record.py",
        "        except Exception as error:",
        "        except KeyError as error:",
        (
            "tests/benchmarks/test_gpu_check_ends.py::test_a_page_that_cannot_be_written_costs_the_page_alone",
        ),
    ),
    Fault(
        "a killed section loses what it had found",
        "benchmarks/gpu/check.py",
        '"facts": told(stdout)}',
        '"facts": {} if code else told(stdout)}',
        (
            "tests/benchmarks/test_gpu_check_ends.py::test_a_section_that_fails_keeps_its_facts_beside_its_error",
        ),
    ),
    Fault(
        "a run that is told to stop waits for its section",
        "benchmarks/gpu/check.py",
        "time.time() < min(until, ending.at)",
        "time.time() < until",
        (
            "tests/benchmarks/test_gpu_check_ends.py::test_a_run_that_is_told_to_stop_kills_its_section_and_keeps_what_it_knew",
        ),
    ),
    Fault(
        "a read by tiles counts the last row again",
        "benchmarks/lab/kernels.py",
        "total = tl.where((offs_v < num_rows)[:, None], total, 0)",
        "total = total + 0",
        ("tests/benchmarks/test_ceilings.py::test_a_read_by_tiles_reads_every_row_once",),
    ),
    Fault(
        "candidates of the tuner may be too large",
        "benchmarks/gpu/tune.py",
        "tile for tile in tried if fits(tile, gpu)",
        "tile for tile in tried",
        ("tests/local/test_tiles.py",),
    ),
]
