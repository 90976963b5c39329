import sys

from tests.engines.command import main

sys.exit(main())
