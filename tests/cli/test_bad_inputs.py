import json
import random
import sys
from itertools import islice

import pytest

from benchmarks.faults.bad_input_cases import (
    CONFIGURATION,
    cluster_file_cases,
    command_cases,
    option_cases,
    profile_cases,
    shape_cases,
)
from benchmarks.faults.bad_inputs import WELL, called, trapped, verdict
from benchmarks.faults.spoiling import Files
from lightning_mist.cli import command
from lightning_mist.model.presets import check_name, read_configuration
from tests.cli.networks import refused
from tests.cli.test_plan_command import plan_arguments


def test_bad_inputs_of_every_kind_are_refused_in_one_line(tmp_path):
    """Some of the thousands that ``benchmarks.faults.bad_inputs`` tries."""
    with trapped(tmp_path):
        files, chance = Files(tmp_path), random.Random(0)
        texts = [case for case in (*command_cases(), *option_cases(), *shape_cases()) if "sweep" not in case.family]
        cases = [
            *{case.family: case for case in texts}.values(),
            *texts[::40],
            *islice(cluster_file_cases(files, chance), 8),
            *islice(profile_cases(files, tmp_path, chance), 8),
        ]
        found = [(case, *called(case.arguments)) for case in cases]
        wrong = [(case, said) for case, status, said in found if verdict(status, said, tmp_path) != WELL]
    assert len(found) > 50
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train.py:make", "write the module's name, train:make"),
        ("./models/train.py:make", "write the module's name, models.train:make"),
        ("train:make()", "does not name a function as package.module:function does"),
        (":make", "does not name a function"),
        ("os:system", "os is a module of Python itself, which makes no network"),
        ("json:dumps", "json is a module of Python itself"),
        ("none.json", "there is no such file"),
    ],
)
def test_what_names_no_model_is_refused_without_importing_anything(text, said):
    before = set(sys.modules)
    with pytest.raises(ValueError, match="model") as error:
        check_name(text)
    assert said in str(error.value)
    assert set(sys.modules) == before


def test_a_module_of_one_s_own_may_be_called_as_one_of_python_s(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code.py").touch()
    check_name("code:make")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.cli.networks:refused", "cannot be called without arguments (missing a required argument: 'capsys')"),
        ("tests.cli.networks:__name__", "names a str: name a function"),
    ],
)
def test_what_is_no_function_for_it_is_the_name_s_fault(capsys, name, said):
    assert said in refused(capsys, *plan_arguments(model=name))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": -64}, "hidden_size = -64: a whole number of at least 1 is needed"),
        ({"vocab_size": True}, "vocab_size = True: a whole number"),
        ({"num_key_value_heads": 3}, "8 heads of queries share 3 of keys and values"),
        ({"num_hidden_layers": 10_000}, "10,000 layers: nothing is planned or estimated for more than 2,000"),
        ({"model_type": 5}, "model_type = 5: text is needed"),
        ({"architectures": "LlamaForCausalLM"}, "names are needed"),
    ],
)
def test_configurations_are_looked_at_before_they_are_used(tmp_path, changes, said):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGURATION))
    assert read_configuration(path) == CONFIGURATION
    path.write_text(json.dumps({**CONFIGURATION, **changes}))
    with pytest.raises(ValueError, match="model") as error:
        read_configuration(path)
    assert said in str(error.value)


@pytest.mark.parametrize("text", ["null", "[]", "[" * 3000, "{"])
def test_a_configuration_is_an_object(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="config"):
        read_configuration(path)


@pytest.mark.parametrize("value", ["0x10", "016", "1_000", "12:30", "1e3", "٨", ""])
def test_whole_numbers_are_written_in_digits(capsys, value):
    text = refused(capsys, *plan_arguments(global_batch_size=value))
    assert text.startswith("lightning-mist plan: error: --global-batch-size: a whole number is needed in place of ")


def test_memory_that_runs_out_is_told_in_a_line(capsys, monkeypatch):
    def exhausted(function, values):
        raise MemoryError("Unable to allocate 80 GiB")

    monkeypatch.setattr(command, "_call", exhausted)
    text = refused(capsys, "show", "x")
    assert "this takes more memory than this machine has (Unable to allocate 80 GiB)" in text
