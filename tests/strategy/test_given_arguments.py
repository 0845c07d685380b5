from datetime import timedelta
from pathlib import Path

import pytest

from benchmarks.faults.bad_argument_cases import argument_sets
from benchmarks.faults.series import is_deliberate
from lightning_mist import MistFabricStrategy, MistStrategy
from lightning_mist.strategy.given_arguments import Namespace

WRONG_TYPES = {
    **dict.fromkeys(("correct_profile", "self_check", "verbose", "gradient_as_bucket_view"), ("yes", 1, None, [])),
    **dict.fromkeys(("plan_path", "profile_directory", "offload_directory", "blocks"), (5, True, [], {})),
    "plan": (None, 5, True, {}, ["plan.json"]),
    "search": ({}, "everything", 5),
    "cluster": (5, True, {}, ["L4"]),
    "find_unused_parameters": ("yes", 1),
    "process_group_backend": (5, True),
    "timeout": (30, "1 h", True),
    "start_method": (None, 5),
}
OF_LIGHTNING_ALONE = {
    **dict.fromkeys(("dry_run", "save_distributed_checkpoint", "save_asynchronously", "master_weights"), ("no", 0)),
    "report_path": (5, True),
    "data_parallel_size": (True, "2", 1.5),
    "model_averaging_period": (True, "2", 1.5),
}


def cases(values):
    return [(name, value) for name, wrong in values.items() for value in wrong]


@pytest.mark.parametrize(("name", "value"), cases({**WRONG_TYPES, **OF_LIGHTNING_ALONE}))
def test_values_of_another_type_are_refused_where_they_are_given(name, value):
    for make in (MistStrategy, MistFabricStrategy)[: 1 if name in OF_LIGHTNING_ALONE else 2]:
        with pytest.raises(TypeError, match=rf"^{name} = .*: .* is needed"):
            make(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("memory_limit", True, "True is not a size: write"),
        ("memory_limit", -1, "sizes are finite and not negative"),
        ("host_memory_limit", "lots", "'lots' is not a size: write"),
        ("data_parallel_size", 0, "at least 1 batch is loaded"),
        ("model_averaging_period", 0, "after 1 step at least"),
        ("timeout", timedelta(0), "longer than 0 s"),
        ("start_method", "thread", "choose one of popen, spawn"),
        ("blocks", "", "leave it out to let blocks be found"),
        ("plan_path", "", "leave it out for none"),
        ("report_path", Path("/"), "in a folder is needed"),
        ("profile_directory", __file__, "where no file is"),
        ("offload_directory", "", "or leave it out"),
        ("report_path", f"{__file__}/report.json", "leave it out for none"),
    ],
)
def test_values_that_break_a_rule_are_refused_where_they_are_given(name, value, said):
    with pytest.raises(ValueError, match=rf"^{name} = .*{said}"):
        MistStrategy(**{name: value})


@pytest.mark.parametrize("make", [MistStrategy, MistFabricStrategy])
def test_an_argument_that_nobody_has_is_refused_and_the_nearest_named(make):
    with pytest.raises(TypeError, match=r"^memroy_limit = '1GiB': neither .* did you mean memory_limit\?"):
        make(memroy_limit="1GiB")
    with pytest.raises(TypeError, match=r"^bucket_cap = 5: .* did you mean bucket_cap_mb\?"):
        make(bucket_cap=5)
    with pytest.raises(TypeError, match=r"^module = 5: "):
        make(module=5)


def test_what_torch_and_paths_take_is_taken(tmp_path):
    MistStrategy(bucket_cap_mb=5, static_graph=True, plan=tmp_path / "plan.json", timeout=None)
    MistStrategy(plan_path=tmp_path / "plan.json", profile_directory=tmp_path, memory_limit=2.5e9)


def test_values_of_all_types_are_refused_or_taken():
    """Some of those with which ``benchmarks.faults.bad_runs`` starts runs."""
    tried = list(argument_sets(fast=True))[::3]
    for _, text, make in tried:
        with pytest.raises((TypeError, ValueError)) as error:
            MistStrategy(**make())
        assert is_deliberate(error.value), text
    assert len(tried) > 80


@pytest.mark.parametrize("root", ["lightning.pytorch", "pytorch_lightning"])
def test_each_copy_of_lightning_has_its_own_parts(root):
    names = Namespace(root)
    assert names.fitting == "fit"
    assert names.is_param_in_hook_signature(lambda batch, batch_idx: None, "batch_idx", min_args=2)
