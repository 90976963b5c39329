"""The faults that `tests.mutants` plants, each with the nearest tests that must notice it."""

from tests.faults import (
    benches,
    compiled,
    drafts,
    engines,
    filters,
    gpus,
    ranks,
    requests,
    scores,
    training,
)
from tests.faults.fault import Fault

__all__ = ["FAULTS", "Fault"]

MODULES = (scores, filters, ranks, requests, drafts, training, engines, benches, compiled, gpus)
FAULTS = [fault for module in MODULES for fault in module.FAULTS]
