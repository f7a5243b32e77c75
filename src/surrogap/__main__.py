"""The command line as `python -m surrogap`, for when `surrogap` is not on the PATH."""

import sys

from surrogap.cli import main

sys.exit(main())
