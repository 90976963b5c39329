"""One shape, one step: what a profiler is pointed at.

    python -m benchmarks.gpu.one_step --shape 128256x8192 --batch 64 --world-size 8
    ncu -k regex:lm_head -c 1 python -m benchmarks.gpu.one_step --batch 64
    python -m benchmarks.gpu.one_step --dry-run      tiny, on a CPU, in the Triton interpreter

Takes `--warm-up` steps and then one more. The first shard of `--world-size` is sampled as a
vocabulary of its own. No id is compared: `benchmarks.gpu.check` does that.
"""

from __future__ import annotations

import argparse
import os

from benchmarks.lab.shapes import SHAPES, TINY, shape_named


def main(arguments: list[str] | None = None) -> int:
    """Take the steps, and say what was taken."""
    parser = argparse.ArgumentParser(prog="one_step", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default=SHAPES[0].name, help="such as 128256x8192")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--world-size", type=int, default=1, help="take 1/W of the vocabulary")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before the last")
    parser.add_argument("--tile", help="block_v,block_b,block_d,warps,stages in place of the rule")
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape on a CPU")
    options = parser.parse_args(arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch

    from benchmarks.gpu.numerics import device_of
    from benchmarks.lab.problem import Problem, make_sampler, make_weight, override_tile
    from tpsample import VocabShard
    from tpsample.local.tiles import Tile

    shape = TINY if options.dry_run else shape_named(options.shape)
    device = device_of(options.dry_run)
    rows = len(VocabShard.even(shape.vocab_size, 0, options.world_size))
    weight = make_weight(rows, shape.hidden_size, device)
    sampler = make_sampler(weight, options.batch)
    if options.tile:
        override_tile(sampler, Tile(*map(int, options.tile.split(","))))
    candidate = Problem.make(weight, options.batch).sampled_by(sampler)
    for _ in range(options.warm_up + 1):
        candidate.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(f"{rows}×{shape.hidden_size} batch {options.batch}: {options.warm_up} + 1 steps")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
