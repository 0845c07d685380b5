import dataclasses
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.errors import PlanError
from lightning_mist.plan import Plan, Predicted, PredictedStage
from lightning_mist.plan.codec import from_json, load, save, to_json
from tests.plans import plans

TEXT = """{
 "schema": 1,
 "global_batch_size": 512,
 "num_microbatches": 64,
 "schedule": "1f1b",
 "stages": [
  {
   "layers": [0, 12],
   "devices": [0, 1, 2, 3],
   "microbatch_size": 2,
   "data_parallel_degree": 4,
   "tensor_parallel_degree": 1,
   "context_parallel_degree": 1,
   "sequence_parallel": false,
   "zero_stage": 1,
   "checkpointed_layers": 5,
   "offload": {
    "parameters": 0.0,
    "gradients": 0.0,
    "optimizer": 0.25,
    "activations": 0.0
   }
  }
 ],
 "predicted": {
  "step_seconds": 0.0,
  "stages": []
 },
 "fingerprint": {}
}
"""


def edited(*path, value):
    """The plan above with one value replaced; a key is removed by the value ``...``."""
    document = json.loads(TEXT)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(document)


def test_text_of_a_plan_is_canonical():
    assert to_json(from_json(TEXT)) == TEXT


@given(plans(runnable=False, predicted=True, fewer_loaders=True))
def test_round_trip(plan):
    text = to_json(plan)
    assert from_json(text) == plan
    assert to_json(from_json(text)) == text


def test_what_units_do_is_kept_a_line_for_each_kind():
    units = (("channels.forward", (2.0, 1.5e-7, 0.0)), ("bytes.forward", (0.25, 1024.0)))
    stage = PredictedStage(
        steady_seconds=1.0, boundary_seconds=0.0, forward_seconds=0.5, backward_seconds=0.5, peak_bytes=1, units=units
    )
    plan = dataclasses.replace(from_json(TEXT), predicted=Predicted(step_seconds=1.0, stages=(stage,)))
    text = to_json(plan)
    assert from_json(text) == plan
    assert '"channels.forward": [2.0, 1.5e-07, 0.0]' in text
    assert "units" not in to_json(from_json(TEXT))


def test_keys_with_defaults_may_be_left_out():
    text = """{"schema": 1, "global_batch_size": 4, "num_microbatches": 2, "stages":
               [{"layers": [0, 3], "devices": [0], "microbatch_size": 2}]}"""
    plan = from_json(text)
    assert isinstance(plan, Plan)
    assert (plan.schedule, plan.predicted, plan.fingerprint) == ("1f1b", None, ())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("stages", 0, "zero_stge"), 1, r"stages\[0\]\.zero_stge: this key is not known; did you mean 'zero_stage'\?"),
        (("micro_batches",), 1, r"^micro_batches: this key is not known; did you mean 'num_microbatches'\?"),
        (("xyz",), 1, r"^xyz: this key is not known; known here: schema, global_batch_size"),
        (("stages", 0, "offload", "optimiser"), 0.1, r"stages\[0\]\.offload\.optimiser: .* did you mean 'optimizer'"),
        (("predicted", "seconds"), 1.0, r"predicted\.seconds: .* did you mean 'step_seconds'"),
        (("stages", 0, "microbatch_size"), ..., r"stages\[0\]\.microbatch_size is missing"),
        (("stages",), ..., "stages is missing"),
        (("schema",), ..., "schema is missing"),
        (("schema",), 2, "schema = 2: this version of lightning_mist reads plans of schema 1; update lightning_mist"),
        (("schema",), 0, "schema = 0: .* make the plan anew"),
        (("schema",), "1", 'schema = "1": a whole number is needed'),
        (("num_microbatches",), 64.0, "num_microbatches = 64.0: a whole number is needed"),
        (("num_microbatches",), True, "num_microbatches = true: a whole number is needed"),
        (("num_microbatches",), None, "num_microbatches = null: a whole number is needed"),
        (("stages",), {}, r"stages = {}: a list is needed"),
        (("stages",), [], "a plan without stages"),
        (("stages", 0), 3, r"stages\[0\] = 3: an object with keys is needed"),
        (("stages", 0, "layers"), [0, 6, 12], r"stages\[0\]\.layers = \[0, 6, 12\]: two whole numbers"),
        (("stages", 0, "devices", 2), "2", r'stages\[0\]\.devices\[2\] = "2": a whole number is needed'),
        (("stages", 0, "zero_stage"), 4, r"stages\[0\]\.zero_stage = 4: the ZeRO stages are 0, 1, 2, 3"),
        (("stages", 0, "sequence_parallel"), 0, r"stages\[0\]\.sequence_parallel = 0: true or false"),
        (("stages", 0, "offload", "optimizer"), "all", r'offload\.optimizer = "all": a number is needed'),
        (("stages", 0, "offload", "optimizer"), 1.5, r"stages\[0\]\.offload: offload\.optimizer = 1\.5: a ratio lies"),
        (("stages", 0, "checkpointed_layers"), 13, r"stages\[0\]: checkpointed_layers = 13 in a stage of 12 layers"),
        (("stages", 0, "data_parallel_degree"), 3, r"stages\[0\]: 4 devices with degrees \(3, 1, 1\)"),
        (("schedule",), "2f2b", "schedule = '2f2b': known schedules are 1f1b, gpipe, interleaved-1f1b, zb-h1"),
        (("schedule",), 7, "schedule = 7: text in quotes is needed"),
        (("global_batch_size",), 500, "= 512: it must equal global_batch_size 500"),
        (("predicted", "step_seconds"), 1.0, r"predicted\.stages has 0 entries for 1 stages"),
        (("fingerprint",), {"world_size": 4}, r"fingerprint\.world_size = 4: text in quotes"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(path, value, message):
    with pytest.raises(PlanError, match=message):
        from_json(edited(*path, value=value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the plan is not JSON: Expecting value: line 1 column 1"),
        ('{"schema": 1,}', "the plan is not JSON: .* line 1 column"),
        ("[]", r"the plan = \[\]: an object with keys is needed"),
        (TEXT.replace("0.25", "NaN"), "the value NaN: numbers in a plan are finite"),
        (TEXT.replace("0.25", "1e999"), "a finite number is needed"),
        (TEXT.replace('"schema": 1,', '"schema": 1, "schema": 1,'), "the key 'schema' comes twice"),
        ("[" * 100_000, "the plan is not JSON: "),
        (TEXT.replace("512", "5" * 5000), "the plan is not JSON: "),
    ],
)
def test_other_text_is_refused(text, message):
    with pytest.raises(PlanError, match=message):
        from_json(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_any_damage_is_a_plan_error_or_a_plan(data):
    document = json.loads(TEXT)
    inner = data.draw(st.sampled_from([document, document["stages"][0], document["predicted"]]))
    inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(json_values)
    try:
        plan = from_json(json.dumps(document))
    except PlanError:
        return
    assert from_json(to_json(plan)) == plan


def test_files(tmp_path):
    path = tmp_path / "plan.json"
    plan = from_json(TEXT)
    save(plan, path)
    assert path.read_text() == TEXT
    assert load(str(path)) == plan
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_file_errors_begin_with_the_path(tmp_path):
    with pytest.raises(PlanError, match=r"plan file '.*none\.json' cannot be read \(No such file"):
        load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(PlanError, match=r"plan file '.*bad\.json': the plan is not JSON"):
        load(tmp_path / "bad.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"binary\.json' cannot be read \(it is not UTF-8"):
        load(tmp_path / "binary.json")


def test_what_of_layers_is_recomputed_is_written_where_it_is_not_everything():
    assert '"checkpointing"' not in TEXT
    text = TEXT.replace('"checkpointed_layers": 5,', '"checkpointed_layers": 5,\n   "checkpointing": "selective",')
    plan = from_json(text)
    assert [stage.checkpointing.kind for stage in plan.stages][:1] == ["selective"]
    assert to_json(plan) == text
    with pytest.raises(PlanError, match=r"stages\[0\]: checkpointing = 'some': known are full, selective"):
        from_json(text.replace("selective", "some"))
    with pytest.raises(PlanError, match=r"offload\.activations = 0\.5 with checkpointing = 'selective'"):
        from_json(text.replace('"activations": 0.0', '"activations": 0.5'))


def test_a_ratio_of_checkpoints_is_written_where_it_is_their_own():
    text = TEXT.replace('"activations": 0.0', '"activations": 0.5')
    (stage,) = from_json(text).stages
    assert [stage.kept_ratio(layer) for layer in (0, 11)] == [0.5, 0.5]
    assert to_json(from_json(text)) == text
    own = text.replace('"activations": 0.5', '"activations": 0.5,\n    "checkpoints": 1.0')
    (stage,) = from_json(own).stages
    assert [stage.kept_ratio(layer) for layer in (0, 11)] == [1.0, 0.5]
    assert to_json(from_json(own)) == own
    assert to_json(from_json(own.replace("1.0", "0.5"))) == text
    with pytest.raises(PlanError, match=r"offload\.checkpoints = null: a number is needed"):
        from_json(own.replace("1.0", "null"))


def test_ranks_that_zero_shards_over_are_written_where_they_are_not_all():
    assert '"shard_degree"' not in TEXT
    text = TEXT.replace('"zero_stage": 1,', '"zero_stage": 1,\n   "shard_degree": 2,')
    plan = from_json(text)
    assert [stage.mesh.shard_degree for stage in plan.stages][:1] == [2]
    assert to_json(plan) == text
    assert to_json(from_json(text.replace('"shard_degree": 2', '"shard_degree": 4'))) == TEXT
    with pytest.raises(PlanError, match=r"stages\[0\]: shard_degree = 3 with 4 ranks .*; use 2 or 4"):
        from_json(text.replace('"shard_degree": 2', '"shard_degree": 3'))
    with pytest.raises(PlanError, match=r"stages\[0\]: shard_degree = 2 with zero_stage = 0, which shards nothing"):
        from_json(text.replace('"zero_stage": 1', '"zero_stage": 0'))


def test_chunks_behind_the_last_layer_are_written_where_there_are_some():
    assert '"tail_chunks"' not in TEXT
    plan = from_json(TEXT)
    last = replace(plan.stages[-1], tail_chunks=plan.stages[-1].microbatch_size)
    made = replace(plan, stages=(*plan.stages[:-1], last))
    assert from_json(to_json(made)) == made
    assert f'"tail_chunks": {last.tail_chunks}' in to_json(made)
