"""Prints in every way there is, in and around a command: ``python -m tests.cli.loud [ANSWERS]``."""

import ctypes
import os
import subprocess
import sys

from lightning_mist.cli.output import answer, answers_alone, has_colors, say

PRINTED = ("by Python", "by C, which holds it back", "past both", "by a process")


def print_in_every_way() -> None:
    """Once each."""
    print(PRINTED[0])
    ctypes.CDLL(None).puts(PRINTED[1].encode())
    os.write(1, f"{PRINTED[2]}\n".encode())
    subprocess.run(["echo", PRINTED[3]], check=True)


def main(answers: int) -> None:
    """A command that answers so many lines."""
    print("before")
    try:
        with answers_alone():
            print_in_every_way()
            say("progress")
            for _ in range(answers):
                answer("an answer")
            assert not has_colors()
    finally:
        print("after")


if __name__ == "__main__":
    main(int(sys.argv[1]))
