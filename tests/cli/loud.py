"""Prints in every way there is, in and around a command: ``python -m tests.cli.loud [ANSWERS]``."""

import ctypes
import os
import subprocess
import sys

from lightning_mist.cli.output import answers_alone, display, say

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
                display(lambda width, color: f"an answer{' in colour' * color}")
    finally:
        print("after")


if __name__ == "__main__":
    main(int(sys.argv[1]))
