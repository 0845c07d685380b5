"""A search in a process of its own: what it takes from the first question on, and what it asks of memory.

The specification is made before, as ``lightning-mist plan`` makes it of a preset, and handed over; imports are done
before the clock starts. Memory is what the kernel says of the process (``VmRSS`` before, ``VmHWM`` after, in
/proc/self/status): its greatest resident size belongs to the process alone, unlike what ``getrusage`` says after a
fork.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

from lightning_mist.cli.cluster_input import oldest_capability
from lightning_mist.errors import InfeasibleError
from lightning_mist.hardware import parse_cluster
from lightning_mist.tuner import Planner, SearchSpace, degrees_to_try

if TYPE_CHECKING:
    from lightning_mist.model.presets.named_models import LanguageModelShape
    from lightning_mist.model.spec.model_spec import ModelSpec

PRECISION = "bf16-true"
NOTHING_FITS = "nothing fits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One plan that is asked for.

    Attributes:
        global_batch_size: Rows of the batch over all devices.
        memory_limit: Bytes of each device; by default the planner's own share of its memory.
    """

    global_batch_size: int
    memory_limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one question took and came to.

    Attributes:
        seconds: From the question to the plan.
        processor_seconds: What the process computed meanwhile, which others on the machine hardly change.
        peak_bytes: Greatest resident size of the process so far, imports included.
        status: The planner's; :data:`NOTHING_FITS` where there is no plan, of which the rest is not known.
        gap: The proven gap.
        candidates: Stage candidates that were priced for all questions so far.
        stages: Stages of the plan.
        step_seconds: Predicted seconds of the plan.
    """

    seconds: float
    processor_seconds: float
    peak_bytes: int
    status: str
    gap: float | None = None
    candidates: int | None = None
    stages: int | None = None
    step_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Replies to several questions to one planner, and what its process took of memory.

    Attributes:
        replies: One for each question.
        before_bytes: Resident size before the first question, imports included.
    """

    replies: tuple[Reply, ...]
    before_bytes: int


def spec_of(
    shape: "LanguageModelShape",
    name: str,
    cluster_text: str,
    *,
    rows: int,
    sequence_length: int,
    precision: str = PRECISION,
    master_weights: bool = False,
) -> "ModelSpec":
    """The network as ``lightning-mist plan`` describes it, split over all degrees that the cluster allows.

    What this imports is not needed for searching, so the process that searches does not import it here.

    Args:
        shape: Its sizes, a preset's or ones like them.
        name: For people.
        cluster_text: In words.
        rows: Rows of each device's batch.
        sequence_length: Tokens per row.
        precision: Lightning's name of it.
        master_weights: Whether weights in 16 bits have masters in 32.

    Raises:
        ValueError: If networks of its family would have to be traced for such devices.
    """
    from lightning_mist.model import with_master_weights
    from lightning_mist.model.presets.specs import KNOWN_OPTIMIZERS, preset_spec

    cluster = parse_cluster(cluster_text)
    capability = oldest_capability(cluster)
    degrees = {degree for part in cluster.parts for degree in degrees_to_try(SearchSpace(), part.devices_per_node)}
    found = preset_spec(
        shape,
        name=name,
        precision=precision,
        rows=rows,
        length=sequence_length,
        degrees=tuple(sorted(degrees)),
        optimizer=KNOWN_OPTIMIZERS["AdamW"],
        device_kind=cluster.kind,
        capability=capability,
    )
    if found is None:
        devices = " and ".join(part.device.name for part in cluster.parts)
        raise ValueError(f"{name} was never traced in {precision} for {devices}: choose another")
    return with_master_weights(found) if master_weights else found


def ask_apart(
    spec: "ModelSpec", cluster_text: str, questions: tuple[Question, ...], search: SearchSpace | None = None
) -> Session:
    """Put questions to a new planner, one after another, in a new process."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_ask, spec, cluster_text, questions, search or SearchSpace()).result()


def _ask(spec: "ModelSpec", cluster_text: str, questions: tuple[Question, ...], search: SearchSpace) -> Session:
    cluster = parse_cluster(cluster_text)
    before, replies, planner = _memory("VmRSS"), [], None
    for question in questions:
        started, computed = perf_counter(), process_time()
        planner = planner or Planner(spec, cluster)
        known: dict[str, Any] = {"status": NOTHING_FITS}
        with suppress(InfeasibleError):
            found = planner.tune(
                global_batch_size=question.global_batch_size, memory_limit=question.memory_limit, search=search
            )
            known = {
                "status": found.status,
                "gap": found.gap,
                "candidates": found.stats.candidates,
                "stages": found.plan.num_stages,
                "step_seconds": found.predicted.step_seconds,
            }
        replies.append(
            Reply(
                seconds=perf_counter() - started,
                processor_seconds=process_time() - computed,
                peak_bytes=_memory("VmHWM"),
                **known,
            )
        )
    return Session(replies=tuple(replies), before_bytes=before)


def _memory(name: str) -> int:
    """A line of /proc/self/status, which is in KiB, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024
