"""`python -m tpsample` is the command `tpsample`."""

from tpsample.cli import main

main()
