"""`python -m tpsample.cli`, what torchrun and mpirun start."""

from tpsample.cli import main

main()
