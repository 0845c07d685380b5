from xml.etree import ElementTree

import pytest

from lightning_mist.plan import OffloadRatios
from lightning_mist.report.draw_timeline import COLORS, WORDS, _shade, draw_timeline, timeline_figure
from lightning_mist.report.timeline import merged, timeline_of
from tests.report.networks import predicted, with_channels


def texts(timeline):
    figure = timeline_figure(timeline)
    return [[text.get_text() for text in axis.texts] for axis in figure.axes], figure


@pytest.mark.parametrize("name", ["a.png", "b.svg", "c.pdf"])
def test_files(tmp_path, name):
    draw_timeline(timeline_of(predicted(2, 4)), str(tmp_path / name))
    written = (tmp_path / name).read_bytes()
    begin = {"a.png": b"\x89PNG\r\n", "b.svg": b"<?xml", "c.pdf": b"%PDF"}[name]
    assert written.startswith(begin)
    if name == "b.svg":
        assert ElementTree.fromstring(written).tag.endswith("svg")


def test_equal_pictures_are_equal_files(tmp_path):
    for name in ("a.svg", "b.svg"):
        draw_timeline(timeline_of(predicted(2, 4)), str(tmp_path / name))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_every_microbatch_is_numbered_where_there_is_room():
    (numbers,), figure = texts(timeline_of(predicted(2, 4)))
    assert sorted(numbers) == sorted([str(microbatch) for microbatch in range(4)] * 2 * 2)
    head = " ".join(text.get_text() for text in figure.texts)
    assert "one step: " in head
    assert "devices wait for" in head
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert legend == {WORDS[kind] for kind in ("forward", "backward", "optimizer", "send")} | {"waiting"}


def test_of_many_microbatches_two_parts_are_drawn():
    parts, figure = texts(timeline_of(predicted(1, 512)))
    assert len(parts) == 2
    assert "0" in parts[0]
    assert "511" in parts[1]
    assert any("left out: " in text.get_text() for text in figure.texts)
    assert all(text.get_text() != "waiting" for text in figure.legends[0].get_texts())


def test_many_stages_have_lanes_of_their_own():
    figure = timeline_figure(timeline_of(predicted(16, 32, layers=16)))
    assert [text.get_text().splitlines()[0] for text in figure.axes[0].get_yticklabels()] == [
        f"stage {index}" for index in range(16)
    ]


def test_bars_of_very_many_stages_are_pixels(tmp_path):
    draw_timeline(timeline_of(predicted(32, 32, layers=32)), str(tmp_path / "a.svg"))
    text = (tmp_path / "a.svg").read_text()
    assert "data:image/png" in text
    assert len(text) < 1_000_000


def test_numbers_are_left_out_where_the_longest_has_no_room():
    (numbers,), _ = texts(timeline_of(predicted(16, 32, layers=16)))
    assert numbers == []


def test_later_chunks_are_lighter():
    assert _shade(COLORS["backward"], 0, 1) == COLORS["backward"]
    assert _shade(COLORS["backward"], 0, 2) == COLORS["backward"]
    assert _shade("#000000", 1, 2) == "#737373"
    figure = timeline_figure(timeline_of(predicted(2, 4, schedule="interleaved-1f1b", chunks=2)))
    assert any("lighter: later stages" in text.get_text() for text in figure.texts)


def names_of_thin_lanes(figure):
    return [text.get_text() for text in figure.axes[0].get_yticklabels(minor=True)]


def test_channels_have_thin_lanes_beneath_every_group():
    moved = OffloadRatios(activations=1.0)
    figure = timeline_figure(timeline_of(with_channels(2, offload=moved)))
    assert names_of_thin_lanes(figure) == ["from host", "to host", "sends"] * 2
    assert names_of_thin_lanes(timeline_figure(timeline_of(predicted(2, 4)))) == ["sends"] * 2
    assert names_of_thin_lanes(timeline_figure(timeline_of(with_channels(1)))) == []
    # Their names say what they are; where there is no room for names the legend does.
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert WORDS["from host"] not in legend
    many = timeline_figure(timeline_of(with_channels(16, 32, layers=16, offload=moved)))
    assert names_of_thin_lanes(many) == []
    assert {WORDS["from host"], WORDS["to host"]} <= {text.get_text() for text in many.legends[0].get_texts()}


def test_bars_that_cannot_be_told_apart_are_one():
    times = [(3.0, 4.0), (0.0, 1.0), (1.05, 2.0)]
    assert merged(times, 10.0, 0.1) == ((0.0, 2.0), (3.0, 4.0))
    assert merged(times, 10.0, 0.01) == ((0.0, 1.0), (1.05, 2.0), (3.0, 4.0))
