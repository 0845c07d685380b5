"""``MistFabricStrategy``: what Fabric talks to."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_mist.attributes import replaced
from lightning_mist.hardware import Cluster
from lightning_mist.plan import Plan, SearchSpace
from lightning_mist.runtime.communication import complete
from lightning_mist.strategy import ranks
from lightning_mist.strategy.fabric.loop_training import LoopTraining
from lightning_mist.strategy.fabric.users_loop import Arrival, PlannedModule
from lightning_mist.strategy.given_arguments import DEFAULT_TIMEOUT, refuse_unknown
from lightning_mist.strategy.plan_installation import refuse_unreduced
from lightning_mist.strategy.ranks import ActingRank
from lightning_mist.strategy.training import module_state


class MistFabricBase(ActingRank, LoopTraining):
    """Trains as DDP would in a loop of the user's own, on a plan that fits and is fast.

    At the first forward of the module in training mode the module and the machine are profiled, and a plan is chosen.
    If the module returns its loss, a plan may be anything that ``MistStrategy`` plans, and a forward runs the plan's
    whole schedule. If it returns something else, of which the loop computes the loss, plans have one stage that takes
    whole batches: data parallelism with ZeRO, recomputation and offloading. Losses, gradients and parameters are those
    of DDP. See docs/fabric.md. Arguments that are not described here are those of ``MistStrategy``.

    Args:
        accelerator: Fabric's accelerator; set by Fabric.
        parallel_devices: Devices of this node; set by Fabric.
        cluster_environment: How processes find each other; set by Fabric.
        checkpoint_io: Fabric's checkpoint reader and writer.
        precision: Fabric's precision plugin.
        returns_loss: Whether the module returns the loss that is trained, which ranks multiply by the same factor if by
            any; by default it does if one scalar of what it returns can be differentiated, or is called ``loss``, and
            no loss is scaled (``16-mixed``).
        plan_path: Where the plan is written, if anywhere.
        correct_profile: Whether what earlier runs measured corrects what is predicted for this machine.
    """

    def __init__(
        self,
        accelerator: Any | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any | None = None,
        checkpoint_io: Any | None = None,
        precision: Any | None = None,
        plan: str | Plan = "auto",
        memory_limit: str | int | None = None,
        host_memory_limit: str | int | None = None,
        offload_directory: str | None = None,
        search: SearchSpace | None = None,
        cluster: str | Cluster | None = None,
        blocks: str | None = None,
        returns_loss: bool | None = None,
        plan_path: str | None = None,
        profile_directory: str | None = None,
        correct_profile: bool = True,
        self_check: bool = True,
        verbose: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        find_unused_parameters: bool | None = None,
        gradient_as_bucket_view: bool = True,
        **kwargs: Any,
    ) -> None:
        self._take_options({**locals()})
        given = (accelerator, parallel_devices, cluster_environment, checkpoint_io, precision)
        super().__init__(
            *given,
            process_group_backend,
            timeout,
            start_method,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **kwargs,
        )
        self._backward_sync_control: Any = self  # which Fabric asks for ``no_backward_sync``
        self._returns_loss = returns_loss
        self._modules: list[PlannedModule] = []
        self.optimizers: list[Any] = []
        self._arrived: list[Arrival] = []

    # Setting up --------------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> Any:
        """Give every rank the values of rank 0, as DDP does; the plan is made when the module is first trained."""
        planned = PlannedModule(module, self.run_module)
        if planned.is_trained:
            self.refuse_late("module")
        self._dtype = torch.get_default_dtype()
        ranks.same_start(module, ())
        self._modules.append(planned)
        return planned

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Remember an optimizer: the plan is made for it."""
        self.refuse_late("optimizer")
        self.optimizers.append(optimizer)
        return optimizer

    # Training ----------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward through the user's loss, and then through the plan where gradients have arrived."""
        super().backward(tensor, module, *args, **kwargs)
        self.finish_arrivals()

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step the owned parameters and distribute what was updated."""
        engine = self._engine
        if engine is None:
            for planned in self._modules:
                refuse_unreduced(planned.parallel)
            return super().optimizer_step(optimizer, **kwargs)
        self.refuse_unaveraged()
        engine.owned(optimizer).check()
        engine.hollow()
        output = super().optimizer_step(optimizer, **kwargs)
        complete(engine.executor.gather_parameters())
        # What the loop does next is not known: it may look at parameters.
        engine.executor.flush()
        return output

    def clip_gradients_norm(
        self,
        module: Any,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
        **more: Any,
    ) -> Tensor:
        """Clip by the norm of the whole model's gradients."""
        if self._engine is None:
            clipped: Tensor = super().clip_gradients_norm(
                module, optimizer, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite, **more
            )
            return clipped
        refuse_unknown(more)
        self.precision.unscale_gradients(optimizer)
        return self._engine.clip_by_norm(
            optimizer, float(max_norm), norm_type=float(norm_type), error_if_nonfinite=error_if_nonfinite
        )

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float, **more: Any) -> None:
        """Clamp every entry of gradients."""
        if self._engine is None:
            super().clip_gradients_value(module, optimizer, clip_val, **more)
            return
        refuse_unknown(more)
        self.precision.unscale_gradients(optimizer)
        self._engine.clip_by_value(optimizer, float(clip_val))

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Inside, gradients are only added up: forwards are of batches whose gradients ranks do not average yet."""
        if enabled and not isinstance(module, PlannedModule):
            raise TypeError(
                f"no_backward_sync of a {type(module).__name__}: it takes a module that was set up by fabric.setup or "
                "fabric.setup_module"
            )
        with replaced(self, averages=False) if enabled else nullcontext():
            yield

    # Saving and loading, as DDP does whatever the plan; on every rank at once --------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """All weights in the module's own layout; complete on global rank 0."""
        plain = module.module if isinstance(module, PlannedModule) else module
        if self._engine is None or plain is not self._engine.module:
            return plain.state_dict()
        return module_state(plain, self._engine)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Take weights in the module's own layout."""
        plain, engine = module.module if isinstance(module, PlannedModule) else module, self._engine
        if engine is None or plain is not engine.module or engine.is_filled:
            plain.load_state_dict(state_dict, strict=strict)
            return
        engine.forget_batch()
        engine.fill()
        plain.load_state_dict(state_dict, strict=strict)
        engine.hollow()

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """All optimizer state in DDP's layout; complete on global rank 0."""
        if self._engine is None or optimizer is not self.optimizers[0]:
            state: dict[str, Any] = super().get_optimizer_state(optimizer)
            return state
        return self._engine.optimizer_state()

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None, **more: Any
    ) -> dict[str, Any]:
        """Read a checkpoint; of an optimizer's state each rank takes its part."""
        engine, given = self._engine, () if weights_only is None else (weights_only,)  # which Lightning knows since 2.6
        is_ours = engine is not None and isinstance(state, (dict, type(self.optimizers[0])))
        if not is_ours:
            found: dict[str, Any] = super().load_checkpoint(path, state, strict, *given, **more)
            return found
        assert engine is not None
        optimizer = self.optimizers[0]
        if state is optimizer:
            engine.load_optimizer_state(super().load_checkpoint(path, None, strict, *given, **more))
            return {}
        own = [name for name, value in state.items() if value is optimizer]
        rest = {name: value for name, value in state.items() if name not in own}
        remainder: dict[str, Any] = super().load_checkpoint(path, rest, strict, *given, **more)
        state.update(rest)
        for name in own:
            if name in remainder:
                engine.load_optimizer_state(remainder.pop(name))
            elif strict:
                raise KeyError(
                    f"the checkpoint has no {name!r}, which is to be loaded: it has what it was saved with; leave it "
                    "out, or pass strict=False"
                )
        return remainder

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled, before anything is set up."""
        return {**vars(self), "_decision": None, "_engine": None}
