"""Throughput over the number of ranks: one command that starts the ranks by itself.

    make scaling                              python -m benchmarks.scaling --help
    tpsample bench scaling --world-sizes 1,2,4,8 --minutes 30

| file | what it does |
| --- | --- |
| `command.py` | reads the options, starts the ranks of each world size, shows how long is left |
| `plan.py` | lists the points that are asked for, those that are missing, and the views |
| `ranks.py` | is what the ranks run: point after point, each written when it is done |
| `candidates.py` | builds tpsample and the baselines of a point, and checks them |

A point is one world size, shape, batch size and kind of request. Its candidates are timed in turn
in the same processes. A run that is killed loses the point it was at, and the same command goes on
with it.
"""
