"""What runs have taught about a machine: factors on what is predicted of it.

A prediction is a sum of terms, each of them seconds ``r_t`` that follow from a profile and from measured layers. A
correction is a factor ``f_t`` on every term of one kind: the median of 1, which is what the profile says, and of what
the last runs measured over what was expected of it without a factor. So one odd run (another program on the machine)
moves a factor by half of what it is off, and after two that agree by nothing to speak of.

One run observes sums of terms. Each teaches of the term that most of it is, the others taken as this run has shown
them already, or else at their factors so far:

    (measured - sum_{u != t} f_u r_u) / r_t

within ``BOUNDS``: what is wrong by more than that is no matter of calibration. Where no term is half of the sum nothing
is learned.

They are kept as a JSON file beside the profile, for the machine, the number of its devices, the precision, the profile
that they correct and the version of the cost model: a profile that was measured again, or other rules of predicting,
make them void. A file that cannot be used is ignored with a sentence that says why, and replaced by the next run.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from lightning_mist.hardware.cluster import Cluster
from lightning_mist.hardware.profile.hardware_profile import Correction, HardwareProfile
from lightning_mist.hardware.profile.profile_files import decode, profile_key, profile_path, write_atomically

Term = Literal["forward", "backward", "communication", "update", "overhead"]
"""Kinds of terms: computation by direction, where layers were measured; all that ranks exchange; the optimizer's
step; and what the runtime's own Python takes."""

TERMS: tuple[Term, ...] = get_args(Term)

BOUNDS = (0.5, 2.0)
"""The least and the largest factor. The largest error of a predicted step in the record
``accuracy_amd-epyc-2-cores_202611.json`` is 19 %."""

RUNS = 9
"""The last runs that count: a machine that has changed is followed after five."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Measured seconds of a sum of terms.

    Attributes:
        expected: Uncorrected seconds by kind of term.
    """

    expected: tuple[tuple[Term, float], ...]
    seconds: float

    @property
    def main(self) -> Term | None:
        """The term that most of it is; None where none is half of it."""
        total = sum(seconds for _, seconds in self.expected)
        term, most = max(self.expected, key=lambda item: item[1], default=("overhead", 0.0))
        return term if most > 0 and 2 * most >= total and self.seconds > 0 else None


_ELSEWHERE = ("unit_seconds", "split_operator_seconds")
"""Overheads that predictions count in communication and in computation, whose factors they take."""


def factor_of(corrections: Iterable[Correction], term: Term) -> float:
    """The factor on terms of one kind; 1 without a correction."""
    return next((item.factor for item in corrections if item.term == term), 1.0)


def correction_of(term: str, ratios: Sequence[float]) -> Correction:
    """What runs have taught of a kind of terms: measured over expected in each, the last run last."""
    return Correction(term=term, factor=median((1.0, *ratios[-RUNS:])), ratios=tuple(ratios[-RUNS:]))


def corrected(profile: HardwareProfile, corrections: Sequence[Correction]) -> HardwareProfile:
    """A profile with corrections that runs have taught.

    Raises:
        ValueError: If it has corrections already.
    """
    if profile.corrections:
        raise ValueError(f"the profile has corrections already ({profile.source}): correct the profile as measured")
    if not corrections:
        return profile
    runs = max(len(item.ratios) for item in corrections)
    scale = factor_of(corrections, "overhead")
    before = profile.overheads
    names = [field.name for field in fields(before) if field.name not in _ELSEWHERE]
    return replace(
        profile,
        source=f"{profile.source}, corrected by {runs} {'run' if runs == 1 else 'runs'}",
        corrections=tuple(corrections),
        overheads=replace(before, **{name: scale * getattr(before, name) for name in names}),
    )


def learn(corrections: Sequence[Correction], observations: Sequence[Observation]) -> tuple[Correction, ...]:
    """Corrections after one more run; see the module's text.

    Args:
        observations: What is seen in few other terms comes before what is seen in many.

    Returns:
        One correction for every kind of term that any run taught of, in the order of :data:`TERMS`.
    """
    known = {item.term: item for item in corrections}
    shown = {term: factor_of(corrections, term) for term in TERMS}
    for term in dict.fromkeys(item.main for item in observations):
        if term is None:
            continue
        of_term = [item for item in observations if item.main == term]
        expected = [pair for item in of_term for pair in item.expected]
        others = sum(shown[other] * seconds for other, seconds in expected if other != term)
        own = sum(seconds for other, seconds in expected if other == term)
        ratio = (sum(item.seconds for item in of_term) - others) / own
        shown[term] = min(max(ratio, BOUNDS[0]), BOUNDS[1])
        known[term] = correction_of(term, (*(known[term].ratios if term in known else ()), shown[term]))
    return tuple(known[term] for term in TERMS if term in known)


SCHEMA = 2
"""Version of the file format; other versions are not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionStore:
    """Where the corrections of one machine in one precision are, and what they depend on."""

    path: Path
    key: tuple[tuple[str, str], ...]


def correction_store(directory: Path, cluster: Cluster, precision: str, profile: HardwareProfile) -> CorrectionStore:
    """Where corrections of a profile of the machine at hand are kept."""
    key = {
        **profile_key(cluster),
        "precision": precision,
        "profile": profile.source,
        "lightning-mist": version("lightning-mist"),
    }
    path = profile_path(directory, cluster, f"corrections-{precision}")
    return CorrectionStore(path=path, key=tuple(sorted(key.items())))


def save_corrections(store: CorrectionStore, corrections: Sequence[Correction]) -> None:
    """Keep corrections; readers see the old file or the new one, never half of one."""
    content = {
        "schema": SCHEMA,
        "key": dict(store.key),
        "corrections": [dataclasses.asdict(item) for item in corrections],
    }
    write_atomically(content, store.path)


def load_corrections(store: CorrectionStore) -> tuple[tuple[Correction, ...], str | None]:
    """The corrections in a file, if they hold for this machine and profile.

    Returns:
        The corrections, none if there are none that hold; and a sentence saying why a file that is there is not used,
        or None.
    """
    try:
        content = json.loads(store.path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return (), None
    except (OSError, ValueError, RecursionError) as error:  # the last for text nested beyond any corrections
        return (), f"corrections {store.path} cannot be read: {error}; they are ignored"
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else None
        return (), f"corrections {store.path} have schema {found!r}, schema {SCHEMA} is read: they are ignored"
    try:
        key, corrections = dict(content["key"]), tuple(_decode(item) for item in content["corrections"])
    except (KeyError, TypeError, ValueError) as error:
        return (), f"corrections {store.path} are not corrections of schema {SCHEMA}: {error!r}; they are ignored"
    differing = [name for name, value in store.key if key.get(name) != value]
    if differing:
        was, now = key.get(differing[0]), dict(store.key)[differing[0]]
        return (), f"corrections {store.path} were learned for {differing[0]} {was}, not {now}: they are ignored"
    return corrections, None


def _decode(data: dict[str, Any]) -> Correction:
    found: Correction = decode(Correction, data)
    if found.term not in TERMS:
        raise ValueError(f"no predictions have the term {found.term!r}")
    is_sane = 0 < len(found.ratios) <= RUNS and all(BOUNDS[0] <= ratio <= BOUNDS[1] for ratio in found.ratios)
    if not is_sane or found != correction_of(found.term, found.ratios):
        raise ValueError(f"a factor of {found.factor} from runs that measured {found.ratios} times as much")
    return found
