"""Processes that are killed at the n-th time they change something on the disk."""

import builtins
import io
import os
from contextlib import ExitStack
from itertools import count
from unittest import mock

from lightning_mist.strategy.checkpoints import atomic

CHANGES = ["fsync", "replace", "rename", "unlink", "remove", "rmdir", "mkdir"]


class Killer:
    """Counts changes of the disk in this process and kills it at one of them."""

    def __init__(self, number):
        self.number, self.seen = number, 0

    def is_time(self):
        self.seen += 1
        return self.seen == self.number

    def before(self, function):
        def call(*args, **kwargs):
            if self.is_time():
                os._exit(9)
            return function(*args, **kwargs)

        return call

    def open(self, killer=None):
        killer, usual = self, builtins.open

        class File(io.FileIO):
            """Not buffered: what was written is on the disk, of the last write a half."""

            def write(self, data):
                if killer.is_time():
                    super().write(bytes(memoryview(data))[: len(data) // 2])
                    os._exit(9)
                return super().write(data)

        def call(file, mode="r", *args, **kwargs):
            return File(file, mode.replace("b", "")) if set(mode) & set("wx") else usual(file, mode, *args, **kwargs)

        return call

    def __enter__(self):
        self._stack = ExitStack()
        opened = self.open()
        for place, name, value in [
            *((os, name, self.before(getattr(os, name))) for name in CHANGES),
            (builtins, "open", opened),
            (io, "open", opened),
            (atomic, "_exchange", self.before(atomic._exchange)),
        ]:
            self._stack.enter_context(mock.patch.object(place, name, value))
        return self

    def __exit__(self, *error):
        self._stack.close()


def is_killed(work, number):
    """Whether a process that does some work is killed at a change of the disk; if not it has done all of it."""
    child = os.fork()
    if child == 0:
        try:
            with Killer(number):
                work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def kill_points(work, prepare):
    """Yields after every process that was killed, at one change after the other, until one comes through."""
    for number in count(1):
        prepare()
        if not is_killed(work, number):
            return
        yield number
