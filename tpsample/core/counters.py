"""The events that a sampler counts on the host, for the metrics of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counters:
    """The events on one rank since its sampler was built. No step waits for the device to count.

    Attributes:
        failed_rows: rows of steps and verifications whose status was not OK. On a CPU every step
            counts its own. On a GPU `LMHeadSampler.count_failed` does, for a status that was read.
        second_rounds: filtered rows that the first candidates did not decide, so that an exact
            second round did. With `fixed_rounds` and in captured graphs the device alone knows.
        lost: the ranks that a `PeerLost` has named.
    """

    failed_rows: int = 0
    second_rounds: int = 0
    lost: set[int] = field(default_factory=set)

    def numbers(self) -> dict[str, int]:
        """Return each counter by name."""
        return {
            "failed_rows": self.failed_rows,
            "second_rounds": self.second_rounds,
            "lost_ranks": len(self.lost),
        }
