"""A model of Megatron-core draws one text on 1, 2 and 3 ranks, that of the definition."""

import json
import sys

import pytest

from tests.support.commands import ROOT, TORCHRUN, run_command
from tests.support.older import NO_NETWORK

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
PACKAGE = "megatron-core==0.16.1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Megatron-core, without what it would bring for GPUs."""
    target = tmp_path_factory.mktemp("megatron")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target)
    done = run_command(*pip, PACKAGE, timeout_s=300)
    if any(reason in done.stderr for reason in NO_NETWORK):
        pytest.skip("needs a network, to install Megatron-core")
    if "No matching distribution" in done.stderr:
        pytest.skip(f"needs {PACKAGE} for this Python and machine")
    assert done.returncode == 0, done.stderr[-2000:]
    return target


def test_one_text_for_any_number_of_ranks(folder):
    env, texts = {"PYTHONPATH": f"{ROOT}:{folder}"}, []
    for world_size in (1, 2, 3):
        script = ROOT / "tests" / "support" / "megatron_text.py"
        done = run_command(*TORCHRUN, world_size, script, env=env, timeout_s=300)
        assert done.returncode == 0, done.stderr[-3000:]
        (line,) = (each for each in done.stdout.splitlines() if each.startswith("{"))
        read = json.loads(line)
        assert read["found"] == read["expected"]
        texts.append(read["found"])
    assert texts[0] == texts[1] == texts[2]
    assert len({token for step in texts[0] for token in step}) > 12
