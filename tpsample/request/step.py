"""A step: what each stage of a call receives from the stages before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from tpsample.core.row_noise import RowNoise
from tpsample.output import SampleOutput
from tpsample.request.controls.apply import StepControls
from tpsample.request.plan import BatchView


class Push(NamedTuple):
    """The arguments by which the LM-head kernel writes words to its peers, equal in every step.

    Attributes:
        arrive_ptr: int32 [num_chunks, max_rows], zero between steps.
        epoch_ptr: int64 [1].
        lost_ptr: int64 [4]; see `tpsample.backends.triton_.kernels.inbox`.
        inboxes_ptr: int64 [world_size], addresses of every rank's inbox.
    """

    arrive_ptr: Tensor
    epoch_ptr: Tensor
    lost_ptr: Tensor
    inboxes_ptr: Tensor
    num_chunks: int
    rank: int
    world_size: int
    max_rows: int


class Inputs(NamedTuple):
    """The input rows of a call: hidden states, or logits in place of their product.

    Attributes:
        tensor: [..., D], or with `are_logits` [..., V_local].
        are_logits: whether the caller computed the logits.
        head_applied: whether the caller says that such logits have the head's scale, soft-cap and
            bias.
    """

    tensor: Tensor
    are_logits: bool = False
    head_applied: bool = False

    @property
    def name(self) -> str:
        """The argument of the call that the rows came in."""
        return "local_logits" if self.are_logits else "hidden_states"

    @property
    def dtype_suffix(self) -> str:
        """The end of a call's name, by which ranks compare the dtype of logits.

        It is empty for hidden states, because they have the dtype of the weight.
        """
        return f" from {self.tensor.dtype} logits" if self.are_logits else ""

    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Return hidden states [B, D] and logits [B, V_local]. Rows of logits come with hidden
        states [B, 0], and hidden states with None for logits."""
        rows = self.tensor
        if rows.requires_grad:  # no step has a gradient
            rows = rows.detach()
        if rows.ndim > 2:
            rows = rows.flatten(0, -2)
        return (rows[:, :0], rows) if self.are_logits else (rows, None)


class Found(NamedTuple):
    """Words and bounds of R stored rows, as the threads of a local step find them.

    Attributes:
        first: int64 [threads, R, n], first order words in any order; 0 in a row without any.
        best: int64 [threads, R, num_samples, m], best score words in any order; 0 likewise.
        error_bound: fp32 [R]. A stored number is at least the logit, and exceeds it by at most
            this. Where it is above 0 the exact logits of the `best` tokens are stored.
        rows: int64 [R], the stored rows of the batch.
        store: replaces upper bounds by exact logits; None if all logits are exact. Its arguments
            are the rows int64 [n] of the batch, their indices in memory, and fp32 [R, V_local]
            before and after the controls. The last one has no rows without controls. The backend
            makes it with the step as its first argument, and `shard_logits` binds that.
    """

    first: Tensor
    best: Tensor
    error_bound: Tensor
    rows: Tensor
    store: Callable[..., None] | None

    def select(self, index: slice | Tensor) -> Found:
        """Return the words and bounds of some rows."""
        of_rows = self.error_bound[index], self.rows[index], self.store
        return Found(self.first[:, index], self.best[:, index], *of_rows)


class TileWords(NamedTuple):
    """The words of each tile of a kernel, which show the tiles that matter to R stored rows.

    Attributes:
        first: int64 [R, tiles], the first order word of a tile. A NaN's word has any id of it.
        best: int64 [R, num_samples, tiles], the best score word of a tile. NaN as in `first`.
        size: ids per tile. The first tile begins at the shard's first id, rounded down to a
            multiple of four.
    """

    first: Tensor
    best: Tensor
    size: int

    def select(self, index: slice | Tensor) -> TileWords:
        """Return the words of some rows."""
        return TileWords(self.first[index], self.best[index], self.size)


def rows_of_memory(count: int, controlled: bool) -> int:
    """Return how many rows of memory the logits of `count` stored rows take.

    With controls the processed logits begin after a multiple of four rows, hence at a multiple of
    16 bytes for any V_local. For another address Triton would compile another kernel.
    """
    return 2 * (count + -count % 4) if controlled else count


def raw_and_processed(memory: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the raw logits of the stored rows, and the processed ones, no rows without controls.

    Args:
        memory: fp32 [`rows_of_memory`, V_local].
    """
    half = memory.shape[0] // 2
    return memory[:count], memory[half : half + count if memory.shape[0] > count else half]


@dataclass(eq=False)  # frozen, each field would take three times as long
class Step:
    """A step on one rank, made once from arguments that were checked and agreed on.

    Attributes:
        hidden_states: [B, D]; [B, 0] with local_logits.
        batch: the rows that it reads.
        noise: the noise of the rows; with 0 samples the step only stores logits.
        controls: the controls of the rows over the shard; None if there are none.
        logits: fp32 [`rows_of_memory`, V_local], memory for the logits of the stored rows, in which
            `raw_and_processed` finds the raw and the processed ones. None if the plan stores none.
        found: memory for words and bounds of the stored rows; None if the backend finds none.
        tile_words: words of the kernel's tiles; None if the backend writes none.
        out: what the step will return; None if it only stores logits.
        local_logits: [B, V_local], logits that the caller computed in place of the product with
            the weight; None otherwise.
    """

    hidden_states: Tensor
    batch: BatchView
    noise: RowNoise
    controls: StepControls | None
    logits: Tensor | None
    out: SampleOutput | None = None
    local_logits: Tensor | None = None
    found: Found | None = None
    tile_words: TileWords | None = None

    @property
    def num_words(self) -> int:
        """How many words the step exchanges, one per row and sample."""
        return self.batch.seed.shape[0] * self.noise.num_samples

    @cached_property
    def hidden_double(self) -> Tensor:
        """The hidden states in float64, in which the definition multiplies."""
        return self.hidden_states.double()
