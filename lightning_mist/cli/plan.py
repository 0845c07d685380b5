"""``lightning-mist plan``: a plan made without the machine it is for."""

import importlib.metadata
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from lightning_mist.cli.compare import compare_with_others, comparison_json, print_comparison
from lightning_mist.cli.explaining import explanation_of, show_explanation
from lightning_mist.cli.machine import devices_of, is_local, oldest_capability, open_cluster, open_profile
from lightning_mist.cli.network import NetworkRequest, describe_network
from lightning_mist.cli.output import print_json, say, show_plan, told
from lightning_mist.cli.reporting import check_html, write_html
from lightning_mist.cli.search import SearchOptions
from lightning_mist.plan import fingerprint_of, save, split_notes
from lightning_mist.units import parse_bytes

if TYPE_CHECKING:
    from lightning_mist.hardware import AnyCluster
    from lightning_mist.model import ModelSpec
    from lightning_mist.plan import Plan
    from lightning_mist.tuner import TuneResult


def plan(
    *,
    model: str,
    cluster: str,
    global_batch_size: int,
    seq_len: int | None = None,
    precision: str = "32-true",
    memory_limit: str | None = None,
    host_memory_limit: str | None = None,
    out: str | None = None,
    optimizer: str | None = None,
    json: bool = False,
    explain: bool = False,
    compare: bool = False,
    html: str | None = None,
    trace: bool = False,
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
        host_memory_limit: The most memory of each node's host that offloading may take, such as 200GiB.
        out: Where to write the plan file.
        optimizer: Class in torch.optim, by its default options; else what configure_optimizers makes, or AdamW.
        json: Print JSON on stdout and nothing else there.
        explain: Say all about why: what binds, what each technique buys against the best plan without it, the best
            plans of other kinds, and what a better machine would buy. Takes about 10 seconds more.
        compare: Also tune what people would have chosen (DDP, FSDP, Megatron-LM ...), and print how they compare.
        html: Where to write a page with all of this, pictures of a step, all that --explain says, and what less memory
            would cost; it needs nothing else to be read.
        trace: Trace a preset too, which takes longer, instead of describing it by its sizes.
        options: Which plans are looked at.
    """
    given = dict(locals())
    check_html(html)
    from lightning_mist.runtime.support import EXECUTED
    from lightning_mist.tuner import Planner, degrees_to_try, explanation_data

    limit, host_limit = (None if text is None else parse_bytes(text) for text in (memory_limit, host_memory_limit))
    search = options.space()
    if is_local(cluster):
        search = replace(search, **EXECUTED)  # A plan for this machine is to be executed.
    machine = open_cluster(cluster)
    rows = rows_of_each(global_batch_size, machine)
    request = NetworkRequest(
        model=model,
        rows=rows,
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        degrees=degrees_to_try(search, machine.devices_per_node),
        device_kind=machine.kind,
        capability=oldest_capability(machine),
        trace=trace,
    )
    spec = describe_network(request)
    planner = Planner(spec, machine, profile=open_profile(cluster, machine, precision))
    limits: dict[str, Any] = {"memory_limit": limit, "host_memory_limit": host_limit, "search": search}
    asked = {"global_batch_size": global_batch_size, **limits}
    with told(f"searching plans for {spec.num_layers} layers on {machine.world_size} devices"):
        result = planner.tune(**asked)
    found = replace(result.plan, fingerprint=_made_for(spec, machine, rows, precision))
    memory = _memory_of(spec, machine, found, limit)
    notes = (*_not_executed(found), *split_notes(found, spec.module_map), *spec.notes, *result.explain())
    why = explanation_of(planner, result, full=explain or html is not None, **asked)
    compared = compare_with_others(planner, found, **limits) if compare else None
    if json:
        more: dict[str, Any] = {"explanation": explanation_data(why)} if explain else {}
        if compared is not None:
            more["compare"] = comparison_json(compared)
        print_json(found, memory=memory, search=_search_data(result), notes=notes, **more)
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


def _memory_of(spec: "ModelSpec", machine: "AnyCluster", found: "Plan", limit: int | None) -> str:
    """What a plan needs of devices, in one sentence."""
    from lightning_mist.cost import Estimator, estimate_plan

    estimator = Estimator(spec, machine, limit or max(part.device.memory_bytes for part in machine.parts))
    return estimate_plan(estimator, found, advise=False, replay="worst").headline()


def _not_executed(found: "Plan") -> tuple[str, ...]:
    """What the runtime does not execute yet of a plan, in one line."""
    from lightning_mist.runtime.support import unsupported

    said = unsupported(found)
    return (f"a forecast: this version does not execute yet {'; '.join(said)}",) if said else ()


def _search_data(result: "TuneResult") -> dict[str, Any]:
    """How sure it is that the plan is the best, for machines."""
    return {
        "status": result.status,
        "bound": result.bound,
        "gap": result.gap,
        "closed_form_seconds": result.closed_form_seconds,
        "stats": asdict(result.stats),
        "alternatives": [
            {"name": item.name, "step_seconds": item.predicted.step_seconds} for item in result.alternatives
        ],
    }


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
