"""``MistStrategy``: what Lightning talks to."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from lightning_mist.attributes import replaced
from lightning_mist.errors import PlanError
from lightning_mist.hardware import Cluster
from lightning_mist.plan import Plan, SearchSpace
from lightning_mist.runtime.communication import complete
from lightning_mist.strategy import empty_parameters
from lightning_mist.strategy.checkpoints import Checkpoints
from lightning_mist.strategy.empty_parameters import check_master_weights, take_masters
from lightning_mist.strategy.given_arguments import DEFAULT_TIMEOUT
from lightning_mist.strategy.memory_retry import FirstSteps
from lightning_mist.strategy.plan_evaluation import PlanEvaluation
from lightning_mist.strategy.planning import MANUAL, OFFERED, PlanRequest, step_of_fit, whole_module_reason
from lightning_mist.strategy.ranks import ActingRank
from lightning_mist.strategy.run_report import FORWARD
from lightning_mist.strategy.training import (
    EndsTogether,
    ManualEngine,
    Preemption,
    attach_engine,
    gradients_are_about_to_go,
    replay,
)


class SharedLoaders(EndsTogether):
    """Mixed into a strategy: equal groups of neighbouring ranks load the same samples, and look to Lightning as one.

    With ``data_parallel_size`` there are fewer data loaders than ranks. Loaders, reductions of logged values and
    gathered tensors are those of data parallelism over as many ranks as there are loaders; which process this is, and
    how many there are, is what it is: one of them prints and saves.
    """

    _request: PlanRequest
    _one_of_each: Any = None  # the process group with this rank's place in every group of ranks
    _counts_all = False
    _fitting: ExitStack

    @property
    def num_loaders(self) -> int | None:
        """How many distinct batches are loaded at once; None if every rank loads its own.

        Raises:
            PlanError: If the ranks do not come in as many equal groups.
        """
        loaders, world = self._request.loaders, self.world_size
        if loaders is not None and (loaders < 1 or world % loaders):
            raise PlanError(
                f"data_parallel_size = {loaders} on {world} processes: equal groups of them load the same samples, so "
                f"it must divide {world}; leave it out if each loads its own"
            )
        return None if loaders == world else loaders

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What a ``DistributedSampler`` is to be made with: the number of loaders, and which this rank's is."""
        loaders = self.num_loaders
        if loaders is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": loaders, "rank": self.global_rank * loaders // self.world_size}

    def begin_sharing(self, module: nn.Module) -> None:
        """Make the groups that are reduced over, and let a module's metrics use them in a fit; on all ranks at once."""
        if self.num_loaders is None:
            return
        if self._one_of_each is None:
            size = self.world_size // self.num_loaders
            for place in range(size):
                group = dist.new_group(list(range(place, self.world_size, size)), timeout=self._timeout)
                if self.global_rank % size == place:
                    self._one_of_each = group
        known = getattr(sys.modules.get("torchmetrics"), "Metric", ())
        for item in module.modules():
            if isinstance(item, known) and item.process_group is None:
                self._fitting.enter_context(replaced(item, process_group=self._one_of_each))

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean", **more: Any) -> Any:
        """Reduce over one rank of each loader; has the arguments of Lightning's."""
        if self._is_failing:
            self.refuse_without_the_others("reducing a value over all ranks")
        return super().reduce(tensor, self._among(group), reduce_op, **more)

    def all_gather(self, tensor: Any, group: Any | None = None, sync_grads: bool = False, **more: Any) -> Any:
        """Gather from one rank of each loader; has the arguments of Lightning's."""
        if self._is_failing:
            self.refuse_without_the_others("gathering a value from all ranks")
        return super().all_gather(tensor, self._among(group), sync_grads, **more)

    def reduce_boolean_decision(self, decision: bool, all: bool = True, **more: Any) -> bool:
        """Whether all ranks, or any, decided so."""
        with replaced(self, _counts_all=True):
            return super().reduce_boolean_decision(decision, all, **more)

    def _among(self, group: Any | None) -> Any | None:
        is_everybody = group is None or group is dist.group.WORLD
        return self._one_of_each if is_everybody and not self._counts_all and self._one_of_each is not None else group


class MistBase(ActingRank, SharedLoaders, Preemption, Checkpoints, PlanEvaluation):
    """Trains as DDP would, on a plan that fits and is fast.

    At the first ``fit`` it profiles the model and the machine and chooses a plan: pipeline stages, data and tensor
    parallelism, sharding, activation checkpointing and offloading, all together. The plan trains your module as it is.
    Samples per optimizer step, logged values and checkpoints are those of DDP.

    Args:
        accelerator: Lightning's accelerator; set by the Trainer.
        parallel_devices: Devices of this node; set by the Trainer.
        cluster_environment: How processes find each other; set by the Trainer.
        checkpoint_io: Lightning's checkpoint reader and writer.
        precision_plugin: Lightning's precision plugin.
        plan: ``"auto"`` to make a plan, the path of a plan file, or a plan.
        memory_limit: Bytes of each device that training may use, as a number or as text such as ``"22GiB"``. By default
            what the device has, less a reserve.
        host_memory_limit: Bytes of each node's host memory that offloading may use; by default 80 % of it.
        offload_directory: Folder whose files hold offloaded optimizer state and parameters; for CPUs only.
        search: What the planner may choose from; by default everything.
        data_parallel_size: How many distinct batches are loaded at once; it must divide the number of processes. As
            many equal groups of neighbouring ranks each load one of them, and a step sees what DDP with so many
            processes would see. By default every process loads its own, as under DDP.
        cluster: The cluster to plan for, as a ``Cluster`` or as text such as ``"2x8xL4"``; by default this one is
            detected. It must have as many devices as there are processes.
        blocks: Qualified name of the container of the repeated blocks, if they are not found by themselves.
        plan_path: Where the plan is written; by default ``mist_plan.json`` in the logger's directory, if there is one.
        profile_directory: Where measurements of this machine are kept; by default ``lightning-mist`` in the user's
            cache directory.
        correct_profile: Whether what runs measure corrects what is predicted for this machine from then on.
        report_path: Where the comparison of predicted and measured is written as JSON at the end, if anywhere.
        self_check: Whether to compare the cut module with the whole on one small batch before training.
        verbose: Whether to print why this plan was chosen, what was measured and where the time of a step goes.
        dry_run: Whether ``fit`` only prints the plan and why it was chosen, writes it to ``plan_path`` if that is
            given, and ends the process before anything is trained.
        save_distributed_checkpoint: Whether checkpoints are directories, into which each rank writes what it holds.
            They and single files are resumed under any plan and number of processes. See docs/checkpoints.md.
        save_asynchronously: Whether directories are written while training goes on, from a copy in host memory.
        master_weights: Whether steps compute in 16 bits while trained parameters are kept and updated in 32, under
            ``precision="bf16-true"``. Outside of steps parameters are in 32 bits. See docs/how-it-works.md.
        ddp_comm_state: As in DDP; with it the plan is plain data parallelism.
        ddp_comm_hook: As in DDP; with it the plan is plain data parallelism.
        ddp_comm_wrapper: As in DDP; with it the plan is plain data parallelism.
        model_averaging_period: As in DDP; with it the plan is plain data parallelism.
        process_group_backend: As in DDP.
        timeout: As in DDP.
        start_method: As in DDP.
        find_unused_parameters: As in DDP; by default decided by tracing the module.
        gradient_as_bucket_view: As in DDP, but True by default, which saves one copy of the gradients.
        broadcast_buffers: As in DDP.
        bucket_cap_mb: As in DDP, for plain data parallelism.
        static_graph: As in DDP, for plain data parallelism.
        **kwargs: Others of torch's ``DistributedDataParallel``, for plain data parallelism; type checkers accept none.
    """

    strategy_name = "mist"

    def __init__(
        self,
        accelerator: Any | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any | None = None,
        checkpoint_io: Any | None = None,
        precision_plugin: Any | None = None,
        plan: str | Plan = "auto",
        memory_limit: str | int | None = None,
        host_memory_limit: str | int | None = None,
        offload_directory: str | None = None,
        search: SearchSpace | None = None,
        data_parallel_size: int | None = None,
        cluster: str | Cluster | None = None,
        blocks: str | None = None,
        plan_path: str | None = None,
        profile_directory: str | None = None,
        correct_profile: bool = True,
        report_path: str | None = None,
        self_check: bool = True,
        verbose: bool = False,
        dry_run: bool = False,
        save_distributed_checkpoint: bool = False,
        save_asynchronously: bool = False,
        master_weights: bool = False,
        ddp_comm_state: Any | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        find_unused_parameters: bool | None = None,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        bucket_cap_mb: int | None = None,
        static_graph: bool = False,
        **kwargs: NoReturn,
    ) -> None:
        self._take_options({**locals()})
        self._saves_directories, self._saves_asynchronously = save_distributed_checkpoint, save_asynchronously
        given = (accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, ddp_comm_state)
        more = (ddp_comm_hook, ddp_comm_wrapper, model_averaging_period, process_group_backend, timeout, start_method)
        super().__init__(
            *given,
            *more,
            gradient_as_bucket_view=gradient_as_bucket_view,
            broadcast_buffers=broadcast_buffers,
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
            **kwargs,
        )
        self._wants_plain_ddp = any(x is not None for x in (ddp_comm_state, ddp_comm_hook, model_averaging_period))
        self._report_path, self._is_dry_run = report_path, dry_run
        self._fitting, self._constructions = ExitStack(), empty_parameters.DeferredConstructions()

    # Life cycle --------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Make or read the plan, and put this rank's part of it in place."""
        module, accelerator = self._module, self.accelerator
        assert accelerator is not None
        self.begin_sharing(module)
        if trainer.state.fn != self._names.fitting:
            self._set_up_outside(trainer)
            return
        self._states_afterwards = ()
        accelerator.setup(trainer)
        self.model = module if self._layer_sync is None else self._layer_sync.apply(module)
        if has_masters := self._request.master_weights:
            check_master_weights(str(trainer.precision))
        else:
            empty_parameters.convert(module, self.precision_plugin)
        limit = empty_parameters.device_limit(self._request.memory_limit, self.root_device)
        self._initial = empty_parameters.initial_values(module, self.root_device, limit, master_weights=has_masters)
        if has_masters:
            # Before the device is asked for memory: it gets what is computed with, and masters when the plan is there.
            self._masters = take_masters(module, self.precision_plugin)
        self.model_to_device()
        self._share_start(module)
        self.setup_optimizers(trainer)
        with self._planning():
            plain = self._why_plain(trainer)
            step = step_of_fit(trainer, self, self._names, plain=plain)
            from lightning_mist.strategy.planning import decide

            self._decision = decide(trainer, self, self._request, step, plain=plain, initial=self._initial)
        if self._is_dry_run:
            self._end_dry_run()
        self._first_steps = FirstSteps(self, self._decision)
        self._install(module)
        if self._initial is not None:
            self._initial.forget()
        self.setup_precision_plugin()
        self._watch(module)

    def _why_plain(self, trainer: Any) -> str | None:
        """Why only plain data parallelism can honour what the user asked for, if so."""
        if self._wants_plain_ddp:
            return "a DDP communication hook or model averaging was given"
        if self._layer_sync is not None:
            return "sync_batchnorm computes collectives inside the step"
        manual, request = OFFERED if self._request.plan == "auto" else None, self._request
        if self.num_loaders is not None or request.master_weights or self._initial is not None:
            manual = MANUAL  # ranks share batches, or hold less than the module
        return whole_module_reason(trainer, self.optimizers, self.root_device, manual=manual)

    def teardown(self, **more: Any) -> None:
        """Give the module all its values back, unless something went wrong and peers may be gone."""
        (engine, initial), self._engine, self._initial = (self._engine, self._initial), None, None
        is_well = self._trainer is not None and self._trainer.state.status.value != "interrupted"
        if engine is None and initial is not None and self._outside is not None and is_well:
            initial.materialize(initial.names)  # no batch came, for which it would have been shared out
        if engine is not None:
            if is_well:
                if initial is None:
                    # Lightning moves the module there anyway: no device has to hold it whole beside optimizer state.
                    engine.fill(torch.device("cpu"))
                else:
                    engine.leave_on_rank_zero()
            elif not engine.is_filled:
                engine.abandon()
            # An evaluation after a fit has no optimizer, and leaves the fit's state as it is.
            self._states_afterwards = engine.release_optimizers(self._timeout) or self._states_afterwards
            if is_well:
                engine.transport.close()
        if is_well:
            self.end_saving()
        if is_well and self._monitor is not None:
            self._monitor.close()
        attach_engine(self.precision_plugin, None)
        self._fitting.close()
        if self.lightning_module is not None:
            empty_parameters.hollow_on_host(self.lightning_module)
        super().teardown(**more)
        self.stop_watching()
        is_over, self._is_over = self._is_over, False
        if is_over:
            raise SystemExit(0)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: a copy has no engine, and no processes that would reduce or be asked for the state."""
        return {
            **super().__getstate__(),
            **dict.fromkeys(("_one_of_each", "_pending", "_writers", "_engine", "_masters", "_watcher")),
            "_first_steps": None,
            "_states_afterwards": (),
            "_fitting": ExitStack(),
        }

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """How tensors of a new module are made, in ``Trainer.init_module`` and ``configure_model``.

        Args:
            empty_init: Whether parameters get no memory (they are on the meta device afterwards). How they are
                initialised is remembered and done by each rank for those parameters that it will hold. Otherwise they
                are made in host memory.
        """
        context: AbstractContextManager[Any] = self.precision_plugin.tensor_init_context()
        if self._request.master_weights:
            # Masters are what constructors make in their own type. Lightning asks the plugin too, behind this.
            context = replaced(self.precision_plugin, module_init_context=nullcontext)
        with self._constructions.context(empty_init), context:
            yield

    # Training ----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the batch through the plan; the returned loss installs the gradients in its backward."""
        batch, *rest = (*args, *kwargs.values())
        assert self._monitor is not None
        self._monitor.saw(batch)
        output = None
        for tried in self._first_steps.tried_batches(batch):
            with tried:
                output = self._trained(batch, rest, args, kwargs)
        return output

    def _trained(self, batch: Any, rest: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._engine is None:
            assert self._monitor is not None
            with self._monitor.recorder.phase(FORWARD):
                return super().training_step(*args, **kwargs)
        if isinstance(self._engine, ManualEngine):
            with self.all_take_part():
                return self._engine.run_step(lambda: super(MistBase, self).training_step(*args, **kwargs))
        module, context = self._module, self.precision_plugin.train_step_context
        scaler = getattr(self.precision_plugin, "scaler", None)
        # As the scaler itself would scale a loss: its scale stays on the device.
        scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.root_device))
        keeps = not gradients_are_about_to_go(module)
        with self.all_take_part():
            result, loss = self._engine.train_batch(
                *(batch, module.training_step, *rest), context=context, loss_scale=scale, keeps_gradients=keeps
            )
        with context():  # Numbers become tensors of the precision's type, as where the step itself logs.
            extras = replay(module, result.records, result.extras)
        if not extras:
            return loss
        # Lightning itself refuses a dictionary without a loss.
        return extras if loss is None else {**extras, "loss": loss}

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any
    ) -> Any:
        """Step the owned parameters and, under ZeRO-1 and ZeRO-2, distribute what was updated."""
        if isinstance(self._engine, ManualEngine):
            update = partial(super().optimizer_step, optimizer, model=model, **kwargs)
            return self._engine.update(optimizer, update, closure)

        if self._engine is not None:
            self._engine.owned(optimizer).check()

        output = None
        for tried in self._first_steps.tried_steps():
            assert self._monitor is not None  # another plan has another one
            with tried, self._monitor.step(optimizer, closure) as timed:
                output = super().optimizer_step(optimizer, timed, model, **kwargs)
                if self._engine is not None:
                    with self.all_take_part():
                        complete(self._engine.executor.gather_parameters())
        return output

    def on_train_end(self, **more: Any) -> None:
        """Wait for the last checkpoint, and say how predicted and measured compare."""
        super().on_train_end(**more)
        self.finish_saving()
        if self._monitor is not None and (self._watcher is None or self._watcher.all_end()):
            self._monitor.finish()
