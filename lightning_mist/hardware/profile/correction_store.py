"""Corrections of a machine's profile as a JSON file beside it.

They hold for the machine, the number of its devices, the precision, the profile that they correct and the version of
the cost model: a profile that was measured again, or other rules of predicting, make them void. A file that cannot be
used is ignored with a sentence that says why, and replaced by the next run.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_mist.hardware.cluster import Cluster
from lightning_mist.hardware.profile.corrections import BOUNDS, PRIOR_SPREAD, TERMS
from lightning_mist.hardware.profile.hardware_profile import Correction, HardwareProfile
from lightning_mist.hardware.profile.profile_files import profile_key, profile_path, write_atomically

SCHEMA = 1
"""Version of the file format; other versions are not read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionStore:
    """Where the corrections of one machine in one precision are, and what they depend on.

    Attributes:
        key: What they depend on, as text by name.
    """

    path: Path
    key: tuple[tuple[str, str], ...]


def correction_store(directory: Path, cluster: Cluster, precision: str, profile: HardwareProfile) -> CorrectionStore:
    """Where corrections of a profile of the machine at hand are kept.

    Args:
        directory: The cache directory of profiles.
    """
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
    """Read what is kept.

    Returns:
        The corrections, none if there are none that hold; and a sentence saying why a file that is there is not used,
        or None.
    """
    try:
        content = json.loads(store.path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return (), None
    except (OSError, ValueError) as error:
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
    found = Correction(
        term=str(data["term"]),
        factor=float(data["factor"]),
        spread=float(data["spread"]),
        samples=int(data["samples"]),
    )
    if found.term not in TERMS:
        raise ValueError(f"no predictions have the term {found.term!r}")
    if not BOUNDS[0] <= found.factor <= BOUNDS[1] or not 0 < found.spread <= PRIOR_SPREAD or found.samples < 1:
        raise ValueError(f"a factor of {found.factor} ± {found.spread} from {found.samples} runs")
    return found
