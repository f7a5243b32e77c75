"""`python -m surrogap`: the command line, where `surrogap` is not on the PATH."""

import sys

from surrogap.cli import main

sys.exit(main())
