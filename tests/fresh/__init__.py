"""Fresh Python processes for tests that launch one, as a user does.

torchmetrics, which Lightning imports, itself imports the large packages it finds installed: more than half of the
seconds that a process takes to start here. Those that the launched scripts have no use for are hidden from them, by the
``sitecustomize.py`` in this folder.
"""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """The environment variables of this process, with which a new one finds the tests and starts quickly."""
    paths = [str(Path(__file__).parent), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
