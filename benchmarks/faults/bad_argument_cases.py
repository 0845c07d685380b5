"""Arguments of ``MistStrategy`` that are of another type, out of range or contradict each other."""

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.faults.small_fits import PLANS
from lightning_mist import Plan, SearchSpace

ANYTHING: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    float("nan"),
    "",
    "x",
    "yes",
    b"x",
    [],
    {},
    (),
    object(),
    10**400,
    print,
)
"""Values of all types; what an argument takes of them is left out by :data:`TAKEN`."""

_FLAG = (True,)
_PATHS = (None, "x", "yes")

TAKEN: Mapping[str, tuple[Any, ...]] = {
    "plan": (),
    "memory_limit": (None, 10**400),
    "host_memory_limit": (None, 0, 1.5, 10**400),
    "offload_directory": _PATHS,
    "search": (None,),
    "data_parallel_size": (None, 10**400),
    "cluster": (None,),
    "blocks": (None,),
    "plan_path": _PATHS,
    "profile_directory": _PATHS,
    "report_path": _PATHS,
    **dict.fromkeys(
        (
            *("correct_profile", "self_check", "verbose", "dry_run", "save_distributed_checkpoint", "master_weights"),
            "gradient_as_bucket_view",
        ),
        _FLAG,
    ),
    "save_asynchronously": (),
    "model_averaging_period": (None, 10**400),
    "process_group_backend": (None,),
    "timeout": (None,),
    "start_method": (),
    "find_unused_parameters": (None, True),
}
"""By argument, what of anything is no mistake."""

_SEEN_LATER = ("plan", "cluster", "blocks", "process_group_backend", "memory_limit")
"""Whether these are right depends on files, machines and modules."""

FURTHER: Mapping[str, tuple[Any, ...]] = {
    "memory_limit": ("22 G", "-1GiB", "1XB", "1,5GiB", "0x10", "GiB", "1e400GiB", "22GiB!", "9" * 400 + "GiB", 1, "1B"),
    "host_memory_limit": ("22 G", "-1GiB", "1XB", "GiB", "22GiB!"),
    "plan": ("none.json", "Auto", "auto ", "/", "/dev/null", "plan", "ddp", "zero3", Path("none.json"), Path()),
    "cluster": (
        "0x8xL4",
        "4x8x",
        "4xL5",
        "1x8xL4",
        "2xcpu+2xL4",
        "L4",
        "none.yaml",
        "none.json",
        "2xcpu:0GiB",
        "local",
    ),
    "blocks": ("layers", "blocks.0", "head", "block", "blocks.blocks", "..", "0"),
    "data_parallel_size": (3, 4, 10**9, "2"),
    "timeout": (timedelta(0), timedelta(seconds=-1), 30, "0:30:00"),
    "start_method": ("thread", "FORK", "popen ", 1),
    "process_group_backend": ("nccl2", "gloo "),
    **dict.fromkeys(("plan_path", "report_path"), ("/", "/proc/none/plan.json", "/dev/null/plan.json")),
    **dict.fromkeys(("profile_directory", "offload_directory"), ("/dev/null", "/dev/null/x")),
}

NAMES = (
    "memroy_limit",
    "plans",
    "Plan",
    "device",
    "precision",
    "zero_stage",
    "num_microbatches",
    "module",
    "device_ids",
)
NAMES += (
    "devices",
    "strategy",
    "cpu_offload",
    "sharding_strategy",
    "verbos",
    "find_unused_parameter",
    "x y",
    "",
)

SPACES: Mapping[str, tuple[Any, ...]] = {
    "max_stages": (0, -1, "x", 1.5, True, []),
    **dict.fromkeys(
        ("num_stages", "num_microbatches", "microbatch_sizes", "devices_per_stage", "data_parallel_degrees"),
        ((), (0,), (-1,), ("x",), (1.5,), "x", 5.5, (3,), (10**9,), (None,)),
    ),
    "tensor_parallel_degrees": ((), (0,), (3,), ("x",), "x"),
    "zero_stages": ((), (4,), (-1,), ("x",), "x", (1.5,)),
    "shard_degrees": ((0,), (3,), ("x",), (1,)),
    "layer_cuts": ((), (0,), (9,), ("x",), "x"),
    "equal_stages": ("x", 5, None),
    "sequence_parallel": ("x", 5),
    "checkpointing": ("x", 5, None),
    "checkpointed_shares": ((2.0,), (-0.5,), ("x",), (float("nan"),)),
    "checkpointing_kinds": ((), ("half",), "half", 5),
    "offload": (("weights",), "weights", 5, (5,)),
    "offload_ratios": ((2.0,), (-0.5,), ("x",), (float("nan"),)),
    "schedules": ((), ("2f2b",), "1F1B", 5),
    "chunks": ((), (1,), ("x",), 0),
    "tail_chunks": ((), (0,), ("x",), 0),
    "solver_seconds": (-1, 0, float("nan"), "x", None),
    "data_parallel_size": (0, 3, "x"),
}

TOGETHER: tuple[dict[str, Any], ...] = (
    {"save_asynchronously": True},
    {"dry_run": True, "start_method": "spawn"},
    {"search": SearchSpace(data_parallel_size=1)},
    {"search": SearchSpace(data_parallel_size=2), "data_parallel_size": 1},
    {"search": SearchSpace(num_stages=(2,)), "ddp_comm_hook": print, "memory_limit": "1GiB"},
    {"search": SearchSpace(num_stages=(7,))},
    {"search": SearchSpace(zero_stages=(3,), num_stages=(2,), devices_per_stage=(1,))},
    {"master_weights": True},
    {"master_weights": True, "plan": PLANS["pp2"]},
    {"data_parallel_size": 1, "plan": PLANS["zero1"]},
    {"data_parallel_size": 2, "plan": PLANS["zero1"], "ddp_comm_hook": print},
    {"plan": PLANS["pp2"], "ddp_comm_hook": print},
    {"plan": PLANS["zero3"], "model_averaging_period": 2, "ddp_comm_state": object()},
    {"plan": PLANS["offloaded"], "host_memory_limit": 1},
    {"plan": PLANS["plain"], "memory_limit": 1},
    {"plan": PLANS["pp2"], "blocks": "none"},
)


def argument_sets(fast: bool = False) -> Iterator[tuple[str, str, Callable[[], Mapping[str, Any]]]]:
    """What is wrong (its family and a text), and what makes the arguments, which may fail itself.

    Args:
        fast: Only those that are refused before anything is planned.
    """
    for name, taken in TAKEN.items():
        for value in ANYTHING:
            if fast and name in _SEEN_LATER and isinstance(value, (str, int, float)):
                continue
            if not any(value is item or (type(value) is type(item) and value == item) for item in taken):
                yield "a value of another type", f"{name} = {value!r:.40}", _made({name: value})
    for name in NAMES:
        yield "a name that nobody has", name, _made({name: 1})
    for name, values in FURTHER.items() if not fast else ():
        for value in values:
            yield "a value", f"{name} = {value!r:.40}", _made({name: value})
    for name, values in SPACES.items() if not fast else ():
        for value in values:
            yield "a search space", f"{name} = {value!r:.40}", _searched(name, value)
    for given in TOGETHER if not fast else ():
        text = ", ".join(f"{k} = {'a plan' if isinstance(v, Plan) else v!r:.60}" for k, v in given.items())
        yield "what does not go together", text, _made(given)


def _made(given: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
    return lambda: given


def _searched(name: str, value: Any) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"search": SearchSpace(**{name: value})}
