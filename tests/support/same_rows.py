"""One assertion that rows drew the tokens expected of them, which says what is wrong where."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tpsample import SamplingBatch, SamplingParams, reference


def assert_same_rows(
    found: Tensor,
    expected: Tensor,
    requests: Sequence[SamplingParams],
    logits: Tensor | None = None,
    positions: Tensor | int = 0,
) -> None:
    """Fail with the row, the request, both tokens and how near they are, of the first rows.

    Args:
        found, expected: token ids int64 [B] or [B, num_samples].
        requests: of the rows.
        logits: fp32 [B, V], raw, by which to say how near the tokens are; None says nothing.
        positions: of the draws, for the scores.
    """
    assert found.shape == expected.shape, (found.shape, expected.shape)
    told = []
    for row in (found != expected).view(len(found), -1).any(dim=1).nonzero().flatten().tolist():
        drawn, right = (each[row].flatten().tolist() for each in (found, expected))
        text = f"row {row}, {_changes(requests[row])}: drew {drawn}, expected {right}"
        if logits is not None:
            text += _nearness(logits[row], requests[row], drawn, right, positions, row)
        told.append(text)
    assert not told, "\n".join([f"{len(told)} of {len(found)} rows differ", *told[:5]])


def _changes(request: SamplingParams) -> str:
    """The fields of a request that are no defaults."""
    names = SamplingParams.__dataclass_fields__
    values = {name: getattr(request, name) for name in names}
    return str({n: value for n, value in values.items() if value != names[n].default})


def _nearness(
    logits: Tensor,
    request: SamplingParams,
    drawn: list[int],
    right: list[int],
    positions: Tensor | int,
    row: int,
) -> str:
    batch = SamplingBatch.from_params([request], vocab_size=len(logits))
    position = positions if isinstance(positions, int) else int(positions[row])
    kept = reference.kept_mask(logits.unsqueeze(0), batch)[0]
    found = []
    for sample, (one, other) in enumerate(zip(drawn, right, strict=True)):
        if one == other or min(one, other) < 0:
            continue
        scores = reference.scores(logits.unsqueeze(0), batch, position, sample=sample)[0]
        found.append(
            f"scores {scores[one]:.9g} and {scores[other]:.9g}, logits {logits[one]:.9g} and "
            f"{logits[other]:.9g}, the former {'is' if kept[one] else 'is not'} in the kept set"
        )
    return "".join(f"; {each}" for each in found)
