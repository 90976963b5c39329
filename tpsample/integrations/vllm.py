"""vLLM with tpsample: every token is sampled where its logits would be, and none are gathered.

    vllm serve MODEL --tensor-parallel-size 2 --additional-config '{"tpsample": {}}'
    vllm serve MODEL --tensor-parallel-size 2 --worker-cls tpsample.integrations.vllm.Worker

The first needs tpsample to be installed, because a plug-in reads the option (`vllm_plugin`). Either
worker loads the model as ever, then replaces attributes of its own model runner, V1 or V2, and of
the model's `LogitsProcessor`. Modes in which that would be wrong are refused here, when the server
starts; see README.md.
"""

from __future__ import annotations

from vllm.platforms import current_platform

from tpsample.integrations.vllm_attach import attach
from tpsample.integrations.vllm_plugin import with_tpsample

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker

__all__ = ["Worker", "attach"]


class Worker(with_tpsample(BaseWorker)):  # type: ignore[misc]
    """A worker of vLLM whose model runner samples with tpsample."""

    always = True
