"""Workers of a vLLM that is changed as a later version may be."""

from __future__ import annotations

from typing import Any

import vllm
from torch import Tensor

from tests.engines.asked import LATER_VLLM

vllm.__version__ = LATER_VLLM  # before the adapter looks

from tests.engines.workers import Watched  # noqa: E402


class Later(Watched):
    """A worker of a version that nobody has tried, and that serves."""


class CountsOtherwise(Watched):
    """A worker whose runner counts one token more where it samples."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        runner, sampler = self.model_runner, self.model_runner.sampler
        forward = sampler.forward

        def late(logits: Tensor, sampling_metadata: Any, **others: Any) -> Any:
            counted = runner.seq_lens
            runner.seq_lens = counted + 1
            try:
                return forward(logits, sampling_metadata, **others)
            finally:
                runner.seq_lens = counted

        sampler.forward = late
