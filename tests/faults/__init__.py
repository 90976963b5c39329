"""The faults that `tests.mutants` plants, each with the nearest tests that must notice it."""

from tests.faults.benches import BENCHMARKS, GPU_CHECK
from tests.faults.engines import SERVERS
from tests.faults.fault import Fault
from tests.faults.filters import FILTERS, LOGPROBS
from tests.faults.ranks import AGREEMENT, EXCHANGES, SEEDS, SHARDS
from tests.faults.requests import ENGINES, FILES, LIFETIME, REQUESTS, SLOTS, SPECULATIVE, VERIFY
from tests.faults.scores import SCORES, SCREEN_KERNELS, SCREENING, TIES
from tests.faults.suite import INTERPRETER

__all__ = ["FAULTS", "Fault"]

FAULTS = [
    *SCORES,
    *TIES,
    *SCREENING,
    *SCREEN_KERNELS,
    *FILTERS,
    *LOGPROBS,
    *SHARDS,
    *EXCHANGES,
    *AGREEMENT,
    *SEEDS,
    *REQUESTS,
    *SLOTS,
    *SPECULATIVE,
    *VERIFY,
    *LIFETIME,
    *ENGINES,
    *SERVERS,
    *FILES,
    *BENCHMARKS,
    *GPU_CHECK,
    *INTERPRETER,
]
