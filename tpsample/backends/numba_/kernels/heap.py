"""A heap of the largest numbers so far, of any type, with the least of them first."""

from __future__ import annotations

from tpsample.backends.numba_.kernels.compiling import jit


@jit()
def push(heap, size, value):
    """Put a value in the place of the least of the first `size` numbers, if it is larger."""
    if value <= heap[0]:
        return
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = value


@jit()
def sort(heap):
    """Sort a heap, the largest number first."""
    for last in range(len(heap) - 1, 0, -1):
        least = heap[0]
        push(heap, last, heap[last])
        heap[last] = least
