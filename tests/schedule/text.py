"""Schedules as text: one line per stage, actions separated by spaces."""

from lightning_mist.schedule import Action, Schedule


def parse(text: str) -> Schedule:
    return tuple(tuple(Action.parse(word) for word in line.split()) for line in text.strip().splitlines())


def show(schedule: Schedule) -> str:
    return "\n".join(" ".join(str(action) for action in actions) for actions in schedule)


def lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())
