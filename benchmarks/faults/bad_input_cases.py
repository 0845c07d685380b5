"""What a user may type that is wrong, for every command of ``lightning-mist``: each input is one that must be refused.

Good arguments, cluster files, configurations, plans and profiles are spoilt, one thing at a time. The order and the
choice are those of a seed.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.faults.spoiling import WRONG, Files, broken, places, with_value, without, wrong_values
from lightning_mist.hardware import catalog_profile, parse_cluster, write_profile
from lightning_mist.plan import plan_of, save
from lightning_mist.plan.codec import from_json, to_json

TRAP = "lightning_mist_trap"
"""A module that nobody may import: it leaves a file called ``sprung``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something that must be refused.

    Attributes:
        family: What is wrong, for tables.
        arguments: What stands behind the command's name.
    """

    family: str
    arguments: tuple[str, ...]


PLAN = {"model": "gpt3-1.3b", "cluster": "2xL4", "global-batch-size": "8", "seq-len": "512"}
ESTIMATE = {**PLAN, "closed-form": None}

CONFIGURATION: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "rms_norm_eps": 1e-6,
}

CLUSTER: dict[str, Any] = {
    "nodes": 1,
    "devices_per_node": 2,
    "device": "L4",
    "memory": "22GiB",
    "intra_node": {"bandwidth": "32 GB/s", "latency": "20 us"},
    "inter_node": {"bandwidth": "100 Gbit/s", "latency": "50 us"},
    "host": {"to_device": "25 GB/s", "to_host": "26 GB/s", "per_node": "100 GB/s"},
    "host_memory": "96GiB",
}

MIXED: dict[str, Any] = {
    "parts": [{**CLUSTER, "nodes": 1}, {"nodes": 1, "devices_per_node": 2, "device": "A100-40"}],
    "link": {"bandwidth": "25 Gbit/s", "latency": "50 us"},
}

WHOLE = ("0x10", "0o17", "0b11", "016", "1e3", "1.5", "8.0", "1_000", "1,5", "ten", "٨", "12:30", "nan", "inf", "-")
WHOLE += ("", " ", "{}", "[[1]]", "8 8", "true", "+-3", "~x", "*", "&a", "!!int 8", "'8", "9" * 5000, "08", "\t")
NUMBERS = ("nan", ".nan", "inf", "-.inf", "1e999", "0x1p3", "1:30.5", "", "ten", "1,5x", "true", "[", "!!float 1", "1e")
COUNTS = ("global-batch-size", "seq-len")
ESTIMATE_COUNTS = ("data-parallel-degree", "tensor-parallel-degree", "context-parallel-degree", "pipeline-stages")
ESTIMATE_COUNTS += ("chunks", "num-microbatches", "microbatch-size", "zero-stage")
LISTS = ("num-stages", "num-microbatches", "microbatch-sizes", "layer-cuts", "devices-per-stage", "zero-stages")
LISTS += ("data-parallel-degrees", "tensor-parallel-degrees", "chunks")
SIZES = (
    "lots",
    "-1GiB",
    "1XB",
    "22 G",
    "nan",
    "1e400GiB",
    "9" * 400 + "GiB",
    "GiB",
    "0",
    "1,5GiB",
    "0x10",
    "",
    "22GiB!",
)
CLUSTERS = ("0x8xL4", "4x0xL4", "0xL4", "4x8x", "x8xL4", "x", "4x8xL4x", "-4x8xL4", "4x8xL5", "4xL4:0GiB", "4xL4:lots")
CLUSTERS += ("L4+", "+", "", " ", "4x8", "8", "4*8*L4", "4×8×L4", "1x1x1xL4", "2xL4:", "2xcpu", "2xcpu:1GiB+2xL4")
CLUSTERS += ("9" * 30 + "xL4", "local:", "local:0", "local:-1", "local:two", "local:1.5", "LOCAL:x", "99999999xL4")
CLUSTERS += ("none.yaml", "none.yml", "none.json", ".yaml", ".json", "2xL4:22GiB:22GiB", "2xL4;2xL4", "null", "[2xL4]")
MODELS = (
    "gpt5",
    "gpt3-1.3B",
    "",
    " ",
    "llama",
    ".json",
    "none.json",
    "config.yaml",
    ":",
    "a:",
    ":b",
    ".a:b",
    "a.:b",
    "a b:c",
)
MODELS += (
    "os:system",
    "json:dumps",
    "os:getcwd",
    "sys:exit",
    "os:abort",
    "time:sleep",
    "this:s",
    "antigravity:fly",
    "os:name",
)
MODELS += (
    f"{TRAP}.py:make",
    f"{TRAP}/x:make",
    f"./{TRAP}.py:make",
    f"{TRAP}:make()",
    f"{TRAP}:1",
    f"{TRAP}:a.b",
    "1a:b",
    "a-b:c",
)
MODELS += (
    "lambda:x",
    "no.such.module:make",
    "builtins:print",
    "builtins:input",
    "..:x",
    "a:b:c",
    "a\nb:c",
    "\N{SNOWMAN}:make",
)
CHOICES: dict[str, tuple[str, ...]] = {
    "schedules": ("2f2b", "1F1B", "", "[1f1b", "{}", "3"),
    "checkpointing-kinds": ("partial", "", "full,none"),
    "offload": ("weights", "parameters,weights", "1", "{}"),
    "precision": ("8bit", "bf16", "32", "", "fp8", "16-Mixed", "bf16-mixed "),
    "stack": ("jit", "", "Eager", "torch"),
    "optimizer": (
        "",
        " ",
        "Adamm",
        "lr_scheduler",
        "torch.optim.AdamW",
        "adamw",
        "Optimizer ",
        f"{TRAP}.Make",
        "1",
        "__name__",
    ),
    "equal-stages": ("3", "maybe", ""),
    "sequence-parallel": ("3", "maybe", ""),
    "checkpointing": ("3", "maybe", ""),
}
SWEEPS = (
    "",
    " ",
    "x",
    "=",
    "=1",
    "microbatch_size",
    "microbatch_size=",
    "microbatch_size=,",
    "foo=1",
    "zero_stage=1 zero_stage=2",
)
SWEEPS += (
    "microbatch_size=x",
    "zero_stage=9",
    "pipeline_stages=0",
    "pipeline_stages=-2",
    "seq_len=0",
    "microbatch_size=0x1",
)
ALLOCATORS = (
    "x",
    "x:1",
    "expandable_segments:maybe",
    "max_split_size_mb:x",
    "max_split_size_mb:-1",
    "backend:cudaMallocAsync",
)
ALLOCATORS += (
    "roundup_power2_divisions:x",
    "garbage_collection_threshold:7",
    "max_split_size_mb",
    "::",
    "max_split_size_mb:nan",
)
OFFLOADS = (
    "x",
    "x=1",
    "optimizer",
    "optimizer=",
    "optimizer=2",
    "optimizer=-1",
    "optimizer=nan",
    "optimizer=x",
    "optimizer=inf",
)
OFFLOADS += ("=1", "optimizer:1", "optimizer=1,activations=1", "__class__=1")


def _line(command: str, values: dict[str, str | None], **changes: str | None) -> tuple[str, ...]:
    """A command line; options with None have no value."""
    options = {**values, **{name.replace("_", "-"): value for name, value in changes.items()}}
    words = [command]
    for name, value in options.items():
        words += [f"--{name}"] if value is None else [f"--{name}={value}"]
    return tuple(words)


def _plan(**changes: str | None) -> tuple[str, ...]:
    return _line("plan", {**PLAN}, **changes)


def _estimate(**changes: str | None) -> tuple[str, ...]:
    return _line("estimate", {**ESTIMATE}, **changes)


def option_cases() -> Iterator[Case]:
    """Values that an option does not take."""
    for value in WHOLE:
        for name in (*COUNTS, "max-stages"):
            yield Case(family="a whole number", arguments=_plan(**{name: value}))
        for name in (*COUNTS, *ESTIMATE_COUNTS):
            yield Case(family="a whole number", arguments=_estimate(**{name: value}))
        yield Case(family="a whole number", arguments=("profile", f"--devices={value}"))
        for name in LISTS if value.strip() and value != "1,5" else ():
            yield Case(family="whole numbers", arguments=_plan(**{name: f"[{value}]"}))
            yield Case(family="whole numbers", arguments=_plan(**{name: f"1,{value},2"}))
    for value in ("0", "-1", "-8", "-999999999999"):
        for name in (*COUNTS, "max-stages"):
            yield Case(family="a count below one", arguments=_plan(**{name: value}))
        for name in (*COUNTS, *ESTIMATE_COUNTS[:-1]):
            yield Case(family="a count below one", arguments=_estimate(**{name: value}))
        yield Case(family="a count below one", arguments=("profile", f"--devices={value}"))
        for name in LISTS:
            if name != "zero-stages" or value != "0":
                yield Case(family="a count below one", arguments=_plan(**{name: value}))
    for value in (*NUMBERS, "0", "-1"):
        for name in ("explain-seconds", "solver-seconds"):
            yield Case(family="a number", arguments=_plan(**{name: value}))
    for value in (*NUMBERS, "-0.5", "1.5"):
        for name in ("offload-ratios", "checkpointed-shares"):
            yield Case(family="fractions", arguments=_plan(**{name: f"0,{value}"}))
    for value in SIZES:
        yield Case(family="a size", arguments=_plan(memory_limit=value))
        if value != "0":
            yield Case(family="a size", arguments=_plan(host_memory_limit=value))
        yield Case(family="a size", arguments=_estimate(memory_limit=value))
    for name, values in CHOICES.items():
        for value in values:
            yield Case(family="a choice", arguments=_plan(**{name: value}))
            if name in ("precision", "optimizer", "schedule"):
                yield Case(family="a choice", arguments=_estimate(**{name: value}))
    for value in ("x", "-1", "1.5", "0x1", "999", "ALL", " "):
        yield Case(family="a choice", arguments=_estimate(checkpointed_layers=value))
    for name, values in (("sweep", SWEEPS), ("allocator", ALLOCATORS), ("offload", OFFLOADS)):
        for value in values:
            yield Case(family=f"a text of {name}", arguments=_estimate(**{name: value}))
    for value in ("tpu", "gpu", "", "CPU", "cuda"):
        yield Case(family="a choice", arguments=("profile", f"--accelerator={value}"))
    for value in (*CHOICES["precision"],):
        yield Case(family="a choice", arguments=("profile", f"--precision={value}"))
    yield Case(family="a count beyond the machine", arguments=("profile", "--devices=100000"))
    yield Case(family="a count beyond the machine", arguments=_plan(cluster="local:100000"))


def name_cases() -> Iterator[Case]:
    """Networks and machines that are not there, or that are no such thing."""
    for value in CLUSTERS:
        yield Case(family="a cluster in words", arguments=_plan(cluster=value))
        yield Case(family="a cluster in words", arguments=_estimate(cluster=value))
    for value in MODELS:
        yield Case(family="a model's name", arguments=_plan(model=value))
        yield Case(family="a model's name", arguments=_line("estimate", {**PLAN}, model=value))


def shape_cases() -> Iterator[Case]:
    """Degrees, batches and limits that do not go together."""
    for degrees in (
        {"pipeline_stages": "3"},
        {"data_parallel_degree": "3"},
        {"tensor_parallel_degree": "16"},
        {"tensor_parallel_degree": "2", "data_parallel_degree": "2"},
        {"context_parallel_degree": "4"},
        {"sequence_parallel": None},
        {"chunks": "2"},
        {"num_microbatches": "3"},
        {"microbatch_size": "3"},
        {"num_microbatches": "4", "microbatch_size": "4"},
        {"zero_stage": "4"},
        {"schedule": "zb"},
        {"checkpointing": "half"},
        {"global_batch_size": "7"},
        {"pipeline_stages": "1000000"},
        {"plan": "none.json"},
        {"picture": "a.gif"},
        {"picture": "none/a.png"},
        {"picture": "a.png", "sweep": "zero_stage=1,2"},
    ):
        yield Case(family="what does not go together", arguments=_estimate(**degrees))
    for options in (
        {"layer_cuts": "30"},
        {"layer_cuts": "12,6"},
        {"layer_cuts": "6", "num_stages": "3"},
        {"layer_cuts": "6", "equal_stages": "true"},
        {"num_stages": "7"},
        {"devices_per_stage": "3"},
        {"data_parallel_degrees": "7"},
        {"tensor_parallel_degrees": "3"},
        {"microbatch_sizes": "5"},
        {"num_microbatches": "5"},
        {"memory_limit": "1MiB"},
        {"memory_limit": "100GiB"},
        {"master_weights": None, "precision": "32-true"},
        {"stack": "fused", "cluster": "1xL4+1xA100-40"},
        {"out": "none/plan.json"},
        {"out": "."},
        {"html": "none/a.html"},
        {"html": "."},
        {"chunks": "1"},
        {"max_stages": "0"},
        {"seq_len": "0"},
    ):
        yield Case(family="what does not go together", arguments=_plan(**options))
    yield Case(
        family="what does not go together", arguments=_line("plan", {k: v for k, v in PLAN.items() if k != "seq-len"})
    )


def command_cases() -> Iterator[Case]:
    """Commands and options that are not there, twice or not complete."""
    for line in (
        (),
        ("",),
        ("dance",),
        ("plans",),
        ("PLAN",),
        ("--zzz",),
        ("plan", "show"),
        ("-",),
        ("--", "plan"),
        ("null",),
    ):
        yield Case(family="a command", arguments=line)
    for command, good in (("plan", _plan()), ("estimate", _estimate())):
        for name in ("model", "cluster", "global-batch-size"):
            if command == "plan" or name != "global-batch-size":
                short = tuple(word for word in good if not word.startswith(f"--{name}="))
                yield Case(family="an option that is missing", arguments=short)
                yield Case(family="an option without its value", arguments=(*short, f"--{name}"))
        for unknown in (
            "--modle=x",
            "--clusters=x",
            "-m",
            "--seq_lenn=4",
            "--json=maybe",
            "extra",
            "--",
            "--zero=1",
            "--help-me",
        ):
            yield Case(family="an option", arguments=(*good, unknown))
    for line in (
        ("show",),
        ("simulate",),
        ("show", "a", "b"),
        ("simulate", "a", "--out=b"),
        ("profile", "x"),
        ("profile", "--out="),
    ):
        yield Case(family="an option", arguments=line)


def cluster_file_cases(files: Files, chance: random.Random) -> Iterator[Case]:
    """Cluster files."""

    def case(text: str) -> Case:
        line = _plan if chance.random() < 0.7 else _estimate
        return Case(family="a cluster file", arguments=line(cluster=files(text, chance.choice((".yaml", ".yml")))))

    def is_fine(path: tuple[Any, ...], value: Any) -> bool:
        # Numbers of bytes or seconds are sizes and durations too; what may be left out may be null.
        sizes = ("memory", "host_memory", "bandwidth", "latency", "to_device", "to_host", "per_node")
        number = isinstance(value, (int, float, str)) and not isinstance(value, bool)
        optional = ("memory", "intra_node", "inter_node", "host", "host_memory", "link")
        name = path[-1] if path else ""
        return (
            (name in sizes and number and str(value) not in ("x", "nan", "inf", "-1"))
            or (name in optional and value is None)
            or (name == "device" and type(value) is int)  # 4090
        )

    for good in (CLUSTER, MIXED):
        for document in wrong_values(good, skip=is_fine):
            yield case(yaml.safe_dump(document))
        for path, _ in places(good):
            if path and path[-1] in (
                "nodes",
                "devices_per_node",
                "device",
                "bandwidth",
                "latency",
                "to_device",
                "to_host",
            ):
                yield case(yaml.safe_dump(without(good, path)))
        for path, value in places(good):
            if isinstance(value, dict):
                yield case(yaml.safe_dump(with_value(good, (*path, chance.choice(("node", "devise", "", "x y"))), 1)))
        for path, value in places(good):
            if path and path[-1] in ("nodes", "devices_per_node"):
                for count in (0, -1, -(10**30), "2x", "0x2"):
                    yield case(yaml.safe_dump(with_value(good, path, count)))
            if path and isinstance(value, str) and path[-1] != "device":
                for text in (
                    "x",
                    "-1",
                    "5 parsec",
                    "",
                    "1e",
                    "0 GB/s" if path[-1] not in ("latency", "per_node") else "-1 us",
                    "9e999 GB/s",
                ):
                    yield case(yaml.safe_dump(with_value(good, path, text)))
    text = yaml.safe_dump(CLUSTER)
    for spoilt in (
        text.replace("nodes", "\tnodes", 1),
        text + "\tx: 1\n",
        "nodes: [1\ndevices_per_node: 2\n",
        "[" * 3000 + "]" * 3000,
        "{" * 3000 + "}" * 3000,
        "- " * 3000 + "x",
        f'nodes: !!python/object/apply:{TRAP}.make ["x"]\ndevices_per_node: 1\ndevice: L4\n',
        f"nodes: !!python/name:{TRAP}.make\ndevices_per_node: 1\ndevice: L4\n",
        f"!!python/module:{TRAP}\n",
        f'!!python/object/new:{TRAP}.Make ["x"]\n',
        "nodes: !!binary x\n",
        "nodes: !x 1\n",
        "a: &a [*a]\n",
        "nodes: *a\n",
        "a: &a {b: *a}\n",
        "--- 1\n--- 2\n",
        "nodes: 1\nnodes: : 2\n",
        "nodes: 'x\n",
        'nodes: "\\x"\n',
        "? [1, 2]\n: 3\n",
        "%YAML 9.9\n---\nx: 1\n",
        "x: |\n y\nz\n",
        "{nodes: 1, devices_per_node: 2, device: L4",
        "nodes: 1\n devices_per_node: 2\n",
        "nodes: 2001-99-99\ndevices_per_node: 1\ndevice: L4\n",
        "nodes: 0x\ndevices_per_node: 1\ndevice: L4\n",
        "nodes: 1\ndevices_per_node: 1\ndevice: L4\n1: 2\n",
        "nodes: 1\ndevices_per_node: 1\ndevice: L4\n[1, 2]: 2\n",
        "nodes: 1\ndevices_per_node: 1\ndevice: L4\n{a: 1}: 2\n",
        "a: &a [x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\n"
        "c: &c [*b, *b, *b, *b, *b, *b, *b, *b]\nd: [*c, *c, *c, *c, *c, *c, *c, *c]\n",
        "",
        "\x00",
        "parts: []\n",
        "parts: [{}]\n",
        "parts: 3\n",
        "parts:\n",
    ):
        yield case(spoilt)
    for path in files.every_kind(".yaml"):
        yield Case(family="a cluster file", arguments=_plan(cluster=path))


def configuration_cases(files: Files, chance: random.Random) -> Iterator[Case]:
    """Configurations of language models."""

    def case(text: str, *, closed: bool | None = None) -> Case:
        path = files(text, ".json")
        is_closed = chance.random() < 0.4 if closed is None else closed
        line = _estimate(model=path, seq_len="16") if is_closed else _plan(model=path, seq_len="16")
        return Case(family="a configuration", arguments=line)

    good = CONFIGURATION
    counts = [name for name, value in good.items() if isinstance(value, int)]
    for name in counts:
        for value in (0, -64, "x", 1.5, [], {}, True, "64", [64], float("nan"), -(10**30)):
            for closed in (True, False):
                yield case(json.dumps({**good, name: value}), closed=closed)
    for value in ("zzz", "", 5, {}, "bert ", "LLAMA"):
        yield case(json.dumps({**good, "model_type": value}), closed=False)
    for value in ("x", [], {}):
        yield case(json.dumps({**good, "rms_norm_eps": value}), closed=False)
    for value in (["X"], ["LlamaForSequenceClassification"], "x", 5, [5], {}, [None]):
        yield case(json.dumps({**good, "architectures": value}), closed=False)
    for heads in (3, 7, 9, 63):
        yield case(json.dumps({**good, "num_attention_heads": heads}))
        yield case(json.dumps({**good, "num_key_value_heads": heads}))
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        yield case(json.dumps({key: value for key, value in good.items() if key != name}), closed=True)
    for extra in (
        {"auto_map": {"AutoConfig": f"{TRAP}.Make"}, "model_type": "zzz"},
        {"hidden_act": "zzz"},
        {"hidden_act": 5},
    ):
        yield case(json.dumps({**good, **extra}), closed=False)
    for text in broken(json.dumps(good), chance):
        yield case(text)
    for path in files.every_kind(".json"):
        yield Case(family="a configuration", arguments=_plan(model=path))


def plan_file_cases(files: Files, folder: Path, chance: random.Random) -> Iterator[Case]:
    """Plan files, for every command that reads one."""
    save(plan_of(4, world_size=2, global_batch_size=8, pipeline_stages=2, num_microbatches=4), folder / "good.json")
    made = _priced()
    (folder / "priced.json").write_text(made, encoding="utf-8")
    good = json.loads(made)

    def case(text: str) -> Case:
        path, other = files(text, ".json"), str(folder / "priced.json")
        given = {key: value for key, value in ESTIMATE.items() if key != "global-batch-size"}
        lines = [("show", path), ("show", other, f"--against={path}"), ("simulate", path), ("show", path, "--json")]
        return Case(family="a plan file", arguments=chance.choice([*lines, _line("estimate", given, plan=path)]))

    def is_fine(path: tuple[Any, ...], value: Any) -> bool:
        if path and path[-1] == "sequence_length" and value is None:
            return True  # not every row is a sequence
        negative = isinstance(value, int) and not isinstance(value, bool) and value < 0
        return (negative and "predicted" in path) or "fingerprint" in path or (value == {} and path == ("fingerprint",))

    for document in wrong_values(good, skip=is_fine):
        yield case(json.dumps(document))
    for path, value in places(good):
        if (
            isinstance(value, dict)
            and path != ("fingerprint",)
            and (not path or path[-1] not in ("breakdown", "spent", "needs"))
        ):
            yield case(json.dumps(with_value(good, (*path, chance.choice(("stage", "", "Layers", "zero"))), 1)))
    for key in ("schema", "global_batch_size", "num_microbatches", "stages"):
        yield case(json.dumps(without(good, (key,))))
    for key in ("layers", "devices", "microbatch_size"):
        yield case(json.dumps(without(good, ("stages", 0, key))))
    numbers: dict[tuple[Any, ...], tuple[Any, ...]] = {
        ("schema",): (0, 2, 99),
        ("global_batch_size",): (0, 7, 9, 10**12),
        ("num_microbatches",): (0, 3, 10**12),
        ("schedule",): ("", "1F1B", "gpipes"),
        ("stages",): ([],),
        ("stages", 0, "layers"): ([0, 3], [1, 2], [2, 0], [0], [0, 1, 2], [-1, 2]),
        ("stages", 1, "devices"): ([1], [2], [1, 1], [], [-1], [10**12]),
        ("stages", 0, "microbatch_size"): (0, 3, 10**12),
        ("stages", 0, "data_parallel_degree"): (0, 2),
        ("stages", 0, "tensor_parallel_degree"): (0, 2),
        ("stages", 0, "context_parallel_degree"): (0, 2),
        ("stages", 0, "sequence_parallel"): (True,),
        ("stages", 0, "zero_stage"): (4, 99),
        ("stages", 0, "checkpointed_layers"): (99, 10**9),
        ("stages", 0, "checkpointing"): ("", "half"),
        ("stages", 0, "offload", "optimizer"): (1.5, -0.1),
        ("predicted", "transfers"): ("", "x"),
        ("predicted", "update_after"): ("", "x"),
        ("predicted", "stages"): ([], good["predicted"]["stages"][:1]),
    }
    for path, values in numbers.items():
        for value in values:
            yield case(json.dumps(with_value(good, path, value)))
    for text in broken(made, chance):
        yield case(text)
    for path in (*files.every_kind(".json"), "none.json", "", str(folder)):
        for line in (("show", path), ("simulate", path), ("show", str(folder / "priced.json"), f"--against={path}")):
            yield Case(family="a plan file", arguments=line)
    bare, priced = str(folder / "good.json"), str(folder / "priced.json")
    for line in (
        ("simulate", bare),
        ("show", bare, f"--timeline={folder}/a.png"),
        ("show", bare, f"--memory={folder}/a.png"),
        ("show", priced, "--timeline=a.gif"),
        ("show", priced, "--timeline="),
        ("show", priced, "--memory=a"),
        ("show", priced, f"--memory={folder}"),
        ("show", priced, f"--timeline={folder}/none/a.json"),
        ("show", priced, f"--timeline={folder}/none/a.png"),
        ("show", priced, f"--memory={folder}/none/a.png"),
        ("show", priced, "--memory-limit=4GiB"),
        *(("show", priced, f"--memory={folder}/a.png", f"--memory-limit={size}") for size in SIZES if size != "0"),
        _line("estimate", {**ESTIMATE}, plan=priced, global_batch_size="16"),
        _line("estimate", {k: v for k, v in ESTIMATE.items() if k != "global-batch-size"}, plan=priced, cluster="4xL4"),
        _line("estimate", {k: v for k, v in ESTIMATE.items() if k != "global-batch-size"}, plan=priced, zero_stage="1"),
        _line(
            "estimate",
            {k: v for k, v in ESTIMATE.items() if k != "global-batch-size"},
            plan=priced,
            sweep="zero_stage=1",
        ),
    ):
        yield Case(family="a plan file and options", arguments=line)
    yield from _huge_plans(files, good)


def _huge_plans(files: Files, good: Any) -> Iterator[Case]:
    """Plans whose numbers agree, and that no machine could go through."""
    for count in (10**9, 10**15):
        many = {**good, "num_microbatches": count, "global_batch_size": count * good["stages"][0]["microbatch_size"]}
        for line in (("simulate",), ("show", "--timeline=a.json")):
            path = files(json.dumps(many), ".json")
            yield Case(family="a plan beyond bounds", arguments=(line[0], path, *line[1:]))


def _priced() -> str:
    """A plan with a prediction, as text."""
    from lightning_mist.model.presets import KNOWN_OPTIMIZERS, PRESETS, preset_spec
    from lightning_mist.plan import SearchSpace
    from lightning_mist.tuner import Planner

    machine = parse_cluster("2xL4")
    spec = preset_spec(
        PRESETS["gpt3-1.3b"],
        name="gpt3-1.3b",
        precision="bf16-true",
        rows=4,
        length=512,
        degrees=(),
        optimizer=KNOWN_OPTIMIZERS["AdamW"],
        device_kind="cuda",
        capability=(8, 9),
    )
    assert spec is not None
    space = SearchSpace(num_stages=(2,), schedules=("1f1b",), offload=(), zero_stages=(0,))
    found = Planner(spec, machine).tune(global_batch_size=8, search=space)
    return to_json(from_json(to_json(found.plan)))


def profile_cases(files: Files, folder: Path, chance: random.Random) -> Iterator[Case]:
    """Profiles of machines."""
    machine = parse_cluster("2xL4")
    write_profile(catalog_profile(machine), folder / "profile.json", cluster=machine)
    good = json.loads((folder / "profile.json").read_text(encoding="utf-8"))

    def case(text: str) -> Case:
        line = _plan if chance.random() < 0.8 else _estimate
        return Case(family="a profile", arguments=line(cluster=files(text, ".json")))

    def is_fine(path: tuple[Any, ...], value: Any) -> bool:
        name = path[-1] if path else ""
        optional = ("intra_node", "inter_node", "host", "host_memory_bytes", "interference")
        whole = ("num_nodes", "devices_per_node", "group_size", "width", "memory_bytes", "host_memory_bytes")
        return (
            (name in optional and value is None) or "key" in path or (value == 1.5 and path[-1:] and name not in whole)
        )

    for path, value in places(good):
        wrong = [other for other in WRONG.get(type(value), ("x", [])) if not is_fine(path, other)]
        if "key" not in path:
            for other in chance.sample(wrong, min(3, len(wrong))):
                yield case(json.dumps(with_value(good, path, other)))
    required = ("schema", "profile", "cluster", "key")
    for name in required:
        yield case(json.dumps(without(good, (name,))))
    for name in ("device", "source", "compute", "memory_bytes_per_second", "operator_seconds", "collectives"):
        yield case(json.dumps(without(good, ("profile", name))))
    for name in ("num_nodes", "devices_per_node", "device"):
        yield case(json.dumps(without(good, ("cluster", name))))
    for path, values in {
        ("schema",): (0, 1, 99, "2"),
        ("cluster", "num_nodes"): (0, -1, 10**12),
        ("cluster", "devices_per_node"): (0, -1),
        ("cluster", "device", "memory_bytes"): (0, -1),
        ("cluster", "device", "kind"): ("tpu", "", "CUDA"),
        ("profile", "memory_bytes_per_second"): (0, -1.0),
        ("profile", "operator_seconds"): (-1.0,),
        ("profile", "compute"): ([],),
        ("profile", "compute", 0, "flops"): ([], [1.0]),
        ("profile", "compute", 0, "flops_per_second"): ([], [0.0], [-1.0]),
        ("profile", "host_to_device_bytes_per_second"): (-1.0,),
        ("profile", "interference", "compute_network"): (-0.1, 1.1),
    }.items():
        for item in values:
            yield case(json.dumps(with_value(good, path, item)))
    for text in broken(json.dumps(good), chance):
        yield case(text)
    for path_ in files.every_kind(".json"):
        yield Case(family="a profile", arguments=_plan(cluster=path_))


def every_case(folder: Path, seed: int = 0) -> list[Case]:
    """All of them, as files in a folder where they are about files."""
    chance, files = random.Random(seed), Files(folder)
    return [
        *command_cases(),
        *option_cases(),
        *name_cases(),
        *shape_cases(),
        *cluster_file_cases(files, chance),
        *configuration_cases(files, chance),
        *plan_file_cases(files, folder, chance),
        *profile_cases(files, folder, chance),
    ]
