"""Sample next tokens where the logits are computed. See `LMHeadSampler`."""

from tpsample import noise, reference
from tpsample.core.version import __version__
from tpsample.core.vocab_shard import VocabShard
from tpsample.core.word import Status
from tpsample.errors import Desync, PeerLost, RankMismatch, UnsupportedParameter
from tpsample.one_call import sample
from tpsample.output import KeptSets, Logprobs, SampleOutput
from tpsample.request.batch import SamplingBatch
from tpsample.request.params import SamplingParams
from tpsample.sampler import LMHeadSampler
from tpsample.speculative import VerifyOutput, sample_draft, verify
from tpsample.trace import TopKTrace

__all__ = [
    "__version__",
    "Desync",
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
    "noise",
    "reference",
    "sample",
    "sample_draft",
    "verify",
]
