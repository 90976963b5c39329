"""Faults of shards, exchanges, and of what ranks agree on."""

from tests.faults.fault import Fault

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
        "mine = torch.eq(columns, token_ids,",
        "mine = torch.eq(token_ids, token_ids,",
        ("tests/request/test_controls.py::test_rows_join_leave_move_and_change_over_64_steps[3]",),
    ),
]

EXCHANGES = [
    Fault(
        "the decoding kernel starts on words that are not there yet",
        "tpsample/kernels/decode.py",
        "    if OVERLAP:\n        wait_for_previous_launch()\n",
        "",
        ("tests/kernels/test_jit_launches.py::test_every_step_compiles_as_it_is_launched",),
    ),
    Fault(
        "a bulk prefetch at an odd address",
        "tpsample/local/triton_backend.py",
        "if not self._overlap or not aligned:",
        "if not self._overlap:",
        ("tests/kernels/test_jit_launches.py::test_every_step_compiles_as_it_is_launched",),
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
        "tpsample/exchange/collective.py",
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
        "tpsample/exchange/collective.py",
        "self.words[chunk, :, :rows], chunk)",
        "self.words[chunk, :, :rows], 0)",
        ("tests/exchange/test_exchanges.py::test_several_samples_per_row[p2p]",),
        equivalent="because gloo and NCCL match what a pair exchanges in the order it was sent",
    ),
    Fault(
        "a host does not tell the others that its ranks differ",
        "tpsample/exchange/swap.py",
        "inbox.digests[0] if inbox.agrees() else 0",
        "inbox.digests[0]",
        (
            "tests/exchange/test_two_level.py::test_a_call_that_differs_on_one_host_is_told_to_all[aabb-1]",
        ),
    ),
    Fault(
        "a step is returned before its digests are compared",
        "tpsample/steps.py",
        "            self.agreement.compare()\n",
        "",
        (
            "tests/exchange/test_exchanges.py::test_a_step_that_differs_changes_nothing_and_the_next_is_right[rows]",
        ),
    ),
    Fault(
        "a column has one rank of each host",
        "tpsample/exchange/collective.py",
        "for r in host[column::columns]",
        "for r in host[column : column + 1]",
        (
            "tests/exchange/test_two_level.py::test_every_column_has_a_rank_of_every_host_and_every_rank_a_column",
        ),
    ),
]

AGREEMENT = [
    Fault(
        "a process started by hand takes every core",
        "tpsample/distributed.py",
        "(len(os.sched_getaffinity(0)) - 1) // local_world_size)",
        "len(os.sched_getaffinity(0)) // local_world_size)",
        ("tests/test_distributed.py::test_a_process_started_by_hand_leaves_a_core_to_others",),
    ),
    Fault(
        "a difference names no row",
        "tpsample/agreement/differences.py",
        "if any(each != values[0] for each in values):",
        "if False:",
        ("tests/test_messages.py::test_ranks_are_told_the_same_and_go_on",),
    ),
    Fault(
        "ranks do not compare positions",
        "tpsample/agreement/step.py",
        '"positions": self.positions,',
        '"positions": None,',
        ("tests/test_messages.py::test_ranks_are_told_the_same_and_go_on",),
    ),
    Fault(
        "ranks do not compare the number of samples",
        "tpsample/agreement/step.py",
        '"num_samples": self.num_samples,',
        '"num_samples": 0,',
        (
            "tests/agreement/test_one_rank_wrong.py::test_calls_that_differ_raise_the_same_naming_what_does",
        ),
    ),
    Fault(
        "ranks do not compare requests",
        "tpsample/agreement/step.py",
        'found["batch"] = batch.plan',
        "pass",
        (
            "tests/agreement/test_one_rank_wrong.py::"
            "test_calls_that_differ_raise_the_same_naming_what_does",
        ),
    ),
    Fault(
        "ranks do not compare masks and tokens so far",
        "tpsample/agreement/step.py",
        "found |= batch.state()",
        "pass",
        (
            "tests/agreement/test_batches_differ.py::"
            "test_a_change_refused_or_forgotten_on_one_rank_is_told_by_the_next_step[append]",
        ),
    ),
    Fault(
        "ranks do not compare written temperatures",
        "tpsample/agreement/step.py",
        '"temperatures": batch.temperature',
        '"temperatures": None',
        (
            "tests/agreement/test_batches_differ.py::"
            "test_a_change_refused_or_forgotten_on_one_rank_is_told_by_the_next_step[temperature]",
        ),
    ),
    Fault(
        "ranks compare how many rows wait for a seed, not which",
        "tpsample/agreement/step.py",
        'f"{batch.unseeded} after {self',
        'f"{len(batch.unseeded)} after {self',
        ("tests/agreement/test_batches_differ.py::test_a_refused_call_draws_no_seeds",),
    ),
    Fault(
        "the text of a request lacks a field",
        "tpsample/request/params.py",
        'for name, value in named if name != "seed")',
        'for name, value in named if name not in ("seed", "repetition_scope"))',
        (
            "tests/agreement/test_batches_differ.py::"
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
        "a rank waits for the store without an end",
        "tpsample/ranks/bounded_store.py",
        "self._asking.join(max(0.0, deadline - time.monotonic()))",
        "self._asking.join()",
        (
            "tests/ranks/test_lost_ranks.py::"
            "test_a_rank_that_is_cut_off_from_the_store_says_so_in_time_and_reset_waits_for_it",
        ),
    ),
    Fault(
        "ranks do not compare how many seeds were drawn",
        "tpsample/agreement/step.py",
        "after {self.seeds_drawn} drawn",
        "after some drawn",
        (
            "tests/agreement/test_batches_differ.py::test_a_rank_that_drew_other_seeds_is_told_before_rows_are_given_theirs",
        ),
    ),
    Fault(
        "ranks do not compare which call it is",
        "tpsample/agreement/step.py",
        '"call": self.name,',
        '"call": "",',
        (
            "tests/agreement/test_one_rank_wrong.py::test_another_call_on_one_rank_raises_the_same_on_every_rank",
        ),
    ),
    Fault(
        "ranks do not compare drafts",
        "tpsample/agreement/step.py",
        '"token_ids": self.token_ids}',
        '"token_ids": None}',
        (
            "tests/agreement/test_one_rank_wrong.py::test_calls_that_differ_raise_the_same_naming_what_does",
        ),
    ),
]

SEEDS = [
    Fault(
        "a plan outlives its rows",
        "tpsample/request/batch.py",
        "self._plan = None\n        if",
        "if",
        ("tests/request/test_arrange.py::test_any_arrangement_is_the_batch_built_of_its_rows[0]",),
    ),
    Fault(
        "biases of joining rows go to the first of them",
        "tpsample/request/controls/token_state.py",
        "of_slot.repeat_interleave(lengths)[mine]",
        "of_slot[:1].repeat_interleave(lengths.sum())[mine]",
        ("tests/request/test_arrange.py::test_any_arrangement_is_the_batch_built_of_its_rows[0]",),
    ),
    Fault(
        "a joining row takes the request of another",
        "tpsample/request/table.py",
        "joining[old - count] for slot",
        "joining[0] for slot",
        ("tests/request/test_arrange.py::test_any_arrangement_is_the_batch_built_of_its_rows[0]",),
    ),
    Fault(
        "a new row takes over the tokens of the row whose slot it has",
        "tpsample/request/table.py",
        "moved[slot] = old",
        "moved[slot] = 0",
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
        "            batch.prepare(self._settings.shard)\n",
        "            batch.prepare(self._settings.shard)\n"
        "            batch.draw_seeds(self._settings.seeds)\n",
        ("tests/agreement/test_batches_differ.py::test_a_refused_call_draws_no_seeds",),
    ),
]
