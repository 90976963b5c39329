"""The set of ids that each of N tokens was drawn from, one after the other in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpsample.core.checks import INDICES, check_tensor, describe, lists_in_order, require_memory
from tpsample.core.tensors import tensors_of
from tpsample.output import KeptSets
from tpsample.request.batch_checks import check_device

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Row n was drawn from ``token_ids[offsets[n] : offsets[n + 1]]``, or from all ids.

    The ids of a set may stand in any order. Every set is checked against the token that was drawn
    from it when it is used.

    Attributes:
        offsets: int64 [N + 1], from 0, never falling.
        token_ids: int64 [offsets[N]], global ids.
        whole: bool [N], the rows that kept every id and list none.

    Raises:
        ValueError: another shape or dtype; offsets that fall or do not end at the last id; or a row
            that lists ids and kept all, or does neither.
    """

    offsets: Tensor
    token_ids: Tensor
    whole: Tensor

    def __post_init__(self) -> None:
        device = self.offsets.device if isinstance(self.offsets, Tensor) else _CPU
        check_tensor("kept.offsets", self.offsets, (torch.int64,), ("N + 1",), device)
        if not len(self.offsets):
            raise ValueError(
                f"kept.offsets: expected a tensor [N + 1] that begins with 0, got "
                f"{describe(self.offsets)}; for no rows pass torch.zeros(1, dtype=torch.int64)"
            )
        check_tensor("kept.token_ids", self.token_ids, (torch.int64,), ("T",), device)
        rows = (len(self.offsets) - 1,)
        check_tensor("kept.whole", self.whole, (torch.bool,), rows, device, ", one of each row")
        if self.offsets.is_meta:
            raise ValueError("kept: is on the meta device, so it has no ids; build it on another")
        sizes = self.sizes
        ends = [*self.offsets[:1].tolist(), *self.offsets[-1:].tolist()]
        if ends != [0, len(self.token_ids)] or bool((sizes < 0).any()):
            raise ValueError(
                "kept.offsets: expected numbers that never fall, from 0 to the "
                f"{len(self.token_ids)} of kept.token_ids, got {describe(self.offsets.tolist())}"
            )
        wrong = ((sizes > 0) == self.whole).nonzero().flatten().tolist()
        if wrong:
            n = wrong[0]
            raise ValueError(
                f"kept: row {n} has {int(sizes[n])} ids and whole is {bool(self.whole[n])}; a row "
                "lists the ids that it kept, or lists none and has whole=True if it kept all"
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Tensor:
        """Return int64 [N], how many ids each row lists."""
        return self.offsets.diff()

    @classmethod
    def from_lists(
        cls, sets: Sequence[Sequence[int] | Tensor | None], device: torch.device | str = "cpu"
    ) -> KeptTokens:
        """Return the sets of N rows; None stands for all ids.

        Examples:
            >>> KeptTokens.from_lists([[7, 3], None]).offsets.tolist()
            [0, 2, 2]

        Raises:
            TypeError, ValueError: no sequence of ids, such as a mask; an empty one.
        """
        if not lists_in_order(sets):
            raise TypeError(f"sets: expected a list of sets of ids, got {describe(sets)}")
        check_device(device)
        sets = list(sets)
        tensors = [_ids_of(row, ids) for row, ids in enumerate(sets)]
        sizes = torch.tensor([0, *map(len, tensors)], dtype=torch.int64, device=_CPU)
        whole = torch.tensor([ids is None for ids in sets], dtype=torch.bool, device=_CPU)
        listed = torch.cat([sizes.new_empty(0), *tensors])
        return cls(sizes.cumsum(0).to(device), listed.to(device), whole.to(device))

    @classmethod
    def cat(cls, parts: Sequence[KeptTokens]) -> KeptTokens:
        """Return the rows of several, such as the steps of a rollout, one after the other.

        Examples:
            >>> KeptTokens.cat([KeptTokens.from_lists([[7, 3]])] * 2).offsets.tolist()
            [0, 2, 4]

        Raises:
            TypeError, ValueError: something else is among them, or there is none.
        """
        if not isinstance(parts, Sequence) or not all(isinstance(p, KeptTokens) for p in parts):
            raise TypeError(f"parts: expected a list of KeptTokens, got {describe(parts)}")
        if not parts:
            raise ValueError("parts: expected at least one KeptTokens, got none")
        offsets = F.pad(torch.cat([part.sizes for part in parts]).cumsum(0), (1, 0))
        ids, whole = zip(*((part.token_ids, part.whole) for part in parts), strict=True)
        return cls(offsets, torch.cat(ids), torch.cat(whole))

    @classmethod
    def of_step(cls, kept: KeptSets, rows: Tensor | None = None) -> KeptTokens:
        """Return the sets of the rows of a step or a verification, from `SampleOutput.kept`.

        Those of a verification are the positions that emitted a token:

            KeptTokens.of_step(out.kept, out.token_ids.flatten() >= 0)

        Args:
            rows: bool [R], the rows to take, of the R that `kept` has; or int64 [N], their numbers
                in the order to take them. Leave out padding and rows without a token. Default: all.

        Raises:
            ValueError: a row that is taken kept more ids than the batch's `kept_cap`, so its set is
                not known; or it has no token, so there is nothing to score. Or such rows are not
                there.
        """
        if not isinstance(kept, KeptSets):
            raise TypeError(
                f"kept: expected the KeptSets of a step, got {type(kept).__name__}; pass out.kept "
                "of a batch that was built with kept_cap="
            )
        taken = torch.arange(len(kept.sizes), device=kept.sizes.device)
        if rows is not None:
            taken = taken[_index_of(rows, taken)]
        overflow = kept.overflow[taken]
        if bool(overflow.any()):
            which = taken[overflow]
            largest = int(kept.sizes[which].max())
            raise ValueError(
                f"kept: rows {describe(which.tolist())} kept up to {largest} ids, more than the "
                f"batch's kept_cap; build the batch with kept_cap={largest} or more"
            )
        if none := taken[kept.sizes[taken] == 0].tolist():
            raise ValueError(
                f"kept: rows {describe(none)} have no token to score; name the others by rows="
            )
        if rows is None:
            return cls(kept.offsets, kept.token_ids[: kept.offsets[-1]], kept.whole)
        sizes = kept.offsets.diff()[taken]
        offsets = F.pad(sizes.cumsum(0), (1, 0))
        first = (kept.offsets[taken] - offsets[:-1]).repeat_interleave(sizes)
        listed = kept.token_ids[first + torch.arange(len(first), device=first.device)]
        return cls(offsets, listed, kept.whole[taken])


def _index_of(rows: object, every: Tensor) -> Tensor:
    """Return the caller's rows, a mask or numbers, if `every` row, by number, has them."""
    if isinstance(rows, Tensor) and rows.dtype == torch.bool:
        check_tensor("rows", rows, (torch.bool,), (len(every),), every.device)
        return rows
    check_tensor("rows", rows, (torch.int64,), ("N",), every.device)
    assert isinstance(rows, Tensor)
    if bool(((rows < 0) | (rows >= len(every))).any()):
        raise ValueError(f"rows: expected rows in [0, {len(every)}), got {describe(rows.tolist())}")
    return rows


def _ids_of(row: int, ids: object) -> Tensor:
    """Return the ids of a row on the CPU, int64 [n]; none if it kept every id."""
    if ids is None:
        return torch.empty(0, dtype=torch.int64, device=_CPU)
    if isinstance(ids, Tensor):
        require_memory(f"sets[{row}]", ids)
    try:
        if isinstance(ids, (list, tuple)) and set(map(type, ids)) == {int}:
            return tensors_of(ids, device=None)[0]  # in a fifth of the time that torch takes
        tensor = torch.as_tensor(ids, device=_CPU)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        tensor = torch.empty((), device=_CPU)
    if not tensor.numel() and tensor.ndim == 1:
        return tensor.long()
    if tensor.ndim != 1 or tensor.dtype not in INDICES:
        raise TypeError(
            f"sets[{row}]: expected a sequence of token ids, or None for all, got {describe(ids)}"
        )
    return tensor.long()
