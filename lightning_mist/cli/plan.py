"""``lightning-mist plan``: a plan made without the machine it is for."""

import importlib.metadata
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_mist.cli.compare import compare_with_others, comparison_json, print_comparison
from lightning_mist.cli.explaining import explanation_of, show_explanation
from lightning_mist.cli.machine import devices_of, is_local, oldest_capability, open_cluster, open_profile
from lightning_mist.cli.network import NetworkRequest, trace_network
from lightning_mist.cli.output import print_json, say, show_plan
from lightning_mist.cli.reporting import check_html, write_html
from lightning_mist.plan import ScheduleName, fingerprint_of, save, split_notes
from lightning_mist.units import parse_bytes

if TYPE_CHECKING:
    from lightning_mist.hardware import AnyCluster
    from lightning_mist.model import ModelSpec
    from lightning_mist.tuner import SearchSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Which plans are looked at.

    Attributes:
        max_stages: The most pipeline stages.
        zero_stages: Which ZeRO stages may be used.
        tensor_parallel_degrees: How many devices of a node may share every layer, 1 among them; null for all that the
            module allows.
        checkpointing: Whether layers may be recomputed in backward.
        schedules: Pipeline schedules to choose from, of 1f1b, gpipe, interleaved-1f1b and zb-h1.
    """

    max_stages: int | None = None
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    tensor_parallel_degrees: tuple[int, ...] | None = None
    checkpointing: bool = True
    schedules: tuple[ScheduleName, ...] = ("1f1b", "interleaved-1f1b", "zb-h1")

    def space(self) -> "SearchSpace":
        """The same for the search."""
        from lightning_mist.tuner import SearchSpace

        sharing = self.tensor_parallel_degrees
        return SearchSpace(
            max_stages=self.max_stages,
            zero_stages=tuple(self.zero_stages),
            tensor_parallel_degrees=None if sharing is None else tuple(sharing),
            checkpointing=self.checkpointing,
            schedules=tuple(self.schedules),
        )


def plan(
    *,
    model: str,
    cluster: str,
    global_batch_size: int,
    seq_len: int | None = None,
    precision: str = "32-true",
    memory_limit: str | None = None,
    out: str | None = None,
    optimizer: str | None = None,
    json: bool = False,
    explain: bool = False,
    compare: bool = False,
    html: str | None = None,
    options: SearchOptions,
) -> None:
    """Find the fastest plan that fits, by the cost model.

    Args:
        model: A preset such as gpt3-22b, the path of a Hugging Face config.json, or package.module:function, whose
            function returns a module with a training_step and a batch for it.
        cluster: Such as 4x8xL4 (nodes x devices x device), 8xA100-40+2x8xV100-32, a cluster.yaml, a profile.json that
            lightning-mist profile wrote, or "local" for this machine, measured; "local:4" for four processes on it.
        global_batch_size: Rows that one batch brings over all devices.
        seq_len: Tokens per row, for presets and configurations.
        precision: Lightning's name of the precision, such as bf16-mixed.
        memory_limit: The most memory of each device that the plan may use, such as 22GiB.
        out: Where to write the plan file.
        optimizer: Class in torch.optim, by its default options; else what configure_optimizers makes, or AdamW.
        json: Print JSON on stdout and nothing else there.
        explain: Say all about why: what binds, what each technique buys against the best plan without it, the best
            plans of other kinds, and what a better machine would buy. Takes about 10 seconds more.
        compare: Also tune what people would have chosen (DDP, FSDP, Megatron-LM ...), and print how they compare.
        html: Where to write a page with all of this, pictures of a step, all that --explain says, and what less memory
            would cost; it needs nothing else to be read.
        options: Which plans are looked at.
    """
    given = dict(locals())
    check_html(html)
    from lightning_mist.cost import Estimator, estimate_plan
    from lightning_mist.runtime.support import EXECUTED
    from lightning_mist.tuner import Planner, degrees_to_try, explanation_data

    limit = None if memory_limit is None else parse_bytes(memory_limit)
    search = options.space()
    if is_local(cluster):
        search = replace(search, **EXECUTED)  # A plan for this machine is to be executed.
    machine = open_cluster(cluster)
    rows = rows_of_each(global_batch_size, machine)
    degrees = degrees_to_try(search, machine.devices_per_node)
    request = NetworkRequest(
        model=model,
        rows=rows,
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        degrees=degrees,
        device_kind=machine.kind,
    )
    spec = trace_network(request, oldest_capability(machine))
    profile = open_profile(cluster, machine, precision)
    say(f"searching plans for {spec.num_layers} layers on {machine.world_size} devices")
    planner = Planner(spec, machine, profile=profile)
    asked: dict[str, Any] = {"global_batch_size": global_batch_size, "memory_limit": limit, "search": search}
    result = planner.tune(**asked)
    found = replace(result.plan, fingerprint=_made_for(spec, machine, rows, precision))
    estimator = Estimator(spec, machine, limit or max(part.device.memory_bytes for part in machine.parts))
    memory = estimate_plan(estimator, found, advise=False, replay="worst").headline()
    notes = (*split_notes(found, spec.module_map), *result.explain())
    why = explanation_of(planner, result, full=explain or html is not None, **asked)
    compared = compare_with_others(planner, found, memory_limit=limit, search=search) if compare else None
    if json:
        more: dict[str, Any] = {"explanation": explanation_data(why)} if explain else {}
        if compared is not None:
            more["compare"] = comparison_json(compared)
        print_json(found, memory=memory, notes=notes, **more)
    else:
        show_plan(found, devices_of(found, machine))
        print(memory, end="\n\n")
        show_explanation(why, full=explain)
        if compared is not None:
            print_comparison(compared, spec)
        print("\n".join(("", *notes)))
    if html is not None:
        write_html(
            html,
            found,
            planner=planner,
            result=result,
            why=why,
            compared=compared,
            spec=spec,
            verdict=memory,
            notes=(*split_notes(found, spec.module_map), *result.notes),
            given=given,
            asked=asked,
        )
        (say if json else print)(f"report written to {html}")
    if out is not None:
        save(found, out)
        (say if json else print)(f"plan written to {out}")


def rows_of_each(global_batch_size: int, machine: "AnyCluster") -> int:
    """Rows that each device loads."""
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size = {global_batch_size}: at least one row is needed; give a batch's rows")
    return max(1, global_batch_size // machine.world_size)


def _made_for(spec: "ModelSpec", machine: "AnyCluster", rows: int, precision: str) -> tuple[tuple[str, str], ...]:
    """The fingerprint of a plan for a network on a machine."""
    versions = [(name, importlib.metadata.version(name)) for name in ("lightning-mist", "torch")]
    made_for = fingerprint_of(
        spec.module_map, world_size=machine.world_size, batch_rows=rows, precision=precision, versions=versions
    )
    return made_for.pairs()
