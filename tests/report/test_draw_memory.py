from xml.etree import ElementTree

import numpy as np
import pytest

from lightning_mist.report.draw_memory import WORDS, _pieces, draw_memory, memory_figure, memory_picture, say_piece
from lightning_mist.units import format_bytes
from tests.report.networks import predicted


@pytest.mark.parametrize("name", ["a.png", "b.svg"])
def test_files(tmp_path, name):
    draw_memory(memory_picture(predicted(2, 4), (4e6,) * 2), str(tmp_path / name))
    written = (tmp_path / name).read_bytes()
    assert written.startswith(b"\x89PNG\r\n" if name == "a.png" else b"<?xml")
    if name == "b.svg":
        assert ElementTree.fromstring(written).tag.endswith("svg")


def test_every_stage_says_its_peak():
    plan = predicted(4, 8)
    figure = memory_figure(memory_picture(plan, (4e6,) * 4))
    said = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert [text.split(":")[0] for text in said] == [
        f"peak {format_bytes(stage.peak_bytes)}" for stage in plan.predicted.stages
    ]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[-1] == "limit for tensors"
    assert set(legend[:-1]) <= set(WORDS.values())
    assert WORDS["parameter_bytes"] in legend
    head = figure.texts[0].get_text()
    assert head.endswith("per device of 3.8 MiB")


def test_a_peak_in_the_middle_is_shown():
    plan = predicted(2, 256, schedule="gpipe")
    picture = memory_picture(plan)
    figure = memory_figure(picture)
    assert len(figure.axes) == 2 * 3
    assert sum(len(axis.texts) for axis in figure.axes) == 2
    assert all("limit" not in text.get_text() for text in figure.legends[0].get_texts())


def test_what_is_drawn_is_as_high_as_the_curve():
    picture = memory_picture(predicted(2, 4))
    (curve, _) = picture.curves
    axis = memory_figure(picture).axes[0]
    top = max(path.vertices[:, 1].max() for band in axis.collections for path in band.get_paths())
    scale = 2.0**20 if picture.worst.peak_bytes >= 2**20 else 2.0**10
    assert top == pytest.approx(curve.total_E.max() / scale, rel=0.01)


def test_the_part_of_a_curve_within_a_window():
    curve = memory_picture(predicted(2, 4)).curves[0]
    times, index = _pieces(curve, (0.0, curve.end))
    assert (times[:-1] == curve.times_E).all()
    assert times[-1] == curve.end
    assert (index[:-1] == np.arange(len(curve.times_E))).all()
    middle = curve.times_E[3], (curve.times_E[4] + curve.times_E[5]) / 2
    times, index = _pieces(curve, middle)
    assert (times[0], times[-1]) == middle
    assert index.tolist() == [3, 4, 4]


def test_pieces_in_words():
    assert say_piece("3B12") == "backward of microbatch 12"
    assert say_piece("0I1") == "gradients of inputs of microbatch 1"
    assert say_piece("gradient reduction") == "gradient reduction"
