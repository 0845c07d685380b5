"""Python's collector of cyclic garbage, which looks again and again at millions of objects that are no garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no cyclic garbage in the enclosed block, or the decorated function.

    A search makes millions of small objects and hardly a cycle of them, and the collector goes through all that are
    alive whenever their number has grown by a part. What no cycle holds is freed as always.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
