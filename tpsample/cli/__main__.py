"""`python -m tpsample.cli` is what torchrun and mpirun start."""

from tpsample.cli import main

main()
