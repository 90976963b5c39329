"""Some steps through compiled kernels, on an emulated GPU; `make compiled` runs the rest."""

from __future__ import annotations

import re
import sys

import pytest

from tests.compiled.coverage import UNKNOWN, by_reason
from tests.support.commands import run_command

QUICK = ("few_goldens", "one_push", "slots", "appends", "scores", "few_planted")


@pytest.mark.heavy
def test_what_compiled_kernels_of_sm_90_do():
    words = ("--arch", 90, "--processes", 1, "--only", *QUICK, "no_such_part")
    done = run_command(sys.executable, "-m", "tests.compiled", *words)
    for part in QUICK:
        assert re.search(rf"sm_90 {part}: [1-9]\d* rows, 0 wrong, .* 0 doubts", done.stdout), (
            done.stdout + done.stderr
        )
    assert "KeyError: 'no_such_part'" in done.stdout and done.returncode == 1


def test_a_line_that_never_ran_and_a_branch_that_never_came_have_no_reason():
    """An instruction has one where others of its line ran, but a branch never has that one."""
    ran = {"cuts.py:1, add, runs": 2, "cuts.py:1, sub, runs": 0, "cuts.py:1, bra, holds": 0}
    never = {"cuts.py:2, add, runs": 0}
    assert by_reason(ran | never)[UNKNOWN] == ["cuts.py:1, bra, holds", "cuts.py:2, add, runs"]
