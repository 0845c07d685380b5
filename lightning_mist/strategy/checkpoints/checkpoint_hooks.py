"""What Lightning asks a strategy for when it saves and loads checkpoints."""

import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_mist.errors import CheckpointError
from lightning_mist.leaves import put_together
from lightning_mist.model.initialization import load_hollow
from lightning_mist.strategy import empty_parameters
from lightning_mist.strategy.checkpoints.atomic import discard, save_file
from lightning_mist.strategy.given_arguments import refuse_unknown
from lightning_mist.strategy.plan_installation import PlanInstallation
from lightning_mist.strategy.training import module_state

if TYPE_CHECKING:  # what DCP is needed for is imported there: programs without directories start sooner
    from lightning_mist.strategy.checkpoints.directory import DirectoryWriter


class Checkpoints(PlanInstallation):
    """The part of a strategy that saves and loads: as plain data parallelism does or in directories, under any plan."""

    _states_afterwards: Sequence[Callable[[], dict[str, Any]]] = ()  # of all optimizers, when a fit is over
    _saves_directories = False
    _saves_asynchronously = False
    _pending: tuple[Future[Any], Path] | None = None  # what is being written while training goes on
    _superseded: tuple[Any, ...] = ()  # what may go when that is there
    _writers: Any = None  # the process group of ranks that write while training goes on

    # Saving ------------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None, **more: Any) -> None:
        """Write a checkpoint so that its name never stands for a part of it."""
        if self._saves_directories:
            if storage_options is not None:
                raise TypeError(
                    f"storage_options={storage_options!r} with save_distributed_checkpoint=True: directories are not "
                    "written by the CheckpointIO that takes them; leave them out, or save single files"
                )
            refuse_unknown(more)
            self.refuse_without_the_others("a checkpoint directory")
            path = self.broadcast(filepath)  # names hold metrics, which may differ between ranks
            if _is_remote(path):
                raise ValueError(
                    f"{path} with save_distributed_checkpoint=True: directories are written to folders that every rank "
                    "sees; give such a path, or save single files"
                )
            self._save_directory(checkpoint, Path(path))
        elif not self._writes_itself or storage_options is not None or more or _is_remote(filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options, **more)
        elif self.is_global_zero:
            save_file(checkpoint, Path(filepath))

    def _save_directory(self, checkpoint: dict[str, Any], path: Path) -> None:
        from lightning_mist.strategy.checkpoints.directory import DirectoryWriter, states_of
        from lightning_mist.strategy.checkpoints.shards import copied

        self.finish_saving()
        states, meta = states_of(checkpoint)
        writer = DirectoryWriter(path, meta)
        with self.all_take_part():
            if self._saves_asynchronously and self._is_fitting:
                if self._writers is None:
                    self._writers = dist.new_group(backend="gloo", timeout=self._timeout)
                # As DCP's async_save; what a thread of torch's own says to other ranks is taken for the step's.
                executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
                self._pending = executor.submit(_save, copied(states), writer, self._writers), path
                executor.shutdown(wait=False)
                return
            with _writing(path):
                _save(states, writer, None)

    @property
    def _is_fitting(self) -> bool:
        """Whether a fit goes on, at whose end what is still being written is waited for."""
        state = None if self._trainer is None else self._trainer.state
        return state is not None and state.fn == self._names.fitting and state.status.value == "running"

    def finish_saving(self) -> None:
        """Wait for what is written while training goes on, and raise what went wrong there."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with _writing(pending[1]):
            pending[0].result()
        superseded, self._superseded = self._superseded, ()
        for path in superseded:
            self.remove_checkpoint(path)

    def end_saving(self) -> None:
        """At the end of a fit: wait for what is being written, and let go of what ranks write through."""
        self.finish_saving()
        group, self._writers = self._writers, None
        if group is not None:
            dist.destroy_process_group(group)

    def remove_checkpoint(self, filepath: Any, **more: Any) -> None:
        """Remove a checkpoint, all of it at once; not before the one that is being written is there."""
        if self._pending is not None:
            self._superseded += (filepath,)
        elif not (self._writes_itself or self._saves_directories) or more or _is_remote(filepath):
            super().remove_checkpoint(filepath, **more)
        elif self.is_global_zero:
            discard(Path(filepath))

    @property
    def _writes_itself(self) -> bool:
        """Whether checkpoints are Lightning's usual files, and not what a user's plugin makes of them."""
        return type(self.checkpoint_io).__name__ == "TorchCheckpointIO"

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All weights in DDP's layout; complete on global rank 0, or for a directory what each rank writes."""
        if self._engine is not None:
            self.refuse_without_the_others("a checkpoint")
        elif self.global_rank > 0 and empty_parameters.has_empty_parameters(self._module):
            return {}
        if self._saves_directories:
            from lightning_mist.strategy.checkpoints.shards import model_shards

            with self.all_take_part():
                return model_shards(self._module, self._engine, is_first=self.global_rank == 0)
        if self._engine is None:
            return super().lightning_module_state_dict()
        with self.all_take_part():
            return module_state(self._module, self._engine)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """All optimizer state in DDP's layout; complete on global rank 0, or for a directory what each rank writes."""
        from lightning_mist.strategy.checkpoints.shards import named_state, names_in_order, optimizer_shards

        if self._engine is not None and self._outside is None:
            self.refuse_without_the_others("a checkpoint")
            with self.all_take_part():
                if self._saves_directories:
                    return optimizer_shards(self._engine, optimizer, is_first=self.global_rank == 0)
                return self._engine.optimizer_state(optimizer)
        asked = self._states_afterwards
        place = next((index for index, item in enumerate(self.optimizers) if item is optimizer), 0)
        state = asked[place]() if asked else super().optimizer_state(optimizer)
        if not self._saves_directories:
            return state
        return named_state(state, names_in_order(optimizer, self._module))

    # Loading -----------------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None, **more: Any) -> dict[str, Any]:
        """Read a checkpoint; for a module without values its tensors stay in a file until they are needed."""
        from lightning_mist.strategy.checkpoints.directory import check_content, read_directory, reading

        self.finish_saving()
        if not (self._writes_itself or self._saves_directories) or _is_remote(checkpoint_path):
            return self._load_file(checkpoint_path, weights_only, **more)
        refuse_unknown(more, "state")  # which may be filled in place: what is returned counts
        module, path = self.lightning_module, Path(checkpoint_path)
        content: dict[str, Any]
        if path.is_dir():
            return read_directory(path, weights_only)
        with reading(path):
            is_empty = module is not None and empty_parameters.has_empty_parameters(module)
            if is_empty and zipfile.is_zipfile(path):  # which torch's older files are not
                content = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            else:
                content = self._load_file(path, weights_only, **more)
        check_content(path, content)
        return content

    def _load_file(self, path: Any, weights_only: bool | None, **more: Any) -> dict[str, Any]:
        given = () if weights_only is None else (weights_only,)  # which Lightning knows since 2.6
        try:
            return super().load_checkpoint(path, *given, **more)
        except RuntimeError as error:
            # Lightning says where tensors go by a function, and torch wants a name for those of classes of their own.
            if _is_remote(path) or "Callable map_location" not in str(error):
                raise
            content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only)
            return content

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True, **more: Any) -> None:
        """Take weights in DDP's layout, also while training (the learning-rate finder does), on every rank at once."""
        module, engine = self._module, self._engine
        try:
            if engine is None and empty_parameters.has_empty_parameters(module):
                refuse_unknown(more)
                load_hollow(module, checkpoint["state_dict"], strict=strict)
            elif engine is None or engine.is_filled:
                super().load_model_state_dict(checkpoint, strict, **more)
            else:
                engine.fill()
                super().load_model_state_dict(checkpoint, strict, **more)
                engine.hollow()
        except RuntimeError as error:
            if not str(error).startswith("Error(s) in loading state_dict"):
                raise
            raise CheckpointError(
                f"the checkpoint is not one of this module. {error}\nBuild the module with the sizes that it was saved "
                "with; what only one of both has is left out with strict_loading = False on the module"
            ) from error

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Take this rank's part of optimizer state in DDP's layout, or of what is in a directory."""
        from lightning_mist.strategy.checkpoints.shards import saved_parts

        engine, states = self._engine, []
        for state, optimizer in zip(checkpoint["optimizer_states"], self.optimizers, strict=False):
            wanted = None if engine is None else partial(saved_parts, engine.owned(optimizer).cut)
            # What a directory has taken apart is so, too, in a file that was made of it.
            states.append(put_together(state(wanted) if callable(state) else state))
        if engine is None:
            super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
            return
        for state, optimizer in zip(states, self.optimizers, strict=False):
            engine.load_optimizer_state(state, optimizer)


def _is_remote(path: Any) -> bool:
    """Whether a path is a URL, which is Lightning's to write to."""
    return "://" in str(path)


def _save(states: dict[str, Any], writer: "DirectoryWriter", group: Any | None) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    from lightning_mist.strategy.checkpoints.directory import SavePlanner

    save(states, storage_writer=writer, planner=SavePlanner(), process_group=group)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:  # derives from BaseException, and is raised on every rank
        failures = [f"rank {rank}: {type(item[0]).__name__}: {item[0]}" for rank, item in error.failures.items()]
        raise CheckpointError(
            f"{path} was not written: {'; '.join(failures)}. Every rank writes into the folder: all must see it, with "
            "room for the checkpoint before it and the new one; a checkpoint that was there under this name still is"
        ) from error
