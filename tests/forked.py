"""The last that the fork server imports: garbage collection in ranks passes over what all of them have from it.

Without that a collection walks through a million objects of imported packages, and copies their memory.
"""

import gc

gc.collect()
gc.freeze()
