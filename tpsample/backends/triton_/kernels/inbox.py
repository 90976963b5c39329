"""The `peer` exchange on the device: words go straight into every rank's inbox.

An inbox is int64 [2, num_chunks, world_size, max_rows]: epoch parity, chunk, source rank, row. A
word carries the step's epoch above its key, so it needs neither flag nor fence: 8 aligned bytes
arrive whole, and the reader waits for the epoch. Every slot is written once per step by its
source and cleared by its reader. Clearing is safe because of the two parities: a peer writes this
parity again only two steps on, after our push of the step between, which follows our clearing.

A push is a plain store, and no link has to support atomics of another GPU. It does what a maximum
would do, because nothing that counts is ever in the slot:

1. One source has one slot per parity, chunk, sample and row, and stores it once a step: the last
   arrival alone pushes, and Triton lets one thread store each element.
2. The slot is 0, or has a word whose reader gave up on it. That word has another epoch than ours:
   the stores to one slot lie 2, 4, … steps apart. 2046 steps apart the slot was stored in between,
   or cleared by `reset` after the reader gave up.
3. Stores of one source to one slot keep their order, because a kernel's stores are performed before
   the next kernel of its stream ends.

The store is marked write-through (".wt"), which makes it one of system scope in machine code
(`ST….STRONG.SYS`, as `st.relaxed.sys` is): it stays in no cache of the source. The static report
requires that instruction.

A rank that lost another sends LOST, which is above every word, from its next step on: a rank that
had the words it missed learns one step later, without waiting for its own timeout.

Inboxes are reached through addresses, a rank's own too: the interpreter may copy tensor arguments
onto themselves after a launch, over a word that a peer has just written.
"""

import time
from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from tpsample.backends.triton_.kernels.constant import STEP_NUMBERS, Constant
from tpsample.backends.triton_.kernels.decode import (
    NO_TOKEN,
    OF_ANY_ADDRESS,
    STATUS_PEER_LOST,
    WORD_LOST,
    decode,
    flags_at,
    status_of,
)
from tpsample.backends.triton_.kernels.noise import INTERPRET
from tpsample.backends.triton_.kernels.overlap import wait_for_previous_launch
from tpsample.core import word

EPOCH_SHIFT = Constant(word.EPOCH_SHIFT)
EPOCH_MAX = Constant(word.EPOCH_MAX)
EPOCH_ONE = Constant(1 << word.EPOCH_SHIFT)


@triton.jit
def chunk_of_tile(tile, num_tiles, num_chunks):
    """Chunk c holds the tiles num_tiles · c // num_chunks up to that of c + 1, at least one.

    10 tiles in 4 chunks: 0 1 | 2 3 4 | 5 6 | 7 8 9.
    """
    return ((tile + 1) * num_chunks - 1) // num_tiles


@triton.jit
def tiles_of_chunk(chunk, num_tiles, num_chunks):
    """How many tiles a chunk holds."""
    return num_tiles * (chunk + 1) // num_chunks - num_tiles * chunk // num_chunks


@triton.jit
def next_epoch(epoch):
    """1 … 2046, then 1: parity alternates for ever."""
    return tl.where(epoch == EPOCH_MAX, 1, epoch + 1)


class Peers(NamedTuple):
    """The way from a launch into the inboxes; all None without a push."""

    arrive_ptr: tl.tensor | None  # [num_chunks, max_rows] int32, zero between steps
    epoch_ptr: tl.tensor | None  # [1] int64
    lost_ptr: tl.tensor | None  # [4] int64, see `peer_finish_kernel`
    inboxes_ptr: tl.tensor | None  # [world_size] int64, addresses of every rank's inbox
    num_chunks: tl.tensor | None
    rank: tl.tensor | None
    world_size: tl.tensor | None
    max_rows: tl.tensor | None


@triton.jit
def push_last_arrival(
    peers,
    rows,
    words_ptr,  # of the chunk
    chunk,
    num_tiles,
    pid_b,
    offs_b,
    BLOCK_W: tl.constexpr,
):
    """Count this program as arrived; the last one pushes the chunk's words of its rows.

    It clears them for the next step behind a barrier, because several threads may have read a word
    that one of them clears.

    The first barrier puts the maxima of all warps before the arrival, which releases them. The last
    arrival acquires those of all programs. Nothing is fenced behind the pushes, because a fence
    there would wait for the links to drain.
    """
    arrive = peers.arrive_ptr + chunk * peers.max_rows + pid_b
    num_arrivals = tiles_of_chunk(chunk, num_tiles, peers.num_chunks)
    tl.debug_barrier()
    if tl.atomic_add(arrive, 1, sem="acq_rel", scope="gpu") == num_arrivals - 1:
        tl.store(arrive, 0)
        epoch = tl.load(peers.epoch_ptr)
        lost = (tl.load(peers.lost_ptr) | tl.load(peers.lost_ptr + 1)) != 0
        offs_w = tl.arange(0, BLOCK_W)
        mask_w = offs_w < peers.world_size
        mask_b = offs_b < rows.num_rows
        inboxes = tl.load(peers.inboxes_ptr + offs_w, mask=mask_w, other=0)
        slots = inboxes.to(tl.pointer_type(tl.int64))[:, None]
        source = ((epoch & 1) * peers.num_chunks + chunk) * peers.world_size + peers.rank
        slots += source * peers.max_rows
        for sample in range(1 if rows.num_samples is None else rows.num_samples):
            offs_word = sample * rows.num_rows + offs_b
            words = tl.load(words_ptr + offs_word, mask=mask_b, other=0, volatile=True)
            tl.debug_barrier()
            tl.store(words_ptr + offs_word, tl.zeros_like(words), mask=mask_b)
            tl.store(
                slots + offs_word[None, :],
                tl.where(lost, WORD_LOST, words | (epoch << EPOCH_SHIFT))[None, :],
                mask=mask_w[:, None] & mask_b[None, :],
                cache_modifier=".wt",
            )


def host_clock():
    """The interpreter's timer, which is plain Python. A rank that waits asks it again and again, so
    it sleeps first, because another rank may need the core."""
    time.sleep(1e-3)
    return time.monotonic_ns()


host_clock.__triton_builtin__ = True  # for the compiler, which reads this name but never calls it


@triton.jit
def clock():
    """Nanoseconds."""
    if INTERPRET:
        return tl.full((), host_clock(), tl.int64)
    elif is_hip():  # 100 MHz; no exchange there asks it
        return tl.extra.hip.memrealtime() * 10
    else:
        return tl.extra.cuda.globaltimer()


@triton.jit
def poll(slots, mask, epoch):
    """Words of the slots and which of them have not arrived."""
    words = tl.load(slots, mask=mask, other=0, volatile=True)
    return words, mask & ((words >> EPOCH_SHIFT) != epoch) & (words != WORD_LOST)


@triton.jit
def wait(slots, mask, epoch, deadline):
    """Poll until every word is of this epoch, or LOST, or the deadline is over.

    Threads read different times; the maximum over the tile makes them leave together. That needs
    one warp and a tile that fills it: at least 64 words.
    """
    words, missing = poll(slots, mask, epoch)
    while tl.max((missing & (clock() < deadline)).to(tl.int32)) > 0:
        words, missing = poll(slots, mask, epoch)
    return words, missing


@triton.jit
def report(lost_ptr, of_slot, offs_s, world_size):
    """Set the bits of the sources that have a true in their row of [BLOCK_S, BLOCK_B]."""
    tl.atomic_or(
        lost_ptr + tl.zeros(offs_s.shape, tl.int32),
        tl.full(offs_s.shape, 1, tl.int64) << (offs_s % world_size),
        mask=tl.max(of_slot.to(tl.int32), axis=1) > 0,
        sem="relaxed",
        scope="gpu",
    )


@triton.jit(
    do_not_specialize=STEP_NUMBERS,
    do_not_specialize_on_alignment=OF_ANY_ADDRESS,
)
def peer_finish_kernel(
    # exchange
    inboxes_ptr,  # [world_size] int64, addresses of every rank's inbox
    epoch_ptr,  # [1] int64, advanced by the last program
    done_ptr,  # [1] int32, zero between steps
    lost_ptr,  # [4] int64, bit r: rank r did not arrive in time; rank r sent LOST; steps until now;
    # the step that was lost first
    # inputs
    seed_ptr,  # [num_rows] int64
    undrawn_ptr,  # [num_rows] bool, rows that get no token, or None
    bad_ptr,  # [num_rows] bool, those of them whose slot is bad, or None
    # outputs
    words_ptr,  # [num_samples, num_rows] int64, the winners without epoch; LOST if a rank is
    token_ptr,  # [num_rows, num_samples] int64
    status_ptr,  # [num_rows] int32
    out_seed_ptr,  # [num_rows] int64, a copy: the batch may change its own
    # sizes
    num_rows,
    num_samples,
    num_slots,  # num_chunks · world_size
    rank,
    world_size,
    max_rows,
    timeout_ms,
    # blocks
    BLOCK_S: tl.constexpr,
    BLOCK_B: tl.constexpr,
    OVERLAP: tl.constexpr,  # whether it is launched before this rank's LM head ends
):
    """Wait for the words of all chunks and sources, decode the largest, clear, advance the epoch.

    Once a rank is lost, every row is PEER_LOST, at once, until the exchange is reset.
    """
    if OVERLAP:
        wait_for_previous_launch()
    offs_b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows
    epoch = tl.load(epoch_ptr)
    inbox = tl.load(inboxes_ptr + rank).to(tl.pointer_type(tl.int64))
    inbox += (epoch & 1) * num_slots * max_rows
    lost_before = (tl.load(lost_ptr) | tl.load(lost_ptr + 1)) != 0
    step = tl.load(lost_ptr + 2)
    deadline = clock() + tl.where(lost_before, 0, timeout_ms.to(tl.int64) * 1000000)

    row_status, undrawn = tl.zeros((BLOCK_B,), tl.int32), flags_at(undrawn_ptr, offs_b, mask_b)
    for sample in range(num_samples):
        best = tl.zeros((BLOCK_B,), tl.int64)
        lost = tl.zeros((BLOCK_B,), tl.int32) + lost_before.to(tl.int32)
        for first_slot in range(0, num_slots, BLOCK_S):
            offs_s = first_slot + tl.arange(0, BLOCK_S)
            slots = (
                inbox
                + offs_s.to(tl.int64)[:, None] * max_rows
                + (sample * num_rows + offs_b)[None, :]
            )
            mask = (offs_s < num_slots)[:, None] & mask_b[None, :]
            words, missing = wait(slots, mask, epoch, deadline)
            tl.store(slots, tl.zeros((BLOCK_S, BLOCK_B), tl.int64), mask=mask)
            best = tl.maximum(best, tl.max(words, axis=0))
            says_lost = mask & (words == WORD_LOST)
            lost = tl.maximum(lost, tl.max((missing | says_lost).to(tl.int32), axis=0))
            if not lost_before:
                report(lost_ptr, missing, offs_s, world_size)
                report(lost_ptr + 1, says_lost, offs_s, world_size)
        if (tl.max(lost, axis=0) > 0) & ~lost_before:
            tl.store(lost_ptr + 3, step)
        winner = tl.where(lost > 0, WORD_LOST, best & (EPOCH_ONE - 1))
        tl.store(words_ptr + sample * num_rows + offs_b, winner, mask=mask_b)
        token_id, status = decode(best)
        token_id = tl.where((lost > 0) | undrawn, NO_TOKEN, token_id)
        status = tl.where(lost > 0, STATUS_PEER_LOST, status)
        tl.store(token_ptr + offs_b * num_samples + sample, token_id, mask=mask_b)
        row_status = tl.maximum(row_status, status)
    row_status = status_of(row_status, undrawn, bad_ptr, offs_b)
    tl.store(status_ptr + offs_b, row_status, mask=mask_b)
    tl.store(out_seed_ptr + offs_b, tl.load(seed_ptr + offs_b, mask=mask_b), mask=mask_b)

    # The next step may begin with another epoch once every program has used this one.
    if tl.atomic_add(done_ptr, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(done_ptr, 0)
        tl.store(lost_ptr + 2, step + 1)
        tl.store(epoch_ptr, next_epoch(epoch))
