"""Sample next tokens where the logits are computed. See `LMHeadSampler`."""

from tpsample import noise, reference
from tpsample.batch import SamplingBatch
from tpsample.errors import Desync, PeerLost, RankMismatch, UnsupportedParameter
from tpsample.output import Logprobs, SampleOutput
from tpsample.params import SamplingParams
from tpsample.sampler import LMHeadSampler, sample
from tpsample.vocab_shard import VocabShard
from tpsample.word import Status

__version__ = "0.1.0"

__all__ = [
    "Desync",
    "LMHeadSampler",
    "Logprobs",
    "PeerLost",
    "RankMismatch",
    "SampleOutput",
    "SamplingBatch",
    "SamplingParams",
    "Status",
    "UnsupportedParameter",
    "VocabShard",
    "noise",
    "reference",
    "sample",
]
