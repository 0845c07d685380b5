"""Random numbers other than dropout: parts would draw others than the whole, unless nothing comes of them."""

from collections.abc import Sequence

import torch

from lightning_mist.runtime.cutting.arguments import leaves_in
from lightning_mist.runtime.cutting.tape import Entry, Tape, draws_for_itself
from lightning_mist.runtime.cutting.tape_replay import UncuttableError, Values, ancestors, run_entry
from lightning_mist.runtime.cutting.traced_numbers import BATCH, Ref

_DRAWS = 256
"""How often a decision by random numbers is tried: one that is taken once in twenty times is seen but in one of half a
million proofs."""


def refuse_draws(tape: Tape, wanted: Sequence[Ref]) -> None:
    """Refuse a step whose results go by random numbers other than those of dropout.

    Layers that are dropped at random with a probability of zero draw numbers too, by which nothing is decided.
    """
    if not any(entry.is_random for entry in tape.entries):
        return
    for entry in tape.entries:
        if entry.is_random and (entry.block is not None or draws_for_itself(entry.kwargs)):
            raise _refused(entry)
    for entry in ancestors(tape, wanted):
        if entry.is_random:
            raise _refused(entry)
    for entry in tape.entries:
        refs = [leaf for _, leaf in leaves_in((entry.args, entry.kwargs)) if isinstance(leaf, Ref)]
        if entry.is_read and any(earlier.is_random for earlier in ancestors(tape, refs)):
            _try_decision(tape, entry, refs)


def _try_decision(tape: Tape, read: Entry, refs: Sequence[Ref]) -> None:
    earlier = ancestors(tape, refs)
    drawn = next(entry for entry in earlier if entry.is_random)
    goes_by_more = any(entry.depends != "nothing" for entry in earlier) or any(ref.entry == BATCH for ref in refs)
    if read.name != "__bool__" or goes_by_more:
        raise _refused(drawn)
    with torch.no_grad():
        for _ in range(_DRAWS):
            values = Values((), tape.rows)
            for entry in earlier:
                run_entry(entry, values, tape.device)
            if read.function(values[refs[0]]) != read.read:
                raise _refused(drawn)


def _refused(entry: Entry) -> UncuttableError:
    what = entry.name if entry.block is None else f"layer {entry.block}"
    return UncuttableError(
        f"the step draws random numbers other than dropout ({what} at {entry.line}): parts of a batch would draw "
        "others than the whole"
    )
