"""What the benchmark of offloading asks for and tells, and that its program runs where there is no card."""

import importlib.util

import pytest
import torch
import transformers

from benchmarks.record import read_record
from benchmarks.throughput import offload, offload_run
from lightning_mist import PlanError

TRAINED = {"ended": "trained", "tokens_per_second": 30.0, "parameters": 7, "plan": "1 microbatches"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr("sys.argv", ["offload"])
    monkeypatch.setattr(offload, "write_record", lambda *_: pytest.fail("a record was written"))
    with pytest.raises(SystemExit, match="no CUDA device was found"):
        offload.main()


def test_a_cpu_has_no_caps_and_nothing_of_it_is_recorded_unasked():
    card, cpu = offload.parse([]), offload.parse(["--device", "cpu"])
    assert (card.sizes, card.caps, card.records) == (["2.7b", "7b"], [24.0, 40.0], offload.RECORDS)
    assert (cpu.caps, cpu.records) == ([None], None)


@pytest.mark.parametrize(("size", "count"), [("2.7b", 2_651_550_720), ("7b", 6_738_415_616)])
def test_models_have_their_size(size, count):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(offload_run.SIZES[size](1024))
    # GPT-3 counts 2048 positions and no vocabulary beyond GPT-2's.
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(count, rel=2e-3)


def test_pairs_alternate_and_what_did_not_train_is_not_tried_again(monkeypatch):
    tried = []

    def run_module(module, arguments, *, processes, timeout_seconds, environment):
        assert (module, processes, timeout_seconds) == ("benchmarks.throughput.offload_run", 1, 3600.0)
        assert int(environment["OMP_NUM_THREADS"]) >= 1
        values = dict(zip(arguments[::2], arguments[1::2], strict=True))
        tried.append((values["--strategy"], values["--cap"]))
        if values["--strategy"] == "fsdp":
            return {"ended": "out of memory", "error": "OutOfMemoryError: 3 GiB"}
        if values["--strategy"] == "deepspeed":
            raise RuntimeError("ended with 1:\nexitcode: -9, Signal 9 (SIGKILL) received")
        return TRAINED if values["--strategy"] == "mist" else {**TRAINED, "tokens_per_second": 20.0}

    monkeypatch.setattr(offload, "run_module", run_module)
    samples = list(offload.pairs_of(offload.parse(["--sizes", "7b", "--caps", "24", "--pairs", "2"])))
    first = ["mist", "recomputed", "mist", "fsdp", "mist", "deepspeed"]
    assert tried == [(name, "24.0") for name in (*first, "recomputed", "mist", "mist", "mist")]
    assert [sample["ratio"] for sample in samples] == [1.5, None, None] * 2
    assert [sample["rival_ended"] for sample in samples] == ["trained", "out of memory", "killed"] * 2
    assert {(s["model"], s["parameters"], s["cap_bytes"], s["mist_plan"]) for s in samples} == {
        ("7b", 7, 24 << 30, "1 microbatches")
    }
    assert offload.summary(samples) == [
        "7b under 24 GiB, mist over recomputed: 1.500, range 1.500 to 1.500",
        "7b under 24 GiB, mist over fsdp: mist: trained, fsdp: out of memory",
        "7b under 24 GiB, mist over deepspeed: mist: trained, deepspeed: killed",
    ]


@pytest.mark.parametrize(
    ("text", "ended"),
    [("module ran for 3600.0 s and was killed:\n", "out of time"), ("module ended with 1:\nImportError", "failed")],
)
def test_how_a_process_ended_is_told(monkeypatch, text, ended):
    def run_module(*_, **__):
        raise RuntimeError(text)

    monkeypatch.setattr(offload, "run_module", run_module)
    found = offload.run(offload.parse(["--device", "cpu"]), "tiny", None, "mist")
    assert found["ended"] == ended
    assert found["error"]


def test_how_a_run_ended_is_told():
    inside = RuntimeError("backward failed")
    inside.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    errors = {None: "trained", inside: "out of memory", PlanError("no"): "refused", ValueError("no"): "failed"}
    assert [offload_run.how_it_ended(error) for error in errors] == [*errors.values()]


@pytest.mark.thorough
def test_the_program_runs_without_a_card(monkeypatch, tmp_path, capsys):
    arguments = ["--device", "cpu", "--sizes", "tiny-llama", "--rows", "2", "--length", "16", "--steps", "8"]
    monkeypatch.setattr("sys.argv", ["offload", *arguments, "--pairs", "1", "--records", str(tmp_path)])
    offload.main()
    (path,) = tmp_path.iterdir()
    plain, fsdp, deepspeed = read_record(path).samples
    assert plain["ratio"] > 0
    assert plain["mist_first_loss"] == pytest.approx(plain["rival_first_loss"], rel=1e-5)
    assert plain["rival_plan"] == "1 microbatches, 4 layers recomputed, nothing moved"
    assert (fsdp["rival_ended"], fsdp["ratio"]) == ("failed", None)
    assert "requires a GPU accelerator" in fsdp["rival_error"]
    if importlib.util.find_spec("deepspeed") is None:
        assert deepspeed["rival_ended"] == "not installed"
    assert "tiny-llama, mist over recomputed: " in capsys.readouterr().out
