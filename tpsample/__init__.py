"""Sample next tokens where the logits are computed. See `LMHeadSampler`.

    hidden states → logits tile → score → word → exchange → token

Words of this package, one per idea:

    request         what a user asks for one sequence, `SamplingParams`
    batch           the requests of the rows of a step, `SamplingBatch`
    plan            what follows from the requests alone, `BatchPlan`; replaced whole
    view            what one step reads of a batch, `BatchView`
    slot            where a request stays in the table of its batch, `SamplingBatch.put`
    row             one line of a step's hidden states; it reads the request of one slot
    step            one call of the sampler on one rank, `Step`
    rank            one of the processes that own a part of the vocabulary, `Ranks`
    head            turns hidden states into logits: weight, bias, scale and soft-cap, `Head`
    shard           the half-open range of token ids that a rank owns, `VocabShard`
    tile            a piece of the logits, small enough to stay on chip
    backend         what turns hidden states into words, `Backend`: Triton, Numba, PyTorch
    score           logit · log2 e / T - L, whose largest value decides; L is the noise
    stream          the random numbers of a row, named by its seed and position
    score word      a score and a token id in one int64; the larger word wins
    candidate       a token that can still win its row
    threshold       the value that a logit or a score must reach to count
    order word      a logit and a token id likewise; descending, they list a row's tokens
    mass            2^40 times a probability relative to the row's largest, as an integer
    filter          top_k, top_p or min_p; what they leave to be drawn is the kept set
    cut             the order word of the last token that a filter keeps
    controls        what changes logits before the draw: penalties, biases and masks
    stored logits   a rank's own logits of the rows that need them after the draw
    exchange        moves words between ranks; other integers go through `Ranks`
    status          whether a row has a token, and if not, why not, `Status`

README.md beside this file lists the files that a call walks through.
"""

import importlib

from tpsample import noise, reference
from tpsample.core.row_noise import seed_of
from tpsample.core.version import __version__
from tpsample.core.vocab_shard import VocabShard
from tpsample.core.word import Status
from tpsample.errors import Desync, PeerLost, RankMismatch, UnsupportedParameter
from tpsample.one_call import sample
from tpsample.output import KeptSets, Logprobs, SampleOutput
from tpsample.record.trace import TopKTrace
from tpsample.request.batch import SamplingBatch
from tpsample.request.params import SamplingParams
from tpsample.sampler import LMHeadSampler
from tpsample.speculative import Draft, VerifyOutput, sample_draft, verify, verify_logits


def __getattr__(name: str) -> object:
    """Import `tpsample.integrations` when it is first asked for; each adapter needs its engine."""
    if name == "integrations":
        return importlib.import_module("tpsample.integrations")
    raise AttributeError(f"module 'tpsample' has no attribute {name!r}")


__all__ = [
    "Desync",
    "Draft",
    "KeptSets",
    "LMHeadSampler",
    "Logprobs",
    "PeerLost",
    "RankMismatch",
    "SampleOutput",
    "SamplingBatch",
    "SamplingParams",
    "Status",
    "TopKTrace",
    "UnsupportedParameter",
    "VerifyOutput",
    "VocabShard",
    "__version__",
    "noise",
    "reference",
    "sample",
    "sample_draft",
    "seed_of",
    "verify",
    "verify_logits",
]
