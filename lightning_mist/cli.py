"""The command line: ``lightning-mist plan`` makes a plan without the machine it is for, ``show`` shows and compares."""

import importlib.metadata
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

import docstring_parser
from jsonargparse import ArgumentParser

from lightning_mist.errors import MistError
from lightning_mist.plan import Plan, ScheduleName, describe_changes, fingerprint_of, load, render, save, split_notes
from lightning_mist.units import format_seconds, parse_bytes

if TYPE_CHECKING:
    from lightning_mist.hardware import Cluster, HardwareProfile
    from lightning_mist.model import ModelSpec

_LOCAL = "local"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``lightning-mist`` command.

    Args:
        arguments: What stands behind the command's name; by default, what the process was started with.

    Raises:
        SystemExit: With code 2 after an error in the arguments, the files, or the plan asked for.
    """
    parser = _parser()
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    function = _COMMANDS[chosen.subcommand]
    values = vars(chosen[chosen.subcommand])
    try:
        function(*(values[name] for name in inspect.signature(function).parameters))
    except (MistError, ValueError, OSError) as error:
        print(f"lightning-mist {chosen.subcommand}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def show(plan: str, /, against: str | None = None, trace: str | None = None) -> None:
    """Show a plan file as a table.

    Args:
        plan: The plan file.
        against: Another plan file, to show what changes from the first to it.
        trace: Where to write a Chrome trace of the plan's schedule, run on a clock with its predicted seconds. Open it
            with https://ui.perfetto.dev or chrome://tracing.
    """
    first = load(plan)
    other = None if against is None else load(against)
    _print(first)
    if other is not None:
        print(f"\nfrom {plan} to {against}:\n{describe_changes(first, other)}")
    if trace is not None:
        from lightning_mist.schedule import simulate_plan, to_chrome_trace

        result = simulate_plan(first)
        names = {
            group: f"stage {' and '.join(map(str, first.chunks(group)))} (ranks {', '.join(map(str, stage.devices))})"
            for group, stage in enumerate(first.stages[: first.num_groups])
        }
        text = to_chrome_trace((span for spans in result.spans for span in spans), names=names)
        Path(trace).write_text(text, encoding="utf-8")
        idle = max(result.bubble) / result.makespan if result.makespan else 0.0
        print(
            f"\nsimulated step: {format_seconds(result.makespan)}, the idlest stage idles for {idle:.0%} of it; "
            f"trace written to {trace}"
        )


def plan(
    model: str,
    cluster: str,
    global_batch_size: int,
    seq_len: int | None = None,
    precision: str = "32-true",
    memory_limit: str | None = None,
    out: str | None = None,
    optimizer: str = "AdamW",
    max_stages: int | None = None,
    zero_stages: tuple[int, ...] = (0, 1, 2, 3),
    tensor_parallel_degrees: tuple[int, ...] | None = None,
    checkpointing: bool = True,
    schedules: tuple[ScheduleName, ...] = ("1f1b", "interleaved-1f1b", "zb-h1"),
) -> None:
    """Find the fastest plan that fits, by the cost model.

    Args:
        model: A preset such as gpt3-22b, the path of a Hugging Face config.json, or package.module:function, whose
            function returns a module with a training_step and a batch for it.
        cluster: Such as 4x8xL4 (nodes x devices x device), a cluster.yaml, or "local" for this machine, measured;
            "local:4" for four processes on it.
        global_batch_size: Rows that one batch brings over all devices.
        seq_len: Tokens per row, for presets and configurations.
        precision: Lightning's name of the precision, such as bf16-mixed.
        memory_limit: The most memory of each device that the plan may use, such as 22GiB.
        out: Where to write the plan file.
        optimizer: Class in torch.optim.
        max_stages: The most pipeline stages.
        zero_stages: Which ZeRO stages may be used.
        tensor_parallel_degrees: How many devices of a node may share every layer, 1 among them; null for all that the
            module allows.
        checkpointing: Whether layers may be recomputed in backward.
        schedules: Pipeline schedules to choose from, of 1f1b, gpipe, interleaved-1f1b and zb-h1.
    """
    from lightning_mist.tuner import SearchSpace, degrees_to_try, tune

    limit = None if memory_limit is None else parse_bytes(memory_limit)
    sharing = None if tensor_parallel_degrees is None else tuple(tensor_parallel_degrees)
    search = SearchSpace(
        max_stages=max_stages,
        zero_stages=tuple(zero_stages),
        tensor_parallel_degrees=sharing,
        checkpointing=checkpointing,
        schedules=tuple(schedules),
    )
    machine = _cluster(cluster)
    rows = _rows_of_each(global_batch_size, machine)
    degrees = degrees_to_try(search, machine.devices_per_node)
    spec = _trace(model, rows=rows, seq_len=seq_len, precision=precision, optimizer=optimizer, degrees=degrees)
    profile = _measured(machine, precision) if _is_local(cluster) else None
    _say(f"searching plans for {spec.num_layers} layers on {machine.world_size} devices")
    size = global_batch_size
    result = tune(spec, machine, profile=profile, global_batch_size=size, memory_limit=limit, search=search)
    found = replace(result.plan, fingerprint=_made_for(spec, machine, rows, precision))
    _print(found)
    print("\n" + "\n".join((*split_notes(found, spec.module_map), *result.explain())))
    if out is not None:
        save(found, out)
        print(f"plan written to {out}")


def _rows_of_each(global_batch_size: int, machine: "Cluster") -> int:
    """Rows that each device loads."""
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size = {global_batch_size}: at least one row is needed; give a batch's rows")
    return max(1, global_batch_size // machine.world_size)


def _made_for(spec: "ModelSpec", machine: "Cluster", rows: int, precision: str) -> tuple[tuple[str, str], ...]:
    """The fingerprint of a plan for a network on a machine."""
    versions = [(name, importlib.metadata.version(name)) for name in ("lightning-mist", "torch")]
    made_for = fingerprint_of(
        spec.module_map, world_size=machine.world_size, batch_rows=rows, precision=precision, versions=versions
    )
    return made_for.pairs()


_COMMANDS: dict[str, Callable[..., None]] = {"plan": plan, "show": show}


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="lightning-mist", description="Plan how to train a network, and look at plans.")
    commands = parser.add_subcommands(dest="subcommand", required=True)
    for name, function in _COMMANDS.items():
        command = _command(function)
        commands.add_subcommand(name, command, help=command.description)
    return parser


def _command(function: Callable[..., None]) -> ArgumentParser:
    """The arguments of a function, with its docstring's words: positional-only ones by position."""
    described = docstring_parser.parse(function.__doc__ or "")
    help_of = {item.arg_name: item.description for item in described.params}
    command = ArgumentParser(description=described.short_description)
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        required = parameter.default is inspect.Parameter.empty
        if required and parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            command.add_argument(name, type=hints[name], help=help_of[name])
        else:
            options = {"required": True} if required else {"default": parameter.default}
            command.add_argument(f"--{name.replace('_', '-')}", type=hints[name], help=help_of[name], **options)
    return command


def _print(found: Plan) -> None:
    width = max(80, shutil.get_terminal_size(fallback=(120, 24)).columns)
    print(render(found, width=width, color=sys.stdout.isatty()))


def _say(text: str) -> None:
    print(f"mist: {text}", file=sys.stderr)


def _trace(
    model: str, *, rows: int, seq_len: int | None, precision: str, optimizer: str, degrees: tuple[int, ...]
) -> "ModelSpec":
    """What the network costs, split over these tensor-parallel degrees too where that can be."""
    import torch

    from lightning_mist.model import derive_splits, map_module, trace_model
    from lightning_mist.model.sources import open_model
    from lightning_mist.runtime.batches import batch_rows, slice_rows

    optimizer_class = getattr(torch.optim, optimizer, None)
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise ValueError(f"optimizer {optimizer!r} is not a class in torch.optim: write for example AdamW or SGD")
    sys.path.insert(0, os.getcwd())  # as `python -m` does, so that the user's own modules are found
    # Where a batch grows is seen by comparing two batches, so one row is not enough.
    source = open_model(model, batch_rows=max(2, rows), sequence_length=seq_len, precision=precision)
    _say(f"tracing {source.name}")
    known = batch_rows(source.batch)
    smaller = slice_rows(source.batch, 0, known - 1) if known is not None and known > 1 else None
    found = map_module(source.module, source.call, source.batch, second_batch=smaller)
    if degrees:
        _say(f"finding out how {', '.join(map(str, degrees))} devices could share layers")
        found = derive_splits(source.module, source.call, source.batch, found, degrees)
    spec = trace_model(
        source.module,
        source.batch,
        call=source.call,
        module_map=found,
        optimizer=optimizer_class,
        precision=precision,
    )
    return replace(spec, name=source.name)


def _is_local(text: str) -> bool:
    return text.partition(":")[0] == _LOCAL


def _cluster(text: str) -> "Cluster":
    """The cluster that a text describes, or this machine."""
    from lightning_mist.hardware import detect, parse_cluster

    if not _is_local(text):
        return parse_cluster(text)
    count = text.partition(":")[2]
    if text != _LOCAL and not (count.isdecimal() and int(count) > 0):
        raise ValueError(f"cluster {text!r}: write local, or local: and a number of processes, for example local:2")
    import torch

    kind, there = ("cuda", torch.cuda.device_count()) if torch.cuda.is_available() else ("cpu", None)
    processes = int(count) if count else there or 1
    if there is not None and processes > there:
        raise ValueError(f"cluster {text!r}: this machine has {there} CUDA devices; write local:{there}")
    return detect(processes, 1, kind)


def _measured(cluster: "Cluster", precision: str) -> "HardwareProfile":
    """The profile that a fit on this machine would use: kept from earlier, or measured by as many processes."""
    from torch.multiprocessing.spawn import spawn

    from lightning_mist.hardware import read_profile

    with tempfile.TemporaryDirectory() as directory:
        target = os.path.join(directory, "profile.json")
        arguments = (cluster, precision, os.path.join(directory, "store"), target)
        spawn(_measure, args=arguments, nprocs=cluster.world_size)  # type: ignore[no-untyped-call]
        return read_profile(Path(target))


def _measure(rank: int, cluster: "Cluster", precision: str, store: str, target: str) -> None:
    """One process of a measurement of this machine."""
    import torch
    import torch.distributed as dist

    from lightning_mist.hardware import write_profile
    from lightning_mist.strategy.machine import default_directory, machine_profile
    from lightning_mist.strategy.progress import Progress

    on_cuda = cluster.device.kind == "cuda"
    device = torch.device(f"cuda:{rank}" if on_cuda else "cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=Path(store).as_uri(),
        rank=rank,
        world_size=cluster.world_size,
    )
    with Progress(enabled=rank == 0) as progress:
        profile = machine_profile(
            cluster=cluster, device=device, precision=precision, directory=default_directory(), progress=progress
        )
    if rank == 0:
        write_profile(profile, Path(target))
    dist.destroy_process_group()
