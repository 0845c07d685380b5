"""One rank of uses under DDP or a plan; what it saw goes into files."""

import logging
import pickle
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.uses.session import Session, Use
from lightning_mist import Plan
from lightning_mist.errors import MistError
from lightning_mist.runtime.communication import failure


def run(uses: Sequence[Use], plan: Plan | str | None, folder: Path) -> None:
    """Do uses one after the other, and write what this rank kept of each, or what went wrong."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    failure.GRACE_SECONDS = 5.0
    for number, use in enumerate(uses):
        pl.seed_everything(3, verbose=False)
        session = Session(plan, folder / f"{number}")
        try:
            use.run(session)
            session.keep_files()
            found: dict[str, Any] = {"seen": session.seen}
        except BaseException as error:
            found = {
                "error": f"{type(error).__name__}: {error}",
                "is_ours": isinstance(error, MistError),
                "has_begun": session.has_begun,
                "traceback": traceback.format_exc()[-3000:],
            }
            raise
        finally:
            path = path_of(folder, number, session.rank)
            path.with_suffix(".part").write_bytes(pickle.dumps(found))
            path.with_suffix(".part").rename(path)


def path_of(folder: Path, number: int, rank: int) -> Path:
    """Where a rank writes what it kept of a use."""
    return folder / f"{number}.rank{rank}.pickle"


def read(folder: Path, number: int, rank: int) -> Any:
    """What a rank kept of a use; None if it ended without a word."""
    path = path_of(folder, number, rank)
    return pickle.loads(path.read_bytes()) if path.exists() else None
