import dataclasses
from xml.etree import ElementTree

import numpy as np
import pytest

from lightning_mist.report.draw_memory import WORDS, draw_memory, memory_figure, memory_picture, say_piece, unit_figure
from lightning_mist.units import format_bytes
from tests.report.networks import predicted, with_channels


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


def names(axis):
    return [text.get_text() for text in axis.get_xticklabels()]


def test_one_forward_and_one_backward_are_drawn_by_their_layers():
    picture = memory_picture(with_channels(2, 4, checkpointed_layers=2))
    figure = unit_figure(picture)
    forward, backward = figure.axes
    layers = ["4", "5", "6", "7", "tail"] if picture.worst.group else ["head", "0", "1", "2", "3"]
    # The most that a picture has room for; the outermost in any case.
    for axis, order in ((forward, layers), (backward, layers[::-1])):
        assert [name for name in order if name in names(axis)] == sorted(names(axis), key=order.index)
        assert {order[0], order[-1]} <= set(names(axis))
    assert [axis.get_xlabel().split(" of ")[0] for axis in figure.axes] == ["forward", "backward"]
    assert WORDS["there_bytes"] in {text.get_text() for text in figure.legends[0].get_texts()}
    (peak,) = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert peak.startswith(f"peak {format_bytes(picture.worst.peak_bytes)}: ")


def test_pictures_of_units_are_as_high_as_those_of_the_step():
    picture = memory_picture(with_channels(1, 4, checkpointed_layers=8))
    figures = memory_figure(picture), unit_figure(picture)
    scale = 2.0**20 if picture.worst.peak_bytes >= 2**20 else 2.0**10
    tops = [
        max(path.vertices[:, 1].max() for axis in figure.axes for band in axis.collections for path in band.get_paths())
        for figure in figures
    ]
    assert tops == pytest.approx([picture.worst.total_E.max() / scale] * 2, rel=0.01)


def test_networks_without_layers_have_a_head_and_a_tail():
    picture = memory_picture(with_channels(1, 2, layers=0))
    figure = unit_figure(picture)
    assert {"head", "tail"} >= set(names(figure.axes[0])) > set()
    memory_figure(picture)


def test_where_another_action_needs_most_the_pair_says_what_it_needs():
    picture = memory_picture(with_channels(2, 4))
    curve = max(picture.curves, key=lambda curve: curve.peak_bytes)
    terms = tuple(
        (
            name,
            values_E + (name == "working_bytes") * curve.peak_bytes * (np.arange(len(values_E)) == len(values_E) - 1),
        )
        for name, values_E in curve.terms
    )
    (_, backward) = curve.pair()
    figure = unit_figure(dataclasses.replace(picture, curves=(dataclasses.replace(curve, terms=terms),)))
    (said,) = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert said.startswith(f"most {format_bytes(curve.bytes_of(backward))}: backward of")


def test_of_units_that_are_not_known_nothing_is_drawn():
    picture = memory_picture(predicted(2, 4))
    assert unit_figure(picture) is None
    assert WORDS["there_bytes"] not in {text.get_text() for text in memory_figure(picture).legends[0].get_texts()}
    assert unit_figure(memory_picture(with_channels(2, 4, schedule="zb-h1"))) is None


def test_pieces_in_words():
    assert say_piece("3B12") == "backward of microbatch 12"
    assert say_piece("0I1") == "gradients of inputs of microbatch 1"
    assert say_piece("gradient reduction") == "gradient reduction"


@pytest.mark.parametrize("seconds", [0.2, 2.0])
def test_a_microbatch_at_the_start_of_a_long_step_is_drawn_in_the_unit_of_its_axis(seconds):
    picture = memory_picture(with_channels(2, 4))
    picture = dataclasses.replace(picture, timeline=dataclasses.replace(picture.timeline, step_seconds=seconds))
    for axis in unit_figure(picture).axes:
        ends_E = np.concatenate([path.vertices[:, 0] for band in axis.collections for path in band.get_paths()])
        assert (ends_E.min(), ends_E.max()) == pytest.approx(axis.get_xlim())
