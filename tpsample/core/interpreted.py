"""Whether this process interprets Triton kernels: the one place that reads TRITON_INTERPRET.

It is asked by the host and by `tpsample.kernels`, and must not import Triton, because
`import tpsample` needs none.
"""

import os
from functools import cache


@cache
def interpreted() -> bool:
    """Whether TRITON_INTERPRET is on, read once.

    Later changes of the variable are ignored, because Triton ignores them too: a function is
    interpreted or compiled as it was when its module was imported.
    """
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
