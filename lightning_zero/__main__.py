"""``python -m lightning_zero`` is the console script ``lightning-zero``."""

import sys

from lightning_zero.cli import main

sys.exit(main())
