"""Lets vLLM's model runner V2 run without a GPU, where it stands first on PYTHONPATH.

vLLM asks Triton for an active "cpu" backend, and falls back to runner V1 without one. Named here,
it lets the runner's kernels run in Triton's interpreter.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    try:
        from triton.backends import Backend, backends
    except ImportError:  # another environment's Python, such as that of a tool
        pass
    else:

        class Driver:
            @staticmethod
            def is_active() -> bool:
                return True

        backends["cpu"] = Backend(None, Driver)
