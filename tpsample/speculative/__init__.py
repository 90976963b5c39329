"""Speculative decoding: verify drafted tokens on vocabulary shards, exactly. See `verify`."""

from tpsample.output import VerifyOutput
from tpsample.speculative import reference
from tpsample.speculative.drafting import Draft, sample_draft
from tpsample.speculative.verify import verify, verify_logits

__all__ = ["Draft", "VerifyOutput", "reference", "sample_draft", "verify", "verify_logits"]
