"""The vocabulary rows that a rank owns."""

from __future__ import annotations

from dataclasses import dataclass

from tpsample.core.checks import describe, is_integer


@dataclass(frozen=True, order=True)
class VocabShard:
    """A rank owns the global token ids from `start` to `stop` - 1; none if start == stop.

    Raises:
        TypeError: a bound is not an int.
        ValueError: not 0 <= start <= stop.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        for name, bound in tuple(vars(self).items()):
            object.__setattr__(self, name, _whole(f"VocabShard.{name}", bound))
        if not 0 <= self.start <= self.stop:
            raise ValueError(
                f"VocabShard: expected 0 <= start <= stop, got start={self.start}, stop={self.stop}"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    @staticmethod
    def even(vocab_size: int, rank: int, world_size: int) -> VocabShard:
        """Return a rank's shard of ceil(vocab_size / world_size) rows, the last shorter or empty.

        This is how `torch.chunk` and a DTensor placed `Shard(0)` split, so the local part of a
        sharded embedding fits as it is.

        Raises:
            TypeError: one of them is not an int.
            ValueError: vocab_size < 1, world_size < 1 or rank outside [0, world_size).
        """
        return VocabShard.padded(vocab_size, rank, world_size, multiple=world_size)

    @staticmethod
    def padded(vocab_size: int, rank: int, world_size: int, *, multiple: int) -> VocabShard:
        """Return a rank's shard of a vocabulary that is padded before it is split evenly.

            rows = ceil(vocab_size / multiple) · multiple / world_size
            shard = [rank · rows, (rank + 1) · rows), cut off at vocab_size

        The last ranks have less of the vocabulary, or none, and padding behind it. The weight and
        the bias have the padding, too, and it is never read. vLLM pads to multiple=64, Megatron to
        ``make_vocab_size_divisible_by · world_size``, which is 128 · world_size by default.

        Examples:
            >>> [VocabShard.padded(1000, rank, 2, multiple=128 * 2) for rank in range(2)]
            [VocabShard(start=0, stop=512), VocabShard(start=512, stop=1000)]

        Raises:
            TypeError: one of them is not an int.
            ValueError: vocab_size < 1, world_size < 1, rank outside [0, world_size), or a padded
                vocabulary that world_size does not divide.
        """
        vocab_size, multiple = _whole("vocab_size", vocab_size), _whole("multiple", multiple)
        rank, world_size = _whole("rank", rank), _whole("world_size", world_size)
        if vocab_size < 1:
            raise ValueError(f"vocab_size: expected at least 1, got {vocab_size}")
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"rank: expected 0 <= rank < world_size={world_size}, got {rank}")
        if multiple < 1:
            raise ValueError(f"multiple: expected at least 1, got {multiple}")
        all_rows = -(-vocab_size // multiple) * multiple
        if all_rows % world_size:
            raise ValueError(
                f"multiple: {vocab_size} ids padded to {all_rows} rows are not divisible by "
                f"world_size={world_size}; name the multiple to which all ranks together are padded"
            )
        rows = all_rows // world_size
        return VocabShard(min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size))


def _whole(name: str, value: object) -> int:
    """Return an integer, of NumPy and torch too, as one of Python's."""
    if not is_integer(value):
        raise TypeError(f"{name}: expected an int, got {describe(value)}")
    return int(value)
