"""No garbage collection in the middle of a search.

A search makes many thousands of arrays, tuples and frozen data, none of which refers back to itself: all go as soon as
nobody needs them. Python's collector looks for those that do, and now and then at every object of the process, of which
there are very many with torch and Lightning: that may take as long as planning again under another memory limit.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Let Python's collector of cycles rest, and let it go on afterwards if it did before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
