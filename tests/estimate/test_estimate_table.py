from dataclasses import replace

import pytest

from lightning_mist.estimate.estimate_data import PeakTensor
from lightning_mist.estimate.estimate_table import _part, render_estimate
from tests.estimate.test_estimate_codec import FULL
from tests.estimate.test_estimate_data import ESTIMATE


def test_the_verdict_comes_first():
    text = render_estimate(ESTIMATE)
    assert text.startswith("Fits in 8.0 GiB per device: stage 0 of 2 needs 4.0 GiB, up to 7.0 GiB in 95 of 100 cases.")
    assert "optimizer state" not in text
    rows = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert cells["parameters"] == ["1.0 GiB", "1.0 GiB"]
    assert cells["device total"] == ["4.0 GiB", "5.0 GiB"]
    assert cells["of 8.0 GiB"] == ["88%", "75%"]


def test_many_stages_take_several_tables():
    text = render_estimate(FULL, width=60)
    assert text.count("bytes of the most loaded device") == 2
    assert max(map(len, text.splitlines())) <= 60


def test_tensors_say_where_they_come_from():
    text = render_estimate(FULL)
    assert "largest tensors at the peak of stage 0" in text
    assert text.count(" mm ") == 2
    assert "tensors that take most together" in text
    assert "15 B" in text  # three of them
    tensor = PeakTensor(bytes=3, term="optimizer_bytes", stage=0, module="[bold]head[/bold]")
    marked = replace(FULL, stages=(replace(FULL.stages[0], tensors=(tensor,)), FULL.stages[1]))
    assert "[bold]head[/bold]" in render_estimate(marked)


def test_what_would_make_it_fit():
    small = replace(FULL, memory_limit=2**30)
    assert "what would make it fit\n  more: 4.0 GiB, up to 7.0 GiB (planned, not run yet)" in render_estimate(small)
    assert "nothing that was tried makes it fit" in render_estimate(replace(small, changes=()))


@pytest.mark.parametrize(("ratio", "text"), [(0.94, "94%"), (9.99, "999%"), (46542943.76, "46,542,944 times")])
def test_multiples_of_the_limit_are_no_percentages(ratio: float, text: str) -> None:
    assert _part(ratio) == text
