"""Runs pytest for each line of its input, in a fork of a process that has imported slow modules.

    python tests/support/forked_pytest.py MODULE …

A line is a JSON list: a folder, a file for the output, and arguments of pytest. The answer is the
process id of the fork, and later its exit status. Run by its path, this process has no package
`tests`, so the fork takes that of the folder.
"""

import json
import os
import sys
from importlib import import_module

sys.path.pop(0)  # the folder of this file
sys.dont_write_bytecode = True  # byte code knows its source by size and second alone
os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

import pytest  # noqa: E402

for name in sys.argv[1:]:
    import_module(name)
if "numba" in sys.modules:  # it would list its operations when it first loads a kernel
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()

for line in sys.stdin:
    folder, output, *arguments = json.loads(line)
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(folder)
        os.environ["PYTHONPATH"] = folder
        sys.path.insert(0, folder)
        with open(output, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        status = pytest.main(arguments)
        sys.stdout.flush()
        os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
