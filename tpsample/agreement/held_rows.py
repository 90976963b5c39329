"""The ranks say which rows of the vocabulary each of them holds, and nothing is guessed.

shard= on every rank      each rank says; the ranks' rows must still be different ones
vocab_size= alone         the numbers of rows must have one reading (`resolve_shards`)
neither                   the rows follow one another, and none may look like padding
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tpsample.core.caller_warning import warn
from tpsample.core.digest import digest_bits
from tpsample.core.vocab_shard import VocabShard
from tpsample.core.word import MAX_VOCAB_SIZE
from tpsample.errors import RankMismatch


@dataclass(frozen=True)
class HeldRows:
    """The rows of lm_head_weight on one rank.

    Attributes:
        rows, columns: V_local and D.
        digest: a digest of some rows; None if all are alike, as before the weight is loaded.
        padded: whether the last row is zero, and other rows are not.
    """

    rows: int
    columns: int
    digest: int | None
    padded: bool

    @staticmethod
    def of(weight: Tensor) -> HeldRows:
        """Look at the first and the last rows of a weight."""
        rows = range(weight.shape[0])
        few = weight[[*rows[:16], *rows[-16:]]]  # under autocast torch does not join fp16 tensors
        if len(rows) == 0 or bool((few == few[:1]).all()):
            return HeldRows(len(rows), weight.shape[1], None, False)
        return HeldRows(len(rows), weight.shape[1], digest_bits(few), not bool(few[-1].any()))


def check_sliced(
    vocab_size: int | None, shards: list[VocabShard | None], held: list[HeldRows]
) -> None:
    """Check that each of several ranks holds different rows, and that it is known which.

    Raises:
        RankMismatch: every rank holds the whole vocabulary, or two ranks the same rows; or no
            argument and no row shows where the vocabulary ends. A lone rank gets a warning.
    """
    if len(held) == 1:
        if held[0].padded and vocab_size is None and shards[0] is None:
            warn(
                "lm_head_weight: ends in a row of zeros, as padding does, and its id may be drawn; "
                "pass vocab_size=, which may be the number of rows",
            )
        return
    named = shards[0] is not None
    if any((shard is not None) != named for shard in shards):
        return  # `resolve_shards` refuses it
    own = (
        "pass each rank its own rows, lm_head_weight[shard.start : shard.stop] with shard = "
        "VocabShard.even(vocab_size, rank, world_size)"
    )
    if vocab_size is None and named:
        vocab_size = max(shard.stop for shard in shards if shard is not None)
    whole = vocab_size is not None and all(weight.rows >= vocab_size for weight in held)
    if named:  # a shard of a tiny vocabulary may have so much padding, if there are rows to compare
        whole = all(weight.columns == 0 and weight.rows == vocab_size for weight in held)
    if whole:
        raise RankMismatch(
            f"lm_head_weight: expected a shard of the {vocab_size} rows of the vocabulary, but "
            f"every rank holds at least as many; {own}"
        )
    first: dict[tuple[int, int], int] = {}
    for rank, (weight, shard) in enumerate(zip(held, shards, strict=True)):
        if weight.digest is None or (shard is not None and len(shard) == 0):
            continue
        if first.setdefault((weight.rows, weight.digest), rank) != rank:
            raise RankMismatch(
                f"lm_head_weight: rank {first[weight.rows, weight.digest]} and rank {rank} hold "
                f"the same {weight.rows} rows; {own}"
            )
    if vocab_size is None and not named:
        _require_an_end(held)


def _require_an_end(held: list[HeldRows]) -> None:
    """Raise unless the rows of each rank look like those of a vocabulary without padding."""
    for rank, weight in enumerate(held):
        if weight.rows and (weight.digest is None or weight.padded):
            how = (
                "ends in a row of zeros, as padding does"
                if weight.padded
                else "has rows that are all alike, as before it is loaded"
            )
            raise RankMismatch(
                f"lm_head_weight: that of rank {rank} {how}, so its rows do not show where the "
                "vocabulary ends; pass vocab_size= or shard="
            )


def resolve_shards(
    vocab_size: int | None, shards: list[VocabShard | None], weight_rows: list[int]
) -> tuple[int, list[VocabShard]]:
    """Return the vocabulary size and every rank's shard, from what each rank gave.

    With neither `vocab_size` nor shards the ranks' weight rows follow one another. With
    `vocab_size` alone the rows must have one reading; see `_read_rows`.

    Raises:
        RankMismatch: shards do not tile [0, vocab_size), a weight has too few rows, or rows may be
            read in two ways.
    """
    ranks = range(len(shards))
    if any((shard is None) != (shards[0] is None) for shard in shards):
        raise RankMismatch(f"shard: give it on every rank or on none, got {shards}")
    if shards[0] is not None:
        given = [shard for shard in shards if shard is not None]
        vocab_size = vocab_size or max(shard.stop for shard in given)
    elif vocab_size is not None:
        given = _read_rows(vocab_size, weight_rows)
    else:
        vocab_size = sum(weight_rows)
        given = _in_rank_order(vocab_size, weight_rows)

    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise RankMismatch(f"vocab_size: expected 1 to {MAX_VOCAB_SIZE}, got {vocab_size}")
    covered = 0
    for shard in sorted(shard for shard in given if len(shard)):
        if shard.start != covered:
            raise RankMismatch(
                f"shard: the ranks' shards must tile [0, {vocab_size}) without gap or overlap, "
                f"got {given}"
            )
        covered = shard.stop
    if covered != vocab_size:
        raise RankMismatch(f"shard: expected shards up to vocab_size={vocab_size}, got {given}")
    for rank in ranks:
        if weight_rows[rank] < len(given[rank]):
            raise RankMismatch(
                f"lm_head_weight: rank {rank} needs {len(given[rank])} rows for its shard "
                f"{given[rank]}, got {weight_rows[rank]}; name the rows that it has by shard=, or "
                "pass .T.contiguous() of it if it is [D, V_local]"
            )
    return vocab_size, given


def _read_rows(vocab_size: int, weight_rows: list[int]) -> list[VocabShard]:
    """Return the shards of ranks that name a vocabulary and no shards.

        even            rank r begins at r · ceil(V / W); each may have padding behind its rows
        in rank order   rank r begins where rank r − 1 ends; the last may have padding

    Raises:
        RankMismatch: the rows fit both readings, which are different.
    """
    world_size = len(weight_rows)
    even = [VocabShard.even(vocab_size, rank, world_size) for rank in range(world_size)]
    in_order = _in_rank_order(vocab_size, weight_rows)
    fits_even = all(rows >= len(shard) for rows, shard in zip(weight_rows, even, strict=True))
    if sum(weight_rows) < vocab_size or in_order == even:
        return even
    if fits_even:
        way_out = "shard=VocabShard.even(vocab_size, rank, world_size)"
        if len(set(weight_rows)) == 1:
            way_out += (
                ", or VocabShard.padded(vocab_size, rank, world_size, "
                f"multiple={world_size * weight_rows[0]}) as Megatron and vLLM pad"
            )
        else:
            way_out += " or the shards of the second reading"
        raise RankMismatch(
            f"lm_head_weight: the ranks' {', '.join(map(str, weight_rows))} rows are {vocab_size} "
            f"ids in two ways, {_ids(even)} with padding behind the rows of each rank, or "
            f"{_ids(in_order)} with padding at the end; pass {way_out}"
        )
    return in_order


def _in_rank_order(vocab_size: int, weight_rows: list[int]) -> list[VocabShard]:
    """Return shards that follow one another, each with the rows that a rank has."""
    stops = [min(sum(weight_rows[: rank + 1]), vocab_size) for rank in range(len(weight_rows))]
    return [VocabShard(*bounds) for bounds in zip([0, *stops], stops, strict=False)]


def _ids(shards: list[VocabShard]) -> str:
    return "ids " + ", ".join(f"{shard.start} to {shard.stop}" for shard in shards)
