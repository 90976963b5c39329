"""vLLM without `--worker-cls`: a plug-in that does nothing until the server is told to.

    vllm serve MODEL --additional-config '{"tpsample": {}}'

vLLM calls `register` in each of its processes, before it looks up the class of its workers by name.
So the name finds a subclass, which loads a model as ever unless that option is there.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, get_args

from tpsample.agreement.arguments import BackendName, ExchangeName, ScreeningName
from tpsample.core.checks import describe
from tpsample.errors import UnsupportedParameter
from tpsample.integrations.vllm_modes import check_modes
from tpsample.speculative.drafting import Method

OPTIONS = {
    "exchange": get_args(ExchangeName),
    "chunks": range(1, 65),
    "backend": get_args(BackendName),
    "screening": (None, *get_args(ScreeningName)),
    "verification": get_args(Method),
}
"""The fields of the option, and what each may be: arguments of `vllm_attach.attach`."""


def options_of(config: Any) -> dict[str, Any] | None:
    """Return the arguments of `attach` in an engine's configuration; None if it does not name us.

    Raises:
        UnsupportedParameter: (a ValueError) a field that there is not, or a value that it has not.
    """
    given = getattr(config, "additional_config", None)
    options = given.get("tpsample") if isinstance(given, dict) else None
    if options is None:
        return None
    if not isinstance(options, dict):
        raise UnsupportedParameter(
            f"--additional-config: tpsample: expected an object such as {{}}, got "
            f"{describe(options)}"
        )
    for name, value in options.items():
        if name not in OPTIONS:
            known = ", ".join(OPTIONS)
            raise UnsupportedParameter(
                f"--additional-config: tpsample: no field {describe(name)}; it has {known}"
            )
        if isinstance(value, bool) or value not in OPTIONS[name]:
            wanted = "1 to 64" if name == "chunks" else ", ".join(map(describe, OPTIONS[name]))
            raise UnsupportedParameter(
                f"--additional-config: tpsample: {name}: expected {wanted}, got {describe(value)}"
            )
    return options


def with_tpsample(base: Any) -> Any:
    """Return a class of vLLM's workers, with a model runner that may sample with tpsample.

    It does so if the engine's configuration says so, or always in a subclass with `always` True.
    """
    if hasattr(base, "always"):
        return base

    class SamplingWorker(base):  # type: ignore[misc]
        """A worker of vLLM whose model runner samples with tpsample, if it is told to."""

        always = False
        _samples = False
        _head: Any = None

        def load_model(self, **kwargs: Any) -> None:
            """Load the model, then let its runner sample with tpsample."""
            options = options_of(self.vllm_config)
            if options is None and not self.always:
                super().load_model(**kwargs)
                return
            from vllm.distributed.parallel_state import get_pp_group

            from tpsample.integrations.vllm_attach import attach  # a version that was tried

            check_modes(self.model_runner)
            super().load_model(**kwargs)
            self._samples = True
            if get_pp_group().is_last_rank:
                self._head = attach(self.model_runner, **(options or {}))

        def compile_or_warm_up_model(self) -> Any:
            """Warm up, then compare a first step with the definition."""
            took = super().compile_or_warm_up_model()
            if self._samples:
                from tpsample.integrations.vllm_self_test import check_first_step

                check_first_step(self, self._head)
            return took

        def tpsample_counters(self) -> dict[str, Any]:
            """Return this rank's counters, for `collective_rpc("tpsample_counters")`."""
            return {} if self._head is None else self._head.kept.sampler.counters()

    SamplingWorker.__qualname__ = SamplingWorker.__name__ = base.__name__
    SamplingWorker.__module__ = base.__module__
    return SamplingWorker


def register() -> None:
    """Let vLLM find our subclass under the name of its worker; again without effect."""
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    module, name = ("cpu_worker", "CPUWorker") if on_cpu else ("gpu_worker", "Worker")
    worker_module = import_module(f"vllm.v1.worker.{module}")
    setattr(worker_module, name, with_tpsample(getattr(worker_module, name)))
