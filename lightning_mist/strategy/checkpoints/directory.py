"""Checkpoints that are directories: written by all ranks and read by any number of others, with DCP.

As Lightning's own sharded directories they hold ``model`` and ``optimizer_0``, ... in the format of
``torch.distributed.checkpoint`` (DCP), optimizer state by the names of parameters, and everything else in ``meta.pt``.
"""

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict  # as DCP's own tools read it
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from lightning_mist.errors import CheckpointError, MistError
from lightning_mist.runtime.parameters import AnyPart
from lightning_mist.strategy.checkpoints.atomic import META, partial_path, publish, refuse_folder, remove, sync_folder
from lightning_mist.strategy.checkpoints.shards import Shards
from lightning_mist.without_values import fake_mode

_INDEX = ".metadata"
_MODEL, _OPTIMIZER = ("model", "state_dict"), "optimizer_"  # Lightning has either


def states_of(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of a checkpoint its ranks write, and what rank 0 writes beside it."""
    states = {_MODEL[0]: checkpoint["state_dict"]}
    states |= {f"{_OPTIMIZER}{index}": state for index, state in enumerate(checkpoint.get("optimizer_states", ()))}
    return states, {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Inside, whatever goes wrong while something is read is said of it; but not that torch will not unpickle it.

    Raises:
        CheckpointError: If what is there is not a checkpoint, or damaged.
    """
    try:
        yield
    except (MistError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError) and (path.is_dir() or zipfile.is_zipfile(path)):
            raise  # weights_only, of which torch says what to do
        said = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])[:200]
        raise CheckpointError(
            f"{path} could not be read as a checkpoint ({said}): "
            "it was cut short or damaged, or is something else. Use an earlier checkpoint, or copy it again"
        ) from error


def check_content(path: Path, content: Any) -> None:
    """Raise :class:`CheckpointError` if what was read is no checkpoint of Lightning."""
    keys = list(content) if isinstance(content, Mapping) else []
    missing = [key for key in ("state_dict", "pytorch-lightning_version") if key not in keys]
    if missing:
        found = f"the keys {keys[:5]}" if keys else f"a {type(content).__name__}"
        raise CheckpointError(
            f"{path} has no {' and no '.join(missing)} but {found}: ckpt_path takes what trainer.save_checkpoint or "
            "ModelCheckpoint wrote. Load weights alone with module.load_state_dict before fit"
        )


class DirectoryWriter(FileSystemWriter):
    """Writes a directory that takes its name when all ranks have written their files, rank 0 ``meta`` too."""

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        super().__init__(partial_path(path))
        self.final, buffer = path, io.BytesIO()
        torch.save(meta, buffer)  # now: it is not to change while the rest is written
        self._meta = buffer.getvalue()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the folder to rank 0."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, before anybody writes: make the folder anew."""
        refuse_folder(self.final)
        remove(Path(self.path))
        Path(self.path).mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all have written: complete the directory and give it its name."""
        folder = Path(self.path)
        with open(folder / META, "xb") as file:
            file.write(self._meta)
            file.flush()
            os.fsync(file.fileno())
        super().finish(metadata, results)
        sync_folder(folder)
        publish(folder, self.final)


class SavePlanner(DefaultSavePlanner):
    """DCP's, which finds pieces of tensors, too."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is to be written."""
        value = self.state_dict[index.fqn]
        return value.piece(index) if isinstance(value, Shards) else super().lookup_object(index)


class _Planner(DefaultLoadPlanner):
    """Unpickles what is no tensor as ``torch.load`` does with the ``weights_only`` that was asked for."""

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take what is to be filled as it is: DCP's own planner drops what it does not know."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """What is to be filled."""
        value = self.state_dict[index.fqn]
        return value.piece(index) if isinstance(value, Shards) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take one object."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=self._weights_only)


class StoredDirectory:
    """A checkpoint directory whose tensors stay there until they are read.

    Raises:
        FileNotFoundError: If there is no such directory.
        CheckpointError: If it is no checkpoint, or not a whole one.
    """

    def __init__(self, path: Path, weights_only: bool | None) -> None:
        self.path, self._weights_only = path, weights_only
        missing = [name for name in (META, _INDEX) if not (path / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{path} has no {' and no '.join(missing)}: a checkpoint directory has {META} and {_INDEX}, which are "
                "written last. Give what trainer.save_checkpoint or ModelCheckpoint wrote, or copy it again"
            )
        self._reader = FileSystemReader(path)
        with reading(path / _INDEX):
            self._index: Metadata = self._reader.read_metadata()
            self._stored: dict[str, Any] = self._index.state_dict_metadata
            # What no rank has written has a path there, too.
            self._paths = {key: path for key, path in self._index.planner_data.items() if key in self._stored}
            self._check_files()
        if not any(path[0] in _MODEL for path in self._paths.values()):
            raise CheckpointError(
                f"{path} holds {sorted({path[0] for path in self._paths.values()})}: a checkpoint directory holds "
                f"{_MODEL[0]}. Give one that trainer.save_checkpoint or ModelCheckpoint wrote"
            )

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for place in self._index.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in sorted(ends.items()):
            file = self.path / name
            size = file.stat().st_size if file.is_file() else None
            if size is None or size < end:
                state = "is missing" if size is None else f"has {size:,} bytes"
                raise CheckpointError(
                    f"{file} {state}: {_INDEX} says that {end:,} bytes of the checkpoint are there. Copy the whole "
                    "directory to where every rank can read it, or use an earlier checkpoint"
                )

    @property
    def num_optimizers(self) -> int:
        """How many optimizers' state it holds."""
        return len({path[0] for path in self._paths.values() if path[0].startswith(_OPTIMIZER)})

    def meta(self) -> dict[str, Any]:
        """Everything but weights and optimizer state."""
        with reading(self.path / META):
            content: dict[str, Any] = torch.load(self.path / META, map_location="cpu", weights_only=self._weights_only)
        return content

    def model(self) -> dict[str, Any]:
        """All weights: those that are stored in one piece stay there until they are read, others in host memory."""
        keys = [key for key, path in self._paths.items() if path[0] in _MODEL]
        with reading(self.path):
            mapped = {key: _mapped(self.path, self._reader, self._index, key) for key in keys}
        there = {key: value for key, value in mapped.items() if value is not None}
        (state,) = self._read(keys, there=there).values()
        return dict(state)

    def optimizer(
        self, index: int, wanted: Callable[[list[Any]], Mapping[str, AnyPart | None]] | None = None
    ) -> dict[str, Any]:
        """State of one optimizer, in host memory.

        Args:
            wanted: Says for the saved groups of which parameters the state is to be read, by the names that they were
                saved under, and of which only a part; ``None`` for everything.
        """
        name = f"{_OPTIMIZER}{index}"
        own = {key: path for key, path in self._paths.items() if path[0] == name}
        found = self._read(key for key, path in own.items() if path[1] != "state")[name]
        every = {path[2]: None for path in own.values() if path[1] == "state"}
        parts = every if wanted is None else wanted(found["param_groups"])
        keys = [key for key, path in own.items() if path[1] == "state" and path[2] in parts]
        state = self._read(keys, {key: parts[own[key][2]] for key in keys}).get(name, {}).get("state", {})
        return {**found, "state": state}

    def _read(
        self,
        keys: Iterable[str],
        parts: Mapping[str, AnyPart | None] | None = None,
        there: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What is stored under some keys, nested as it was saved, if not ``there``; of parts what this rank has."""
        found: dict[str, Any] = dict(there or {})
        asked: dict[str, Any] = {}
        for key in (keys := list(keys)):
            if key in found:
                continue
            stored, part = self._stored[key], (parts or {}).get(key)
            if isinstance(stored, BytesStorageMetadata):
                asked[key] = None
                continue
            assert isinstance(stored, TensorStorageMetadata)
            is_part = part is not None and tuple(stored.size) == part.shape
            shape = part.local_shape if part is not None and is_part else stored.size
            found[key] = torch.empty(shape, dtype=stored.properties.dtype)
            asked[key] = Shards.of_part(found[key], part) if part is not None and is_part else found[key]
        planner = _Planner(self._weights_only)
        with reading(self.path):
            planner.set_up_planner(asked, self._index, True)
            self._reader.set_up_storage_reader(self._index, True)
            plan: LoadPlan = self._reader.prepare_local_plan(planner.create_local_plan())
            (plan,) = self._reader.prepare_global_plan(planner.create_global_plan([plan]))
            self._reader.read_data(planner.finish_plan(plan), planner).wait()
        read = {**asked, **found}
        whole: dict[str, Any] = unflatten_state_dict({key: read[key] for key in keys}, self._paths)
        return whole


def _mapped(path: Path, reader: FileSystemReader, index: Metadata, key: str) -> Tensor | None:
    """A tensor whose pages are read when they are needed, as ``torch.load(mmap=True)`` has them.

    DCP stores each piece of a tensor as an archive of ``torch.save``, one after another in a file. Under fake tensors
    ``torch.load`` says where in it the values are. Archives begin at any byte, so that values may lie across the
    boundaries of their type, which x86 and ARM read as well.

    Returns:
        The tensor; ``None`` if it is stored in several pieces or is none, or where this torch does not say where its
        values are.
    """
    stored = index.state_dict_metadata[key]
    if not isinstance(stored, TensorStorageMetadata) or len(stored.chunks) != 1:
        return None
    place = index.storage_data[MetadataIndex(key, stored.chunks[0].offsets)]
    if place.transform_descriptors:
        return None
    file = path / place.relative_path
    with open(file, "rb") as stream, fake_mode():
        fake: Tensor = torch.load(reader._slice_file(stream, place), map_location="cpu", weights_only=True)
    offset: int | None = getattr(fake.untyped_storage(), "_checkpoint_offset", None)
    if offset is None or not fake.numel() or fake.shape != stored.size:
        return None
    # Not what its storage says, which torch 2.8 multiplies by the size of an entry once too often.
    last = fake.storage_offset() + sum((n - 1) * step for n, step in zip(fake.size(), fake.stride(), strict=True))
    length = int(last + 1) * fake.element_size()
    # Copy on write: who changes a loaded checkpoint does not change the file.
    values = np.memmap(file, dtype=np.uint8, mode="c", offset=place.offset + offset, shape=(length,))
    flat = torch.from_numpy(values).view(fake.dtype)
    return flat.as_strided(fake.size(), fake.stride(), fake.storage_offset())


def read_directory(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """A checkpoint as a file would have it, but for optimizer state: what reads it, see `StoredDirectory.optimizer`."""
    directory = StoredDirectory(path, weights_only)
    states = [partial(directory.optimizer, index) for index in range(directory.num_optimizers)]
    content = {**directory.meta(), "state_dict": directory.model(), **({"optimizer_states": states} if states else {})}
    check_content(path, content)
    return content
