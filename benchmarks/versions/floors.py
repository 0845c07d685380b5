"""The lowest versions that ``setup.cfg`` promises, as constraints for pip: ``python -m benchmarks.versions.floors``.

With ``--python`` the lowest version of Python in its place. Needs nothing but Python.
"""

import argparse
import configparser
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("pictures", "test")
"""Of what besides the package itself a version is promised."""


def floors(text: str) -> list[str]:
    """Requirements of a ``setup.cfg`` with a lowest version, as constraints to that version."""
    config = configparser.ConfigParser()
    config.read_string(text)
    lines = [config["options"]["install_requires"], *(config["options.extras_require"][name] for name in EXTRAS)]
    found = re.findall(r"^([\w-]+)(?:\[.*\])?>=([\w.]+)", "\n".join(lines), re.M)
    return list(dict.fromkeys(f"{name}=={version}" for name, version in found))


def lowest_python(text: str) -> str:
    """The lowest version of Python of a ``setup.cfg``."""
    config = configparser.ConfigParser()
    config.read_string(text)
    return config["options"]["python_requires"].removeprefix(">=")


def main(arguments: Iterable[str] | None = None) -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="store_true")
    given = parser.parse_args(None if arguments is None else list(arguments))
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    print(lowest_python(text) if given.python else "\n".join(floors(text)))


if __name__ == "__main__":
    main()
