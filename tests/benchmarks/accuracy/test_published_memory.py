import json

import pytest

from benchmarks.accuracy.published_memory import main, predict, sample_of, summary, workspace_of
from benchmarks.accuracy.published_rows import DATA, UnpredictableError, plan_of, read_plans, read_points

POINTS = {row["id"]: row for row in read_points(DATA / "memory_points.json")}
PLANS = read_plans([DATA / "mist_plans.json", DATA / "megatron_plans.json"])


def changed(case, **model):
    return {**case, "model": {**case["model"], **model}}


@pytest.mark.parametrize(
    "name",
    [
        "mist-llama/1.3b-s_2048-v_50304-b_32-n_1-m_2-f_True-stage1",  # the output layer, a step ahead of the forward
        "mist-gpt/7b-s_2048-v_50304-b_128-n_1-m_8-f_True-stage1",  # recomputation, offloaded optimizer state
    ],
)
def test_stages_that_mist_executed(name):
    sample = sample_of(POINTS[name], lambda: predict(POINTS[name], PLANS))
    assert abs(sample["allocated_error"]) < 0.001
    assert abs(sample["reserved_error"]) < 0.005


@pytest.mark.thorough
def test_a_run_that_others_trained():
    row = POINTS["fms-mistral7b-full-2g-b2"]
    sample = sample_of(row, lambda: predict(row, PLANS))
    assert abs(sample["allocated_error"]) < 0.001


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "AdamW 4bit"}, "optimizer = 'AdamW 4bit' is not understood"),
        ({"optimizer": "Shampoo"}, "understood are AdamW, Adam and SGD"),
        ({"checkpoint": "selective"}, "checkpoint = 'selective'; understood are 'none', 'full'"),
        ({"parallel": {"tp": 2}}, "parallel = 'tp'; understood are"),
        ({"parallel": {"fsdp1": 4}}, "on 2 devices is not understood"),
        ({"precision": "fp8"}, "precision = 'fp8'"),
        ({"optimizer": "AdamW in backward"}, "optimizer = 'AdamW in backward' on 2 devices"),
        ({"quantization": "nf4"}, "the row says quantization, which is not understood"),
        ({"arch": {**POINTS["fms-mistral7b-full-2g-b2"]["arch"], "family": "mixtral"}}, "family = 'mixtral'"),
    ],
)
def test_runs_that_are_not_understood_are_refused(change, message):
    with pytest.raises(UnpredictableError, match=message):
        predict({**POINTS["fms-mistral7b-full-2g-b2"], **change}, PLANS)


def test_a_row_that_lacks_something_says_so():
    row = {key: value for key, value in POINTS["litgpt-tinyllama-full"].items() if key != "seq"}
    assert "missing or has no sense: KeyError('seq')" in sample_of(row, lambda: predict(row, PLANS))["unpredicted"]


def test_a_row_without_its_plan_says_so():
    row = {"id": "mist-x", "ref": "plans.json:nothing", "measured": {"peak_allocated_bytes": 1}}
    sample = sample_of(row, lambda: predict(row, PLANS))
    assert "no plan named 'nothing'" in sample["unpredicted"]
    assert "1 rows, 1 not predicted" in summary([sample])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_dropout": 0.1}, "hidden_dropout = 0.1; understood are 0.0"),
        ({"mlp_fc1_bias": True}, "mlp_fc1_bias = True; understood are False"),
        ({"normalization": "batchnorm"}, "normalization = 'batchnorm'"),
        ({"num_heads_kv": 4, "use_flash_attn": False}, "num_heads_kv = 4 without flash attention"),
    ],
)
def test_models_that_are_not_understood_are_refused(change, message):
    row = POINTS["mist-gpt/1.3b-s_2048-v_50304-b_32-n_1-m_2-f_True-stage0"]
    plans = {key: changed(case, **change) for key, case in PLANS.items() if "model" in case}
    with pytest.raises(UnpredictableError, match=message):
        predict(row, plans)


def test_stages_on_devices_that_are_not_known_are_refused():
    row = {**POINTS["mist-gpt/1.3b-s_2048-v_50304-b_32-n_1-m_2-f_True-stage0"], "gpu": "TPU"}
    with pytest.raises(UnpredictableError, match="gpu = 'TPU' is not in the catalog"):
        predict(row, PLANS)


@pytest.mark.parametrize(
    ("gpu", "mebibytes"), [("A100", 8.125), ("RTX 4090", 8.125), ("dgx_gb200", 32), ("H100-80GB", 32)]
)
def test_workspaces_depend_on_the_generation(gpu, mebibytes):
    assert workspace_of({"gpu": gpu}) == mebibytes * 2**20


def test_parallel_blocks_keep_less_than_others():
    """Falcon's layers: one norm, both branches read it."""
    row = POINTS["mist-llama/7b-s_2048-v_50304-b_128-n_1-m_8-f_True-stage2"]
    plans = {key: case for key, case in PLANS.items() if "model" in case}
    change = {
        "mlp_type": "mlp",
        "activation_function": "gelu_fast",
        "normalization": "layernorm",
        "intermediate_size": 16384,
    }
    plain = predict(row, {key: changed(case, **change) for key, case in plans.items()})
    falcon = predict(row, {key: changed(case, **change, parallel_block=True) for key, case in plans.items()})
    # 9 layers, 2 microbatches: the second norm's input and result, of 16 MiB each, and the norm's states.
    fewer = 9 * (2 * 2 * 16 * 2**20 + 8192 * (2 + 2 + 12 / 2))
    assert plain.allocated - falcon.allocated == pytest.approx(fewer, rel=0.1)


def test_plans_are_found_by_the_end_of_their_name():
    row = {"id": "x", "ref": "file.json:gpt/1.3b-s_2048-v_50304-b_32-n_1-m_2-f_True"}
    assert plan_of(row, PLANS)["model"]["num_hidden_layers"] == 24


def test_the_record_has_every_row(tmp_path, monkeypatch, capsys):
    points = [
        POINTS["mist-llama/7b-s_2048-v_50304-b_128-n_1-m_8-f_True-stage3"],
        {"id": "strange", "measured": {"peak_allocated_bytes": 5}},
    ]
    (tmp_path / "points.json").write_text(json.dumps(points))
    arguments = ["x", "--points", str(tmp_path / "points.json"), "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    main()
    (record,) = tmp_path.glob("published-memory_*.json")
    samples = json.loads(record.read_text())["samples"]
    assert [sample["id"] for sample in samples] == [points[0]["id"], "strange"]
    assert abs(samples[0]["allocated_error"]) < 0.001
    assert "unpredicted" in samples[1]
    assert "mist: 1 rows, 0 not predicted; allocated: mean error" in capsys.readouterr().out
