"""A process does not end under a store's call that was given up."""

import subprocess
import sys
from pathlib import Path

SLOW = """
import sys, time
from pathlib import Path
from tpsample.ranks.bounded_store import BoundedStore

class Slow:
    def check(self, keys):
        time.sleep(0.5)
        Path(sys.argv[1]).write_text("answered")
        return True

assert not BoundedStore(Slow(), 0.01).has("key")
"""


def test_the_end_of_a_process_waits_for_a_call_that_was_given_up(tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    subprocess.run([sys.executable, "-c", SLOW, str(answer)], check=True, timeout=60)
    assert answer.read_text() == "answered"
