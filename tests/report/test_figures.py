from xml.etree import ElementTree

import pytest

from lightning_mist.report.draw_timeline import timeline_figure
from lightning_mist.report.figures import INK, inline_svg, styled, time_unit
from lightning_mist.report.timeline import timeline_of
from tests.report.networks import predicted


def test_a_picture_in_a_page_has_the_page_s_colours_and_font():
    with styled("timeline", is_text=True):
        text = inline_svg(timeline_figure(timeline_of(predicted(2, 4))), "a", 'a "step"')
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("aria-label") == 'a "step"'
    assert root.get("width") is None
    assert INK not in text
    assert "currentColor" in text
    assert "var(--shade, " in text
    assert all(item.get("id").startswith("a-") for item in root.iter() if item.get("id"))
    assert "url(#a-" in text
    assert "stage 0" in "".join(root.itertext())


@pytest.mark.parametrize(
    ("seconds", "unit"), [(12.0, ("s", 1.0)), (0.5, ("ms", 1e3)), (2e-4, ("us", 1e6)), (3e-8, ("ns", 1e9))]
)
def test_units_of_axes(seconds, unit):
    assert time_unit(seconds) == unit
