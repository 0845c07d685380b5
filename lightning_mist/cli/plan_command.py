"""``lightning-mist plan``: a plan made without the machine it is for."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import shorten, wrap
from typing import TYPE_CHECKING, Any

from lightning_mist.attributes import collector_paused
from lightning_mist.cli.cluster_input import (
    check_rates,
    devices_of,
    in_stack,
    is_local,
    measure_local,
    open_cluster,
    precision_of,
)
from lightning_mist.cli.html_output import (
    FoundPlan,
    check_drawn,
    check_target,
    comparison_json,
    print_comparison,
    write_html,
)
from lightning_mist.cli.network import NetworkOptions, NetworkRequest, describe_network
from lightning_mist.cli.output import (
    answer,
    display,
    explanation_of,
    print_json,
    say,
    show_text,
    terminal_width,
    told,
)
from lightning_mist.plan import Plan, SearchSpace, fingerprint_of, render, save
from lightning_mist.plan.plan_tables import counted, speed_line
from lightning_mist.plan.plan_text import recipe_of
from lightning_mist.units import parse_bytes

if TYPE_CHECKING:
    from lightning_mist.explain import Explanation
    from lightning_mist.hardware import AnyCluster
    from lightning_mist.model import ModelSpec
    from lightning_mist.tuner import TuneResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommandRequest:
    """On what to plan, and what to show of it.

    Attributes:
        cluster: Such as 4x8xL4 (nodes x devices x device), 8xA100-40+2x8xV100-32, a cluster.yaml, a profile.json that
            lightning-mist profile wrote, or "local" for this machine, measured; "local:4" for four processes on it.
        global_batch_size: Rows that one batch brings over all devices.
        memory_limit: The most memory of each device that the plan may use, such as 22GiB.
        host_memory_limit: The most memory of each node's host that offloading may take, such as 200GiB; by default 80 %
            of what it has. Hosts that are not described are taken to have as much.
        out: Where to write the plan file.
        json: Print JSON on stdout and nothing else there.
        explain: Say all about why: what binds, what each technique buys against the best plan without it, the best
            plans of other kinds, and what a better machine would buy.
        explain_seconds: About how many seconds more that may take; what there was no time for is listed.
        compare: Also tune what people would have chosen (DDP, FSDP, Megatron-LM ...), and print how they compare.
        stack: Whose kernels to price on a described machine: eager (torch as this runtime runs it), compiled (blocks
            through torch.compile), fused (as Megatron's), flash2 or triton (eager with FlashAttention-2 everywhere, or
            with the Triton kernel of 2023).
        html: Where to write a page with all of this, pictures of a step, all that --explain says, and what less memory
            would cost; it needs nothing else to be read.
    """

    cluster: str
    global_batch_size: int
    memory_limit: str | None = None
    host_memory_limit: str | None = None
    out: str | None = None
    json: bool = False
    explain: bool = False
    explain_seconds: float = 10.0
    compare: bool = False
    stack: str = "eager"
    html: str | None = None


@collector_paused()
def plan(*, network: NetworkOptions, request: PlanCommandRequest, options: SearchSpace) -> None:
    """Find the fastest plan that fits, by the cost model.

    Args:
        network: What to plan for.
        request: On what, and what to show of it.
        options: Which plans are looked at.
    """
    if request.html is not None:
        check_drawn("report", request.html)
    if request.out is not None:
        check_target("plan file", request.out, "plan.json")
    seconds = request.explain_seconds
    if seconds <= 0:
        raise ValueError(f"explain_seconds = {seconds:g}: searching for other plans takes time; give some")
    found = _search(network, request, options)
    is_explained = request.explain or request.html is not None
    why = explanation_of(found.planner, found.result, seconds=seconds if is_explained else 0.0, **found.asked)
    written = []
    if request.html is not None:
        given = {**asdict(network), **asdict(request)}
        write_html(request.html, found, why=why, given=given, seconds=seconds / 2)
        written.append(f"report written to {request.html}")
    if request.out is not None:
        save(found.plan, request.out)
        written.append(f"plan written to {request.out}")
    _show(found, why, json=request.json, explain=request.explain)
    for line in written:
        (say if request.json else answer)(line)


def _search(asked_for: NetworkOptions, request: PlanCommandRequest, options: SearchSpace) -> FoundPlan:
    """Describe the network and the machine, and search."""
    from lightning_mist.cost import with_units
    from lightning_mist.explain import baselines, compare_plans, plan_that_fits
    from lightning_mist.hardware import single, with_host_memory
    from lightning_mist.runtime.support import executed_offload
    from lightning_mist.tuner import Planner, unshared
    from lightning_mist.tuner.space import check_memory_limit

    limit, host_limit = (
        None if text is None else parse_bytes(text) for text in (request.memory_limit, request.host_memory_limit)
    )
    search, restricted = options, tuple[str, ...]()
    machine, measured = open_cluster(request.cluster)
    machine = with_host_memory(machine, host_limit)
    precision = precision_of(machine, asked_for.precision, master_weights=asked_for.master_weights)
    if is_local(request.cluster):
        # A plan for this machine is to be executed.
        kinds, restricted = executed_offload(search.offload, machine.kind, has_files=False)
        search = replace(search, offload=kinds)
    check_memory_limit(machine, limit)
    if not is_local(request.cluster):  # else it is measured in this precision
        check_rates(machine, measured, precision.name)
    if request.global_batch_size < 1:
        raise ValueError(
            f"global_batch_size = {request.global_batch_size}: at least one row is needed; give a batch's rows"
        )
    rows = max(1, request.global_batch_size // machine.world_size)  # that each device loads
    contexts, degrees = search.context_parallel_degrees, _degrees(search, machine)
    network = asked_for.on(machine, precision, rows=rows, degrees=degrees, contexts=contexts)
    spec = describe_network(network)
    if is_local(request.cluster):
        measured = measure_local(single(machine, "measuring"), precision.name).profile
    profile = in_stack(measured, machine, request.stack)
    planner = Planner(spec, machine, profile=profile)
    limits: dict[str, Any] = {"memory_limit": limit, "host_memory_limit": host_limit, "search": search}
    asked = {"global_batch_size": request.global_batch_size, **limits}
    with told(f"searching plans for {counted(spec.num_layers, 'layer')} on {counted(machine.world_size, 'device')}"):
        result = planner.tune(**asked)
    fitting = plan_that_fits(planner, result, asked, say)
    result, asked = fitting.result, fitting.asked
    limits = {name: value for name, value in asked.items() if name != "global_batch_size"}
    compared = None
    if request.compare:
        rivals = {name: Planner(other, machine, profile=profile) for name, other in _rivals(network).items()}
        batch = request.global_batch_size
        others = baselines(planner, global_batch_size=batch, tell=say, others=rivals, **limits)
        compared = compare_plans(result.plan, others)
    plan = with_units(planner.model, replace(result.plan, fingerprint=_made_for(spec, result.plan)))
    return FoundPlan(
        planner=planner,
        asked=asked,
        result=result,
        plan=plan,
        estimate=fitting.estimate,
        precision_note=precision.note,
        restricted=(*unshared(plan, search), *restricted, *fitting.notes),
        compared=compared if compared is None else (replace(compared[0], plan=plan), *compared[1:]),
    )


def _rivals(network: NetworkRequest) -> "dict[str, ModelSpec]":
    """The network in the precision of tools that train in bfloat16 in another way than was asked for."""
    from lightning_mist.explain import REST, WITH_AUTOCAST

    if network.master_weights:
        mixed = describe_network(replace(network, precision="bf16-mixed", master_weights=False))
        return dict.fromkeys(WITH_AUTOCAST, mixed)
    if network.precision != "bf16-mixed":
        return {}
    own = describe_network(network)
    return dict.fromkeys(WITH_AUTOCAST, own) | {
        REST: describe_network(replace(network, precision="bf16-true", master_weights=True))
    }


def _degrees(search: SearchSpace, machine: "AnyCluster") -> tuple[int, ...]:
    """The degrees in which devices of any part of a machine may share layers."""
    from lightning_mist.tuner import degrees_to_try

    return tuple(sorted({n for part in machine.parts for n in degrees_to_try(search, part.devices_per_node)}))


def _show(found: FoundPlan, why: "Explanation", *, json: bool, explain: bool) -> None:
    from lightning_mist.explain import explanation_data, main_reasons, render_explanation, render_sections
    from lightning_mist.tuner.options import OPTIONS
    from lightning_mist.tuner.select import CLOSED_FORM_AND_CLOCK

    if json:
        more: dict[str, Any] = {"explanation": explanation_data(why)} if explain else {}
        if found.compared is not None:
            more["compare"] = comparison_json(found.compared)
        notes = (*_not_executed(found), *found.result.proof, *found.result.compared, *found.notes)
        print_json(found.plan, memory=found.memory, search=_search_data(found.result), notes=notes, **more)
        return
    if not explain:
        answer(short_text(found, main_reasons(why), width=min(SHORT_COLUMNS, terminal_width())))
        if found.compared is not None:
            print_comparison(found.compared, found.planner.spec)
        return
    show_text(_subject(found))
    show_text(f"plan: {recipe_of(found.plan)}")
    display(render, found.plan, devices=devices_of(found.plan, found.planner.cluster))
    for line in (found.memory, *_not_executed(found)):
        show_text(line)
    answer()
    display(render_explanation, why)
    if found.compared is not None:
        print_comparison(found.compared, found.planner.spec)
    answer()
    display(
        render_sections,
        (
            ("how sure it is that this plan is the best", (*found.result.proof, CLOSED_FORM_AND_CLOCK)),
            ("the best plans met of other shapes", found.result.compared),
            ("what to know of this plan, and where its numbers come from", found.notes),
            ("what the search is tuned with (lightning_mist.tuner.options says why)", tuple(OPTIONS.lines())),
        ),
    )


SHORT_COLUMNS = 100
"""Columns of text of what is said of a plan in short."""

_MOST_NOTES = 3


def short_text(found: FoundPlan, reasons: Sequence[str], *, width: int) -> str:
    """A plan on one screen: what was asked for, the plan, its speed, its memory, why, and what to know before using it.

    Args:
        reasons: Why this plan, in short sentences.
        width: Columns of text at most.
    """
    plan = found.plan
    notes = [*_not_executed(found), *found.cautions]
    left = max(0, len(notes) - _MOST_NOTES)
    lines = [
        _subject(found),
        "",
        *_item("plan", recipe_of(plan), width),
        *_item("speed", speed_line(plan), width),
        *_item("memory", found.memory, width),
        *(line for number, text in enumerate(reasons) for line in _item("" if number else "why", f"- {text}", width)),
        *(
            f"{'' if number else 'note':8}{shorten(text, width - 8, placeholder=' ...')}"
            for number, text in enumerate(notes[:_MOST_NOTES])
        ),
        "",
        f"{f'{left} more notes, all' if left else 'All'} reasons, tables and sources: --explain or --html report.html",
    ]
    return "\n".join([*wrap(lines[0], width), *lines[1:]])


def _item(name: str, text: str, width: int) -> list[str]:
    """A line of text behind a name, as many lines as it takes."""
    hanging = " " * (10 if text.startswith("- ") else 8)
    return wrap(
        text,
        width,
        initial_indent=f"{name:8}",
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _subject(found: FoundPlan) -> str:
    """What was asked for, in a line."""
    spec, cluster = found.planner.spec, found.planner.cluster
    parameters = dict(found.plan.fingerprint).get("num_parameters")
    size = "" if parameters is None else f" ({int(parameters):,} parameters)"
    rows = counted(found.plan.global_batch_size, "row")
    tokens = "" if spec.sequence_length is None else f" of {spec.sequence_length:,} tokens"
    precision = f"{spec.precision_text}{found.precision_note}"
    return f"{spec.name}{size} in {precision} with {spec.optimizer.name} on {cluster.text}: {rows}{tokens} per step"


def _not_executed(found: FoundPlan) -> tuple[str, ...]:
    """What the runtime does not execute yet of a plan, in one line."""
    from lightning_mist.runtime.support import unsupported

    said = unsupported(found.plan)
    return (f"a forecast: this version does not execute yet {'; '.join(said)}",) if said else ()


def _search_data(result: "TuneResult") -> dict[str, Any]:
    return {
        "status": result.status,
        "bound": result.bound,
        "gap": result.gap,
        "certified": result.certified,
        "closed_form_seconds": result.closed_form_seconds,
        "stats": asdict(result.stats),
        "alternatives": [
            {"name": item.name, "step_seconds": item.predicted.step_seconds} for item in result.alternatives
        ],
    }


def _made_for(spec: "ModelSpec", plan: Plan) -> tuple[tuple[str, str], ...]:
    versions = [(name, importlib.metadata.version(name)) for name in ("lightning-mist", "torch")]
    return fingerprint_of(
        spec.module_map,
        world_size=plan.world_size,
        batch_rows=plan.global_batch_size // plan.num_loaders,
        precision=spec.precision,
        master_weights=spec.master_weights,
        versions=versions,
    )
