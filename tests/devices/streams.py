"""Streams of a CPU are threads: other tests must not find them."""

import gc
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture
def ended_streams() -> Iterator[None]:
    """Afterwards the threads of streams have ended, if nobody holds the streams."""
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("stream "):
            thread.join(10)
            assert not thread.is_alive(), f"somebody holds {thread.name}"
