"""Runs many short works one after another as the ranks of one world, and says how each of them ended on every rank.

The ranks are forked from this process, which has imported everything. They go on with the next work where the last one
ended well or was refused before anything was trained; after any other end new ranks are forked, so that one failure
does not reach the next.
"""

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from lightning_mist.errors import MistError


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a work ended.

    Attributes:
        ranks: By rank what the work returned as ``{"found": ...}``, or ``{"error": ..., "is_ours": ..., "has_begun":
            ..., "traceback": ...}``; None of a rank that ended without a word or not in time.
        is_late: Whether time ran out.
        output: What the ranks printed since their world began, the end of it.
        seconds: From the first rank's beginning to the last one's end.
    """

    ranks: tuple[dict[str, Any] | None, ...]
    is_late: bool
    output: str
    seconds: float


def run_series(
    works: Sequence[Callable[[], Any]],
    folder: Path,
    *,
    ranks: int,
    seconds: float,
    has_begun: Callable[[], bool] = lambda: False,
    tell: Callable[[int, End], None] = lambda index, end: None,
) -> list[End]:
    """Run all works.

    Args:
        works: Each is called on every rank, with ``LOCAL_RANK`` and ``RANK`` set; what it returns is written as JSON.
        folder: For what ranks write.
        seconds: How long a work may take.
        has_begun: Whether the work at hand has begun to train: its error is no refusal then, and ranks are forked anew.
        tell: Told of every end.
    """
    ends: list[End] = []
    while len(ends) < len(works):
        place = folder / f"from-{len(ends)}"
        place.mkdir(parents=True)
        found = _World(works, place, len(ends), ranks, has_begun).watched(seconds)
        for end in found:
            tell(len(ends), end)
            ends.append(end)
    return ends


class _World:
    """Ranks that go through works from one on."""

    def __init__(
        self,
        works: Sequence[Callable[[], Any]],
        place: Path,
        first: int,
        ranks: int,
        has_begun: Callable[[], bool],
    ) -> None:
        self._works, self._place, self._first, self._has_begun = works, place, first, has_begun
        self._ranks = range(ranks)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._children = dict[int, int]()
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                os.setsid()
                self._be(rank, port)
            self._children[rank] = child

    # In a rank ---------------------------------------------------------------------------------------------------

    def _be(self, rank: int, port: int) -> None:
        """Run works as a rank, and never return."""
        try:
            output = os.open(self._place / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, TextIOWrapper):
                    stream.reconfigure(line_buffering=True, write_through=False)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            with (self._place / f"rank{rank}.jsonl").open("a") as file:
                for index in range(self._first, len(self._works)):
                    print(json.dumps({"begins": index, "at": time.time()}), file=file, flush=True)
                    answer, goes_on = self._answer(index)
                    print(json.dumps({"ends": index, "at": time.time(), **answer}), file=file, flush=True)
                    if not self._all_go_on(index, rank, goes_on=goes_on):
                        break
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _answer(self, index: int) -> tuple[dict[str, Any], bool]:
        try:
            return {"found": self._works[index]()}, True
        except BaseException as error:
            begun = self._has_begun()
            text = f"{type(error).__name__}: {error}"
            where = "".join(traceback.format_exception(error))[-4000:]
            answer = {"error": text, "is_ours": is_deliberate(error), "has_begun": begun, "traceback": where}
            return answer, is_deliberate(error) and not begun

    def _all_go_on(self, index: int, rank: int, *, goes_on: bool) -> bool:
        """Wait for the other ranks, which may have ended otherwise; one that has died is for the watching process.

        A rank that stops ends at once, as it would by itself: others may be waiting for its connections to break.
        """
        (self._place / f"{index}-{rank}").write_text("goes on" if goes_on else "stops")
        if not goes_on:
            return False
        said = [self._place / f"{index}-{other}" for other in self._ranks]
        while not all(path.is_file() and path.read_text() for path in said):
            time.sleep(0.005)
        return all(path.read_text() == "goes on" for path in said)

    # In the process that watches ---------------------------------------------------------------------------------

    def watched(self, seconds: float) -> list[End]:
        """The ends of the works that were begun, once all ranks have ended or one took too long for a work."""
        last, told, is_late = time.monotonic(), dict[int, str](), False
        living = set(self._ranks)
        while living and not is_late:
            time.sleep(0.02)
            for rank in tuple(living):
                if os.waitpid(self._children[rank], os.WNOHANG) != (0, 0):
                    living.discard(rank)
            now = {rank: self._last_line(rank) for rank in self._ranks}
            if now != told:
                last, told = time.monotonic(), now
            if len(living) < len(self._ranks) and all(now[rank].startswith('{"ends"') for rank in living):
                break  # they wait for one that has died
            is_late = time.monotonic() - last > seconds
        for rank in living:
            os.killpg(self._children[rank], signal.SIGKILL)
            os.waitpid(self._children[rank], 0)
        return self._ends(is_late=is_late)

    def _last_line(self, rank: int) -> str:
        path = self._place / f"rank{rank}.jsonl"
        return (path.read_text().splitlines() or [""])[-1] if path.is_file() else ""

    def _ends(self, *, is_late: bool) -> list[End]:
        begun: dict[int, list[float]] = {}
        answers: dict[tuple[int, int], dict[str, Any]] = {}
        for rank in self._children:
            path = self._place / f"rank{rank}.jsonl"
            for line in path.read_text().splitlines(keepends=True) if path.is_file() else ():
                if not line.endswith("\n"):
                    break  # it was ended in the middle of it
                told = json.loads(line)
                index = told.pop("begins", None)
                if index is None:
                    index = told.pop("ends")
                    answers[index, rank] = told
                begun.setdefault(index, []).append(told.pop("at"))
        logs = (self._place / f"rank{rank}.log" for rank in self._children)
        output = "".join(path.read_text(errors="replace")[-3000:] for path in logs if path.is_file())
        if not begun:
            raise RuntimeError(f"no rank came to its first work: {output}")
        return [
            End(
                ranks=tuple(answers.get((index, rank)) for rank in self._children),
                is_late=is_late and index == max(begun),
                output=output,
                seconds=max(times) - min(times),
            )
            for index, times in sorted(begun.items())
        ]


def is_deliberate(error: BaseException) -> bool:
    """Whether an error is one that the package raises on purpose, or a wrong argument that it refuses itself."""
    if isinstance(error, MistError):
        return True
    if not isinstance(error, (ValueError, TypeError)):
        return False
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return "lightning_mist" in Path(frame.filename).parts and (frame.line or "").startswith("raise ")
