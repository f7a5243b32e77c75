"""`python -m surrogap.cli`, for `torchrun -m surrogap.cli train`."""

import sys

from surrogap.cli import main

sys.exit(main())
