from benchmarks.versions import floors, run
from benchmarks.versions.floors import ROOT

TEXT = """
[options]
python_requires = >=3.10
install_requires =
    torch>=2.8
    lightning>=2.4,!=2.6.2
    jsonargparse[signatures]>=4.30
    anything

[options.extras_require]
pictures =
    matplotlib>=3.7
test =
    matplotlib>=3.7
    pytest
"""


def test_floors_are_those_of_the_setup():
    assert floors.floors(TEXT) == ["torch==2.8", "lightning==2.4", "jsonargparse==4.30", "matplotlib==3.7"]
    own = floors.floors((ROOT / "setup.cfg").read_text())
    assert {line.split("==")[0] for line in own} >= {"torch", "lightning", "pytorch-lightning", "numpy", "highspy"}


def test_releases_of_attackers_are_excluded_under_both_names():
    lines = (ROOT / "setup.cfg").read_text().split()
    named = [line for line in lines if line.startswith(("lightning>", "pytorch-lightning>"))]
    assert len(named) == 2
    assert all(line.endswith(",!=2.6.2,!=2.6.3") for line in named)


def test_a_record_keeps_what_was_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "RECORDS", tmp_path)
    row = {"environment": "oldest", "part": "demo", "what": "a", "outcome": "ended well", "run_seconds": 1.0}
    run.record("oldest", ["demo"], [row])
    run.record("newest", ["demo", "fits"], [{**row, "environment": "newest"}])
    path = run.record("oldest", ["fits"], [{**row, "part": "fits"}])
    found = [(item["environment"], item["part"]) for item in run.read_record(path).samples]
    assert found == [(where, part) for part in ("versions", "demo") for where in ("newest", "oldest")] + [
        ("oldest", "fits")
    ]
