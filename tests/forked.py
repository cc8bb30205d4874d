"""The last that the fork server imports: what all ranks would do again, done once before they are forked."""

import functools
import gc

from lightning.fabric.utilities import registry

# Every Trainer looks for callbacks among the entry points of all installed packages: a file of each of them.
registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[assignment]
registry.entry_points(group="lightning.pytorch.callbacks_factory")

# Garbage collection in ranks passes over what all of them have from the server. Without that a collection walks through
# a million objects of imported packages, and copies their memory.
gc.collect()
gc.freeze()
