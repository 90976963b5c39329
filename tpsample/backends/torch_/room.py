"""The parts that every backend has, and those of the definition in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tpsample.backends.backend import Backend
from tpsample.backends.torch_.cuts import Cuts
from tpsample.backends.torch_.decode import decode_words
from tpsample.backends.torch_.drafts import draft_words
from tpsample.backends.torch_.launch import TorchBackend
from tpsample.backends.torch_.pairs import add_weighted_rows, pair_products
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.backends.torch_.verification import Verification, coupled_output, drafted_rows
from tpsample.core.row_noise import RowNoise
from tpsample.output import SampleOutput, VerifyOutput
from tpsample.request.plan import FilteredWords, Undrawn
from tpsample.settings import Settings


class Decode(Protocol):
    """Writes words int64 [sources, num_samples · B] and seeds int64 [B] into an output.

    Rows that are not drawn get no token, and rows with filters that of their own words.
    """

    def __call__(
        self,
        words: Tensor,
        seeds: Tensor,
        out: SampleOutput,
        undrawn: Undrawn | None = None,
        filtered: FilteredWords | None = None,
        /,
    ) -> None: ...


@dataclass(frozen=True)
class Room:
    """The parts of a backend, one of each stem.

    Attributes:
        launch: makes the local step of a sampler's settings.
        passes: stored logits, with the passes over them.
        cuts: the search for where kept sets end.
        verification: the passes and the arithmetic of a verification by ratio.
        drafted_rows: returns the drafts and positions of the rows to verify.
        coupled_output: accepts drafts that are the tokens drawn.
        draft_words: draws from a drafter's logits.
        decoder: returns what decodes words: one launch, one native call, or their twin. With
            overlap=True a launch may come before the kernel that makes the words has ended. Only
            for words that no collective moves in between.
        pair_products: multiplies single pairs of rows.
        add_weighted_rows: adds weighted rows to rows.
    """

    launch: Callable[[Settings], Backend]
    passes: type[ShardLogits]
    cuts: type[Cuts]
    verification: type[Verification]
    drafted_rows: Callable[[Tensor, Tensor | None, Tensor, int], tuple[Tensor, Tensor]]
    coupled_output: Callable[[Tensor, SampleOutput], VerifyOutput]
    draft_words: Callable[[Tensor, int, RowNoise, int, int], Tensor]
    decoder: Callable[..., Decode]
    pair_products: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    add_weighted_rows: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


ROOM = Room(
    launch=TorchBackend,
    passes=ShardLogits,
    cuts=Cuts,
    verification=Verification,
    drafted_rows=drafted_rows,
    coupled_output=coupled_output,
    draft_words=draft_words,
    decoder=lambda overlap=False: decode_words,
    pair_products=pair_products,
    add_weighted_rows=add_weighted_rows,
)
