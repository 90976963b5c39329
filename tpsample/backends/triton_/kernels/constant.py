"""Numbers that kernels have when they are compiled."""

import triton.language as tl


class Constant(tl.constexpr):
    """A global number of kernels, which costs a launch next to nothing.

    Each launch of a kernel asks Triton whether the globals in it are what they were when it was
    compiled. `tl.constexpr` makes an object of the answer and takes 0.6 µs, for some kernels 25
    times. This one answers at once.
    """

    def __ne__(self, other: object) -> bool:  # type: ignore[override]
        return bool(self.value != getattr(other, "value", other))
