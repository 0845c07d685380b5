"""What runs have taught about a machine: factors on what is predicted of it.

A prediction is a sum of terms, each of them seconds ``r_t`` that follow from a profile and from measured layers. A
correction is a factor ``f_t`` on every term of one kind, believed within a standard deviation ``s_t``. Before anything
ran, ``f_t = 1`` and ``s_t = PRIOR_SPREAD``. One run observes sums of terms: seconds ``m`` where ``sum_t f_t r_t`` was
expected, with relative standard deviation ``e`` between its own steps and stages. Runs of one plan differ too, so

    s_t   := min(PRIOR_SPREAD, sqrt(s_t^2 + DRIFT^2))     once per run: machines change
    p      = sum_t f_t r_t                                what is predicted
    S      = sum_t s_t^2 r_t^2 + p^2 (BETWEEN_RUNS^2 + e^2)
    g_t    = s_t^2 r_t / S
    f_t   := f_t + g_t clip(m - p, -SURPRISE sqrt(S), SURPRISE sqrt(S))
    s_t^2 := (1 - g_t r_t) s_t^2                          if nothing was clipped
    s_t   := min(PRIOR_SPREAD, s_t + |change of f_t|)     if it was

which is a Kalman filter that forgets how the errors of different terms are related, with Huber's bound on what one
observation may do. What matters of it:

* The prediction moves towards the measurement by the share ``sum_t g_t r_t < 1`` and never beyond it, so repeated
  predicting, measuring and correcting approaches a constant truth from one side. (Observations of one run that share
  terms pull at each other, by less the more is known.)
* What is only observed in sums is only known in sums: predictions become right, not every factor by itself.
* Terms that make up more of the sum, and those that are less certain, take more of the difference.
* The wider a run's steps scatter, the less it moves anything; factors start from 1 and stay near it until runs agree.
* After many runs a single one still moves a factor by ``DRIFT / BETWEEN_RUNS`` of the difference, about.
* A run that was disturbed (another program on the machine while layers were timed, or while it trained) moves factors
  by no more than one that differs by ``SURPRISE`` standard deviations, however odd its seconds are. It also makes them
  less certain, so that the next runs, if they agree with it, move them faster.

Factors stay within ``BOUNDS``: what is wrong by more than that is no matter of calibration.

They are kept as a JSON file beside the profile, for the machine, the number of its devices, the precision, the profile
that they correct and the version of the cost model: a profile that was measured again, or other rules of predicting,
make them void. A file that cannot be used is ignored with a sentence that says why, and replaced by the next run.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
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

PRIOR_SPREAD = 0.2
"""Standard deviation of factors before anything ran: the largest error of a predicted step in that record, rounded."""

BETWEEN_RUNS = 0.05
"""Relative standard deviation between runs of the same. Whole steps of one computation differ by 3.3 % (root mean
square over the pairs of ``throughput-against-ddp_amd-epyc-2-cores_202611.json``), and a term by more than the step."""

SURPRISE = 2.0
"""Standard deviations from which on an observation is as good as any farther away. Of those that scatter as expected
one in twenty lies beyond."""

DRIFT = 0.01
"""How far a factor is taken to move from one run to the next: a fifth of what runs differ by, so that in the end the
last ten runs or so count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Measured seconds of a sum of terms.

    Attributes:
        expected: Uncorrected seconds by kind of term.
        spread: Relative standard deviation of the measurement, from its own samples.
    """

    expected: tuple[tuple[Term, float], ...]
    seconds: float
    spread: float


_ELSEWHERE = ("unit_seconds", "split_operator_seconds")
"""Overheads that predictions count in communication and in computation, whose factors they take."""


def factor_of(corrections: Iterable[Correction], term: Term) -> float:
    """The factor on terms of one kind; 1 without a correction."""
    return next((item.factor for item in corrections if item.term == term), 1.0)


def corrected(profile: HardwareProfile, corrections: Sequence[Correction]) -> HardwareProfile:
    """A profile with corrections that runs have taught.

    Raises:
        ValueError: If it has corrections already.
    """
    if profile.corrections:
        raise ValueError(f"the profile has corrections already ({profile.source}): correct the profile as measured")
    if not corrections:
        return profile
    runs = max(item.samples for item in corrections)
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

    Returns:
        One correction for every kind of term that any run observed, in the order of :data:`TERMS`.
    """
    known: dict[str, Correction] = {item.term: item for item in corrections}
    usable = [item for item in observations if _total(item) > 0 < item.seconds]
    seen = {term for item in usable for term, seconds in item.expected if seconds > 0}
    for term in seen:
        before = known.get(term, Correction(term=term, factor=1.0, spread=PRIOR_SPREAD, samples=0))
        spread = min(PRIOR_SPREAD, (before.spread**2 + DRIFT**2) ** 0.5)
        known[term] = replace(before, spread=spread, samples=before.samples + 1)
    for item in usable:
        _update(known, item)
    return tuple(known[term] for term in TERMS if term in known)


def _total(observation: Observation) -> float:
    return sum(seconds for _, seconds in observation.expected)


def _update(known: dict[str, Correction], observation: Observation) -> None:
    """One step of a scalar Kalman filter for every term, with innovation clipping (Huber); see the module's text."""
    raw: Mapping[str, float] = {term: seconds for term, seconds in observation.expected if seconds > 0}
    predicted = sum(known[term].factor * seconds for term, seconds in raw.items())
    noise = predicted**2 * (BETWEEN_RUNS**2 + observation.spread**2)
    variance = sum((known[term].spread * seconds) ** 2 for term, seconds in raw.items()) + noise
    most = SURPRISE * variance**0.5
    difference = min(max(observation.seconds - predicted, -most), most)
    for term, seconds in raw.items():
        before = known[term]
        gain = before.spread**2 * seconds / variance
        factor = min(max(before.factor + gain * difference, BOUNDS[0]), BOUNDS[1])
        if abs(difference) < most:
            spread = before.spread * (1.0 - gain * seconds) ** 0.5
        else:
            spread = min(PRIOR_SPREAD, before.spread + gain * most)
        known[term] = replace(before, factor=factor, spread=spread)


SCHEMA = 1
"""Version of the file format; other versions are not read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionStore:
    """Where the corrections of one machine in one precision are, and what they depend on."""

    path: Path
    key: tuple[tuple[str, str], ...]


def correction_store(directory: Path, cluster: Cluster, precision: str, profile: HardwareProfile) -> CorrectionStore:
    """Where corrections of a profile of the machine at hand are kept."""
    name = profile_path(directory, cluster).name.replace("profile-", f"corrections-{_plain(precision)}-", 1)
    key = {
        **profile_key(cluster),
        "precision": precision,
        "profile": profile.source,
        "lightning-mist": version("lightning-mist"),
    }
    return CorrectionStore(path=directory / name, key=tuple(sorted(key.items())))


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text)


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
    if not BOUNDS[0] <= found.factor <= BOUNDS[1] or not 0 < found.spread <= PRIOR_SPREAD or found.samples < 1:
        raise ValueError(f"a factor of {found.factor} ± {found.spread} from {found.samples} runs")
    return found
