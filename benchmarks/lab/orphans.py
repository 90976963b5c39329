"""A process that ends with its parent, however the parent ended: nothing holds a GPU for nobody.

python -m benchmarks.lab.orphans PARENT COMMAND …    becomes a command that ends with process PARENT
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; exit if it has ended already.

    Linux keeps this for one process: one that it starts has to ask for itself. On other systems
    nothing is asked.

    Args:
        parent: the process id that the parent gave as its own.

    Raises:
        SystemExit: it is not the parent, or not any more.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this process could ask
        sys.exit("its parent has ended")


def with_parent(command: list[str]) -> list[str]:
    """Return a command that is `command`, and ends with this process."""
    return [sys.executable, "-m", "benchmarks.lab.orphans", str(os.getpid()), *command]


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
