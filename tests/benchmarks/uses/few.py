"""Three uses that end in three ways; ``python -m tests.benchmarks.uses.few FOLDER`` runs them under a plan."""

import sys
from pathlib import Path

from benchmarks.uses.run import Work
from benchmarks.uses.session import Uses

uses = Uses("theme")


@uses("same")
def same(session):
    session.keep("rank", [session.rank])


@uses("wrong")
def wrong(session):
    session.keep("losses", [1.0 if session.plan is None else 1.1])


@uses("crash")
def crash(session):
    if session.plan is not None:
        raise KeyError("something")


def main():
    every = {use.name: use for use in uses.every}
    names = ("same", "crash", "wrong")
    work = Work(Path(sys.argv[1]), again=False, patience_seconds=60)
    found = work.cells([every[name] for name in names], ["pp2"])
    assert len(found) == len(names)


if __name__ == "__main__":
    main()
