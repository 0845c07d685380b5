"""The exceptions that lightning_mist raises on purpose.

Wrong arguments are plain ``ValueError`` or ``TypeError``; everything that depends on a model, a machine or a plan is a
:class:`MistError`. A message says, in this order: the thing with its value, the rule with its numbers, the nearest way
out.
"""


class MistError(Exception):
    """Base class of every error that belongs to planning or running a plan."""


class TraceError(MistError):
    """The module cannot be traced, or does something that a cut module would compute wrongly."""


class ProfileError(MistError):
    """A measurement of the machine failed or a stored profile cannot be used."""


class InfeasibleError(MistError):
    """No plan of the search space satisfies every constraint; the message names the binding one.

    Attributes:
        shortage: What the least demanding plan lacks: whether that is host memory, how many times as much is needed as
            may be used, and both for people. None where memory is not the reason.
    """

    shortage: tuple[bool, float, str] | None = None


class PlanError(MistError):
    """A plan contradicts itself, the model, the machine or what the runtime can do."""


class ScheduleError(MistError):
    """A list of actions breaks a rule of its schedule."""


class PeerError(MistError):
    """Something takes all ranks, and another one has failed or gone."""


class CheckpointError(MistError):
    """A checkpoint could not be written or read, or is another module's."""


def caught_as(error: object, said: MistError) -> MistError:
    """An error that says this, and is caught also where the other error would be, if that is one that may be."""
    kind, own = type(error), type(said)
    if not isinstance(error, Exception):
        return said
    try:
        body = {"__module__": kind.__module__, "__str__": lambda self: str(said)}
        made = type(kind.__name__, (kind,) if issubclass(kind, own) else (kind, own), body)
        like: MistError = made.__new__(made, *error.args)
        vars(like).update(vars(error))
    except Exception:  # of a class that cannot be derived from
        return said
    return like
