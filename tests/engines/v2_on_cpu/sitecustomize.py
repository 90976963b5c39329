"""Lets vLLM's model runner V2 run without a GPU, where it stands first on PYTHONPATH.

vLLM asks Triton for an active "cpu" backend, and falls back to runner V1 without one. Named here,
it lets the runner's kernels run in Triton's interpreter. Of a bool and a block of them this makes a
block of integers. Its loads refuse that as a mask, and vLLM's kernel of n-grams has such a mask.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    try:
        from triton.backends import Backend, backends
        from triton.runtime.interpreter import InterpreterBuilder
    except ImportError:  # another environment's Python, such as that of a tool
        pass
    else:

        class Driver:
            @staticmethod
            def is_active() -> bool:
                return True

        backends["cpu"] = Backend(None, Driver)
        load = InterpreterBuilder.create_masked_load

        def load_with_a_mask_of_bools(builder, pointers, mask, *others):
            mask.data = mask.data.astype(bool)
            return load(builder, pointers, mask, *others)

        InterpreterBuilder.create_masked_load = load_with_a_mask_of_bools
