import xml.etree.ElementTree as xml
from dataclasses import replace
from pathlib import Path

from benchmarks.planner.growth import THEME, draw
from tests.benchmarks.test_record import RECORD


def test_the_picture_has_both_panels_and_is_the_same_every_time(tmp_path: Path) -> None:
    samples = [
        {"grows": name, "layers": layers, "devices": devices, "search_seconds": seconds}
        for name, layers, devices, seconds in (
            ("layers", 24, 32, 1.0),
            ("layers", 96, 32, 2.0),
            ("devices", 48, 8, 0.5),
            ("devices", 48, 512, 4.0),
        )
    ]
    record = replace(RECORD, theme=THEME, samples=samples)
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    draw(record, first)
    draw(record, second)
    assert first.read_bytes() == second.read_bytes()
    words = {item.text for item in xml.parse(first).iter() if item.tag.endswith("text")}
    assert {"layers", "devices", "seconds of a search", "512", "96"} <= words
