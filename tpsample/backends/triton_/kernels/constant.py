"""Numbers that kernels have when they are compiled."""

import triton.language as tl


class Constant(tl.constexpr):
    """A global number of kernels that Triton compares fast.

    In each launch Triton compares the globals of a kernel, up to 25, with those that it was
    compiled with. `tl.constexpr` answers with an object, which takes 0.6 µs; this answers with a
    bool.
    """

    def __ne__(self, other: object) -> bool:  # type: ignore[override]
        return bool(self.value != getattr(other, "value", other))
