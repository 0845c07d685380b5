"""A CPU whose streams run later still than they may, by random delays, and tell an observer what is asked of them.

Whether anything but luck orders two uses of a tensor can be judged from what was asked, whatever the delays were.
"""

import random
from time import sleep

from lightning_mist.devices import HostOps

LONGEST_DELAY = 2e-4
"""Seconds; longer than most things that tests launch take."""


class LateHost(HostOps):
    """See :class:`~lightning_mist.devices.HostOps`.

    Args:
        seed: Of random delays; there are none without.
        observer: Told what is asked of streams, which are numbered from 1 on; 0 is the calling thread. As one that
            waits the caller has no number: it waits for everything that is launched later, too.
    """

    def __init__(self, *, seed=None, observer=None):
        super().__init__()
        self._random = None if seed is None else random.Random(seed)
        self._observer = observer
        self._streams_made = 0
        self._events = {}  # by id: the event, which stays, and its number

    def _tell(self, what, *told):
        if self._observer is not None:
            getattr(self._observer, what)(*told)

    def _place(self, stream):
        """The number of a stream, on which what comes next is late."""
        if stream is not None and self._random is not None:
            stream.put(lambda: sleep(self._random.uniform(0.0, LONGEST_DELAY)))
        return 0 if stream is None else stream.number

    def _number(self, event):
        return self._events.setdefault(id(event), (event, 1 + len(self._events)))[1]

    def stream(self, *, high_priority=False):
        made = super().stream(high_priority=high_priority)
        self._streams_made += 1
        made.number = self._streams_made
        return made

    def launch(self, work, stream=None, *, reads=(), writes=()):
        self._tell("launched", self._place(stream), reads, writes)
        super().launch(work, stream, reads=reads, writes=writes)

    def record(self, stream=None, *, timed=False):
        place = self._place(stream)
        event = super().record(stream, timed=timed)
        self._tell("recorded", self._number(event), place)
        return event

    def wait(self, event, stream=None):
        self._tell("waited", self._number(event), self._place(stream))
        super().wait(event, stream)

    def synchronize(self, event=None):
        streams = [stream for stream in self._streams if stream.works]
        for last in [event] if event is not None else [self.record(stream) for stream in streams]:
            self._tell("waited", self._number(last), None)
        super().synchronize(event)
