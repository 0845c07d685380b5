"""Documents and files that are spoilt, one thing at a time."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

WRONG: dict[type, tuple[Any, ...]] = {
    bool: ("x", 5, None, [], {}, 1.5),
    int: ("x", 1.5, [], {}, True, "3", [3], -1, 10**400, float("nan"), "0x3"),
    float: ("x", [], {}, True, "3", [3.0], float("inf"), float("nan"), -float("inf")),
    str: (5, None, [], {}, True, 1.5),
    list: ("x", 5, None, {}, True),
    dict: ("x", 5, None, [], True, [[]]),
}
"""What no value of a type may be replaced with; negative ones only where the file counts something."""


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value in a document, itself included, with the keys that lead there."""
    yield path, document
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield from places(value, (*path, key))


def with_value(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The document with another value at a place."""
    if not path:
        return value
    changed = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def without(document: Any, path: tuple[Any, ...]) -> Any:
    """The document without what is at a place."""
    changed = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return changed


def wrong_values(document: Any, *, skip: Callable[[tuple[Any, ...], Any], bool]) -> Iterator[Any]:
    """The document with one value that is of another type, at every place."""
    for path, value in places(document):
        for other in WRONG[type(value)]:
            if not skip(path, other):
                yield with_value(document, path, other)


def broken(text: str, chance: random.Random) -> Iterator[str]:
    """Texts that are no JSON any more."""
    yield from (
        "",
        " ",
        "null",
        "[]",
        "3",
        '"x"',
        "true",
        "{}",
        "{",
        "[" * 3000 + "]" * 3000,
        "{}{}",
        "\x00",
        "nan",
        "NaN",
    )
    yield '{"a":' * 3000 + "1" + "}" * 3000
    body = text.rstrip()
    for _ in range(20):
        yield body[: chance.randrange(1, len(body) - 1)]
    for _ in range(10):
        at = chance.choice([index for index, letter in enumerate(body) if letter in "{}[],:"])
        text = body[:at] + ("" if body[at] != "," else ";") + body[at + 1 :]
        with suppress(ValueError):
            json.loads(text)
            continue  # it was inside of a string
        yield text
    yield body + "}"
    yield body.replace('"', "'")


class Files:
    """Writes files, one after another, into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def __call__(self, content: str | bytes, ending: str) -> str:
        """The path of a new file."""
        self._count += 1
        path = self._folder / f"{self._count}{ending}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    def every_kind(self, ending: str) -> Iterator[str]:
        """Files that hold nothing readable."""
        for content in (b"\xff\xfe\x00\x01", b"\x80abc", "x: ü".encode("utf-16"), bytes(range(256))):
            yield self(content, ending)
        folder = self._folder / f"folder{ending}"
        folder.mkdir(exist_ok=True)
        yield str(folder)
