"""The runtime that executed Mist's published plans, run again without data: what one rank of a stage allocates.

After ``mist/re_swap_manager``, ``mist/pipeline_parallel/schedules.py`` and ``benchmark/mist/exec/
benchmark_one_case.py`` of the artifact. Every layer is a unit with one flat parameter; its gradients arrive in a buffer
of its own; optimizer states are float32 shards; the step of one iteration happens in the next: on the first stage layer
by layer within the first forward, on other stages ahead of it, on a stream made for the occasion, whose memory no other
stream can use.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.accuracy import published_mist_model as model
from benchmarks.accuracy.published_device import SimulatedDevice

_HALF = torch.float16
_SWAPPED_ELEMENTS = 1 << 20
"""``MEMORY_LIMIT`` of ``manager.py``: smaller tensors are never offloaded."""

_CHECKED_ELEMENTS = 8 << 20
"""``chunk_size`` of ``fused_adamw_step``: gradients are looked at for infinities in pieces."""

_CROWDED = 0.95
"""Share of the device above which ``_dealloc_optim_states_buffers`` empties the cache."""

ITERATIONS = 3
"""``tiny_bench`` of the shipped configurations: one to warm up, two measured; peaks are taken over all three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """What is kept in host memory, each from 0 to 1."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MistStage:
    """One stage of a plan.

    Attributes:
        index, stages: Which of how many.
        layers, checkpointed: Layers, and how many at its end are recomputed.
        microbatch, microbatches: Rows of a microbatch on one rank; how many there are in an iteration.
        data_parallel, zero: Ranks that share the layers' states; 1, 2 or 3.
        ratios: Offloading of layers. Embedding and output layer are never offloaded, and sharded by ZeRO-1.
        device_bytes: Memory of the device (``total_memory``).
    """

    index: int
    stages: int
    layers: int
    checkpointed: int
    microbatch: int
    microbatches: int
    data_parallel: int
    zero: int
    ratios: Ratios = field(default_factory=Ratios)
    device_bytes: int | None = None

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the output layer."""
        return self.index == self.stages - 1


class Unit:
    """A layer's flat parameter, gradient buffer and optimizer shard.

    Args:
        device: Where.
        shapes: Shapes of its parameters.
        stage: How states are shared out.
        ratios: What of it is offloaded.
        zero: Its ZeRO stage.
    """

    def __init__(
        self, device: SimulatedDevice, shapes: Sequence[tuple[int, ...]], stage: MistStage, ratios: Ratios, zero: int
    ) -> None:
        """Allocate as ``init_module`` and ``ModuleOptimizerHandle`` do."""
        self.device, self.ratios, self.shapes = device, ratios, shapes
        self.numels = [torch.Size(shape).numel() for shape in shapes]
        used = sum(self.numels)
        self.numel = -(-used // 8) * 8
        self.shard = self.numel // stage.data_parallel
        self.ready = False
        self.main_gradient: Tensor | None = None
        shards_weights, shards_gradients = zero >= 3, zero >= 2
        self.has_ring_weights = shards_weights or ratios.weights > 0
        self.has_ring_gradients = shards_gradients or ratios.gradients > 0
        separate = [_empty(size) for size in self.numels]
        flat = torch.cat(separate) if not self.has_ring_weights else _empty(self.numel)
        flat = flat if flat.numel() == self.numel else _empty(self.numel)
        del separate
        resident = int((self.shard if shards_weights else self.numel) * (1 - ratios.weights))
        self.kept: list[Tensor] = [_empty(resident)] if self.has_ring_weights else []
        self.kept.append(_empty(int((self.shard if shards_gradients else self.numel) * (1 - ratios.gradients))))
        copy = flat.clone()
        main = copy.float()
        if stage.data_parallel > 1:
            main = main[: self.shard].clone()
        states = [main, torch.zeros_like(main), torch.zeros_like(main)]
        if ratios.optimizer > 0:
            with torch.no_grad():
                states = [state[: int(self.shard * (1 - ratios.optimizer))].clone() for state in states]
        self.kept += states
        del copy, main
        if self.has_ring_weights:
            with device.paused():
                flat = _empty(self.numel)
        with device.paused():
            self.flat = torch.nn.Parameter(flat.detach() if not self.has_ring_weights else flat)
            self.flat.grad = _empty(self.numel)

    def views(self) -> list[Tensor]:
        """The parameters as views of the flat one, made anew for every forward."""
        used = [*self.numels, self.numel - sum(self.numels)]
        pieces = self.flat.split(used)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=False)]

    def preprocess(self) -> None:
        """The gradient's shard in float32: an empty tensor first, which is then replaced."""
        self.main_gradient = torch.empty(self.shard, dtype=torch.float32, device="meta")
        self.main_gradient = torch.empty(self.shard, dtype=torch.float32, device="meta")

    def step(self) -> None:
        """Check the gradient in pieces, update in place, and let the gradient go."""
        piece = min(_CHECKED_ELEMENTS, self.shard // 2)
        self.device.temporary(4 * piece, piece)
        self.device.temporary(piece)
        self.main_gradient, self.ready = None, False


class MistRank:
    """One rank: its units, its streams, its schedule.

    Args:
        device: Where it allocates.
        dims: The model.
        stage: The stage.
    """

    def __init__(self, device: SimulatedDevice, dims: model.MistDims, stage: MistStage) -> None:
        """Allocate what lasts."""
        self.device, self.dims, self.stage = device, dims, stage
        self.buffer = model.AttentionBuffer()
        ratios, sizes = stage.ratios, dims.block_shapes
        numel = sum(torch.Size(shape).numel() for shape in sizes)
        needs = (stage.zero >= 3 or ratios.weights > 0, stage.zero >= 2 or ratios.gradients > 0)
        self.rings = [_empty(numel) for needed in needs for _ in range(2 * needed)]
        self.blocks = [Unit(device, sizes, stage, ratios, stage.zero) for _ in range(stage.layers)]
        ends = [Unit(device, dims.vocabulary_shapes, stage, Ratios(), 1) for _ in range(stage.is_first + stage.is_last)]
        self.pre = ends[0] if stage.is_first else None
        self.post = ends[-1] if stage.is_last else None
        self.initialised = [*self.blocks, *ends]
        self.sequence = [*ends[: stage.is_first], *self.blocks, *ends[len(ends) - stage.is_last :]]
        self.optimizer_buffers: list[Tensor] = []
        self.iterations = 0
        self._before: SavedTensors | None = None
        device.empty_cache()
        device.reset_peaks()

    def iterate(self) -> None:
        """One iteration of ``forward_backward_pipelining_without_interleaving``; names of variables as there.

        Which variable still holds a tensor decides how long it lives: gradients that were received or sent live until
        the next ones.
        """
        stage = self.stage
        if not stage.is_first:
            self._step_ahead(f"step {self.iterations}")
        waiting: list[tuple[Tensor | None, Tensor]] = []
        warmup = min(stage.stages - stage.index - 1, stage.microbatches)
        for number in range(warmup):
            inputs = self._receive()
            output = self._forward(inputs, number)
            waiting.append((inputs, _sent(output)))
        if stage.microbatches > warmup:
            inputs = self._receive()
        input_gradient = output_gradient = None
        for number in range(warmup, stage.microbatches):
            output = self._forward(inputs, number)
            output_gradient = self._arriving()
            waiting.append((inputs, _sent(output)))
            inputs, output = waiting.pop(0)
            input_gradient = _backward(inputs, output, output_gradient)
            inputs = self._receive() if number < stage.microbatches - 1 else None
        for _ in range(warmup):
            inputs, output = waiting.pop(0)
            output_gradient = self._arriving()
            input_gradient = _backward(inputs, output, output_gradient)
        del input_gradient
        for unit in self.sequence:
            unit.ready = True
        self.iterations += 1

    def _receive(self) -> Tensor | None:
        if self.stage.is_first:
            return None
        return self._boundary().requires_grad_()

    def _arriving(self) -> Tensor | None:
        return None if self.stage.is_last else self._boundary()

    def _boundary(self) -> Tensor:
        """A tensor that another stage sends; the whole device is synchronised behind every exchange."""
        self.device.synchronize("swap out")
        return torch.empty(self.stage.microbatch, self.dims.length, self.dims.hidden, dtype=_HALF, device="meta")

    def _forward(self, inputs: Tensor | None, number: int) -> Tensor:
        """Every unit in order, with what the hooks do around it."""
        tokens = torch.empty(self.stage.microbatch, self.dims.length, dtype=torch.int64, device="meta")
        x, self._before = inputs, None
        for position, unit in enumerate(self.sequence):
            if number == 0 and self.stage.is_first:
                self._step_within(position)
            x = self._run(position, unit, x, tokens)
        if self.optimizer_buffers:
            self._release_optimizer_buffers()
        assert x is not None
        return x

    def _run(self, position: int, unit: Unit, x: Tensor | None, tokens: Tensor) -> Tensor:
        if unit is self.pre:
            return model.embedding(unit.views(), tokens)
        assert x is not None
        if unit is self.post:
            return model.head(unit.views(), x, tokens)

        def layer(x: Tensor) -> Tensor:
            return model.block(self.dims, self.buffer, unit.views(), x)

        saved = SavedTensors(self.device, self.stage.ratios.activations, unit.flat)
        with saved:
            if position - (self.pre is not None) >= self.stage.layers - self.stage.checkpointed:
                out = checkpoint(layer, x, use_reentrant=True, preserve_rng_state=False)
            else:
                out = layer(x)
        if self.stage.ratios.activations > 0:
            del x
            saved.offload()
            out.register_hook(partial(_reload, saved, self._before))
            self._before = saved
        return out  # type: ignore[no-any-return]

    def _step_within(self, position: int) -> None:
        """The step of a first stage, two units ahead of the forward: ``_forward_pre_hook``."""
        ahead = self.sequence[position : position + 3]
        if position == 0 and ahead[0].ready:
            self._make_optimizer_buffers()
            ahead[0].preprocess()
            ahead[0].step()
            ahead[1].preprocess()
        with self.device.on("swap in"):
            if len(ahead) > 1 and ahead[1].ready:
                ahead[1].step()
                if len(ahead) > 2:
                    ahead[2].preprocess()

    def _step_ahead(self, stream: str) -> None:
        """The step of a later stage, before its first forward, in the order in which units were made."""
        self._make_optimizer_buffers()
        with self.device.on(stream):
            for unit in self.initialised:
                if unit.ready:
                    unit.preprocess()
                    unit.step()
        self._release_optimizer_buffers()

    def _make_optimizer_buffers(self) -> None:
        sizes = [unit.shard for unit in self.sequence if unit.ratios.optimizer > 0]
        if sizes and not self.optimizer_buffers:
            self.optimizer_buffers = [torch.zeros(max(sizes), dtype=torch.float32, device="meta") for _ in range(3)]

    def _release_optimizer_buffers(self) -> None:
        total = self.stage.device_bytes
        is_crowded = total is not None and self.device.allocator.reserved >= _CROWDED * total
        if is_crowded:
            self.device.empty_cache()
        if self.optimizer_buffers:
            self.optimizer_buffers = []
            if is_crowded:
                self.device.empty_cache()


class SavedTensors:
    """What autograd keeps of one layer's forward, of which a part may go to host memory.

    Args:
        device: Where.
        ratio: Part that goes.
        weights: The layer's parameter, which autograd keeps too, and which stays.
    """

    def __init__(self, device: SimulatedDevice, ratio: float, weights: Tensor) -> None:
        """Nothing is kept."""
        self._device, self._ratio, self._weights = device, ratio, weights.untyped_storage()._cdata
        self._tensors: dict[int, Tensor] = {}
        self._parts: list[int] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def __enter__(self) -> None:
        """Look at what is kept from here on."""
        if self._ratio > 0:
            self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        """Until here."""
        if self._ratio > 0:
            self._hooks.__exit__(*error)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_large = storage.nbytes() // tensor.element_size() >= _SWAPPED_ELEMENTS
        if is_large and storage._cdata != self._weights and self._device.has_memory(tensor):
            self._tensors[storage._cdata] = tensor.detach()
        return tensor

    def offload(self) -> None:
        """Keep the leading part of every tensor in memory of its own, and give the tensor's memory back."""
        with self._device.on("swap out"):
            for tensor in self._tensors.values():
                nbytes = tensor.untyped_storage().nbytes()
                part = int(nbytes * (1 - self._ratio))
                if part:
                    self._parts.append(self._device.malloc(part))
                self._device.record_stream(tensor, "swap out")
                self._device.drop(tensor)

    def reload(self, stream: str) -> None:
        """Take memory for the tensors again, if they have none yet."""
        with self._device.on(stream):
            for tensor in self._tensors.values():
                self._device.hold(tensor)
        for part in self._parts:
            self._device.free(part)
        self._tensors, self._parts = {}, []


def _reload(own: SavedTensors, before: SavedTensors | None, _: Tensor) -> None:
    """Before a layer's backward: its activations if they are not there yet, then those of the layer before it."""
    own.reload("compute")
    if before is not None:
        before.reload("swap in")


def _empty(numel: int) -> Tensor:
    return torch.empty(numel, dtype=_HALF, device="meta")


def _sent(output: Tensor) -> Tensor:
    """``deallocate_output_tensor``: only its place in the graph is needed from here on."""
    output.data = torch.empty(1, dtype=output.dtype, device="meta")
    return output


def _backward(inputs: Tensor | None, output: Tensor, gradient: Tensor | None) -> Tensor | None:
    """``custom_backward``: the engine itself, which does not mind that the output has no shape any more."""
    if gradient is None:
        gradient = torch.ones_like(output)
    torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
        tensors=(output,),
        grad_tensors=(gradient,),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )
    return inputs.grad if inputs is not None else None
