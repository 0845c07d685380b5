from dataclasses import fields

from lightning_mist.tuner.options import OPTIONS, Options


def test_every_option_has_a_unit_and_a_reason():
    for item in fields(Options):
        assert item.metadata["unit"]
        assert f"\n        {item.name}: " in Options.__doc__


def test_options_are_shown_with_their_units():
    lines = list(OPTIONS.lines())
    assert len(lines) == len(fields(Options))
    assert "near_resident = 1.05 times the best plan's seconds" in lines
    assert "assumed = 1.1, 1.2, 1.5, 2, 4 times the least bound" in lines
