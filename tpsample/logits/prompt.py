"""Log-probabilities of a prompt on vocabulary shards, a chunk of positions at a time.

    value[l] = x_l[t_l] - max x_l - ln(Σ e^(x_l - max x_l)),   t_l the token that came after l

The local step stores the logits of a chunk and samples nothing; `tpsample.logits.logprobs` does the
rest, as for a row of a step. A rank holds [chunk, V_local] logits at a time.
"""

from __future__ import annotations

from torch import Tensor

from tpsample.local.backend import Backend
from tpsample.logits.finish import shard_logits
from tpsample.logits.logprobs import find_logprobs
from tpsample.output import Logprobs
from tpsample.request.batch import SamplingBatch
from tpsample.request.params import SamplingParams
from tpsample.settings import Settings


def prompt_logprobs(
    local: Backend, hidden_states: Tensor, token_ids: Tensor, top: int, settings: Settings
) -> Logprobs:
    """Return raw logprobs of the tokens of a prompt, `max_rows` at a time. Collective.

    Args:
        local: the local step.
        hidden_states: [L, D].
        token_ids: int64 [L], each in [0, V).
        top: N, how many of the most likely tokens to report beside the one that came.

    Returns:
        [L, 1 + N], equal on every rank.
    """
    # With a draw of no samples nothing is drawn, so neither seeds nor positions matter.
    asking, chunk = SamplingParams(temperature=0.0, seed=0, logprobs=top), settings.max_rows
    no_words = token_ids.new_empty(0)
    found = Logprobs.none(len(token_ids), 1 + top, token_ids.device)
    for start in range(0, len(token_ids), chunk):
        part = slice(start, start + chunk)
        came = token_ids[part]
        asked = SamplingBatch.from_params(
            [asking] * len(came), vocab_size=settings.vocab_size, device=token_ids.device
        )
        batch = asked.view(len(came))
        assert batch.plan.logprobs is not None
        step = local.prepare(hidden_states[part], batch, batch.seed, num_samples=0)
        local.best_words(step, no_words)
        rows = shard_logits(step, settings.shard, settings.backend)
        sampled = came.unsqueeze(1)
        its = find_logprobs(rows, batch.plan.logprobs, None, None, sampled, settings.ranks)
        found.put(part, its)
    return found
