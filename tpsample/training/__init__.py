"""Log-probabilities for a trainer: of tokens that a sampler drew, over the sets that it kept.

kept_logprobs      values and entropies with gradients, on vocabulary shards, O(set × D)
KeptTokens         the set of each token's row
"""

from tpsample.training.call import kept_logprobs
from tpsample.training.kept_tokens import KeptTokens
from tpsample.training.logprobs import KeptLogprobs

__all__ = ["KeptLogprobs", "KeptTokens", "kept_logprobs"]
