"""The fp32 logits of some rows over this rank's shard, and what one pass over them gives.

Only these rows are stored, [F, V_local]; they never travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tpsample import word
from tpsample.request.batch import SamplingBatch
from tpsample.request.token_state import StepControls
from tpsample.score import RowNoise, safe_temperature, score_tile
from tpsample.stored.kept_set import below_top, candidates, masses, order_words


def tile_elements(device: torch.device) -> int:
    """Logits per pass of the arithmetic: on a CPU its float64 temporaries then stay in a core's
    cache, on a GPU few launches do much each."""
    return 2**18 if device.type == "cpu" else 2**23


@dataclass(frozen=True)
class StoredRows:
    """Rows whose logits this rank keeps for a step.

    Attributes:
        logits: fp32 [F, V_local], processed: after penalties and constraints.
        raw: the same before them.
        first_id: global id of the first column.
        vocab_size: V, over all ranks.
        temperature: fp32 [F], 1 for greedy rows.
        noise: what the scores of these rows need.
    """

    logits: Tensor
    raw: Tensor
    first_id: int
    vocab_size: int
    temperature: Tensor
    noise: RowNoise

    @staticmethod
    def of(
        raw: Tensor,
        batch: SamplingBatch,
        noise: RowNoise,
        *,
        first_id: int = 0,
        controls: StepControls | None = None,
    ) -> StoredRows:
        """The stored rows of a batch.

        Args:
            raw: fp32 [F, V_local], those of `batch.stored`.
            noise, controls: of all rows of the batch.
        """
        assert batch.stored is not None
        temperature, _ = safe_temperature(batch.temperature[batch.stored])
        rows = StoredRows(
            raw, raw, first_id, batch.vocab_size, temperature, noise.select(batch.stored)
        )
        if controls is None:
            return rows
        controls, logits = controls.select(batch.stored), torch.empty_like(raw)
        for tile_id, tile in rows.tiles():
            start = tile_id - first_id
            logits[:, start : start + tile.shape[1]] = controls.apply(tile, tile_id)
        return replace(rows, logits=logits)

    def shown(self, processed: Tensor) -> StoredRows:
        """The rows with raw logits in place of the processed ones where `processed` is False."""
        if self.logits is self.raw:
            return self
        mode = processed.unsqueeze(1)
        return replace(self, logits=torch.where(mode, self.logits, self.raw))

    def select(self, index: list[int] | slice | Tensor) -> StoredRows:
        """Some of the rows. Nothing is copied if a list names all."""
        if isinstance(index, list) and index == list(range(self.logits.shape[0])):
            return self
        logits = self.logits[index]
        return replace(
            self,
            logits=logits,
            raw=logits if self.raw is self.logits else self.raw[index],
            temperature=self.temperature[index],
            noise=self.noise.select(index),
        )

    def tiles(self) -> Iterator[tuple[int, Tensor]]:
        """(global id of the first column, fp32 [F, n]) of each tile of the shard."""
        width = max(64, tile_elements(self.logits.device) // max(1, self.logits.shape[0]))
        for start in range(0, self.logits.shape[1], width):
            yield self.first_id + start, self.logits[:, start : start + width]

    def best_scores(self, count: int) -> tuple[Tensor, Tensor]:
        """The `count` best scores of each row and sample, as words of the score and of the logit.

        Returns:
            Score words, descending, and the order words of the same tokens, int64
            [F, num_samples, count]; 0 where the shard has fewer tokens.
        """
        rows, samples = self.logits.shape[0], len(self.noise.streams)
        scores = self.logits.new_zeros(rows, samples, count, dtype=torch.int64)
        orders = torch.zeros_like(scores)
        for first_id, logits in self.tiles():
            tile_orders = order_words(logits, first_id).unsqueeze(1).expand(-1, samples, -1)
            tile_scores = torch.stack(
                [
                    order_words(score_tile(logits, first_id, self.noise, sample), first_id)
                    for sample in range(samples)
                ],
                dim=1,
            )
            tile_scores, best = tile_scores.topk(min(count, logits.shape[1]), dim=2)
            scores, orders = keep_best(
                torch.cat([scores, tile_scores], dim=2),
                torch.cat([orders, tile_orders.gather(2, best)], dim=2),
                count,
            )
        return scores, orders

    def first_words(self, count: int) -> Tensor:
        """The first `count` order words of each row, descending, int64 [F, count]; 0 where the
        shard has fewer tokens."""
        first = self.logits.new_zeros(self.logits.shape[0], count, dtype=torch.int64)
        for first_id, logits in self.tiles():
            words = torch.cat([first, order_words(logits, first_id)], dim=1)
            first = words.topk(count, dim=1).values
        return first

    def before(
        self, marks: Tensor, ranked: Tensor, top: Tensor, log_min_p: Tensor, cut: Tensor
    ) -> Tensor:
        """What stands before some tokens of the order on this rank.

        Args:
            marks: int64 [F, C]; masses are of order words above them.
            ranked: int64 [F, C]; numbers are of order words above these.
            top: fp32 [F], the rows' largest logits.
            log_min_p: float64 [F].
            cut: int64 [F], the last word of top_k where top_p renormalises after it, else 0.

        Returns:
            int64 [F, 2 C + 1]: C masses, C numbers, the mass of what min_p leaves down to the cut.
        """
        count = marks.shape[1]
        sums = marks.new_zeros(marks.shape[0], 2 * count + 1)
        for first_id, logits in self.tiles():
            words, below = order_words(logits, first_id), self._below(logits, top)
            mass = masses(below)
            for c in range(count):
                sums[:, c] += (mass * (words > marks[:, c, None])).sum(dim=1)
                sums[:, count + c] += (words > ranked[:, c, None]).sum(dim=1)
            left = candidates(words, below, log_min_p.unsqueeze(1)) & (words >= cut.unsqueeze(1))
            sums[:, -1] += (mass * left).sum(dim=1)
        return sums

    def candidate_masses(self, top: Tensor, log_min_p: Tensor) -> tuple[Tensor, Tensor]:
        """Order words and masses, int64 [F, V_local]; both 0 for what is masked or cut by min_p."""
        words, mass = torch.empty_like(self.logits, dtype=torch.int64), None
        mass = torch.empty_like(words)
        for first_id, logits in self.tiles():
            start = first_id - self.first_id
            tile = slice(start, start + logits.shape[1])
            tile_words, below = order_words(logits, first_id), self._below(logits, top)
            left = candidates(tile_words, below, log_min_p.unsqueeze(1))
            words[:, tile] = tile_words * left
            mass[:, tile] = masses(below) * left
        return words, mass

    def best_kept(self, cut: Tensor) -> Tensor:
        """Best score word per row and sample, int64 [F, num_samples], of tokens whose order word
        is >= cut, int64 [F]; 0 if there is none."""
        best = cut.new_zeros(cut.shape[0], len(self.noise.streams))
        for first_id, logits in self.tiles():
            kept = order_words(logits, first_id) >= cut.unsqueeze(1)
            for sample in range(best.shape[1]):
                scores = order_words(score_tile(logits, first_id, self.noise, sample), first_id)
                best[:, sample] = best[:, sample].maximum((scores * kept).amax(dim=1))
        return best

    def words_of(self, token_ids: Tensor) -> Tensor:
        """Order words of global ids int64 [F, C]; 0 for those of other ranks and for -1."""
        local = token_ids - self.first_id
        mine = (local >= 0) & (local < self.logits.shape[1]) & (token_ids >= 0)
        if not self.logits.shape[1]:
            return torch.zeros_like(token_ids)
        logits = self.logits.gather(1, local.where(mine, 0))
        return word.pack(logits, token_ids) * mine

    def mass_from(self, cut: Tensor, top: Tensor) -> Tensor:
        """int64 [F, 2] of this rank's tokens whose order word is >= cut, int64 [F]: Σ q, and
        Σ rint(-q y), from which the entropy follows."""
        sums = cut.new_zeros(len(cut), 2)
        for first_id, logits in self.tiles():
            kept = order_words(logits, first_id) >= cut.unsqueeze(1)
            below = self._below(logits, top)
            mass = masses(below) * kept
            # -q y is at most 2^40 / e; where there is no mass, y may be infinite.
            moment = torch.where(mass > 0, -mass.double() * below, 0.0).round_().to(torch.int64)
            sums += torch.stack([mass.sum(dim=1), moment.sum(dim=1)], dim=1)
        return sums

    def count_from(self, marks: Tensor) -> Tensor:
        """int64 [F, C], how many of this rank's order words are >= each of `marks` [F, C]."""
        counts = torch.zeros_like(marks)
        for first_id, logits in self.tiles():
            words = order_words(logits, first_id)
            for c in range(marks.shape[1]):
                counts[:, c] += (words >= marks[:, c, None]).sum(dim=1)
        return counts

    def _below(self, logits: Tensor, top: Tensor) -> Tensor:
        return below_top(logits, top.unsqueeze(1), self.temperature.unsqueeze(1))


def keep_best(scores: Tensor, orders: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest score words along the last axis, with the order words of the same
    tokens."""
    scores, best = scores.topk(count, dim=-1)
    return scores, orders.gather(-1, best)
