import re
from pathlib import Path

import pytest

from lightning_mist.hardware.catalog.devices import DEVICES, SOURCES
from lightning_mist.hardware.catalog.rates import CPU_KERNELS, CPU_RATES, EFFICIENCIES

DOCUMENT = Path(__file__).parents[3] / "docs" / "time-model.md"


def test_every_device_has_efficiencies_and_each_names_its_sources() -> None:
    assert set(EFFICIENCIES) == {device.name for device in DEVICES}
    for found in EFFICIENCIES.values():
        assert found.sources
        assert set(found.sources) <= set(SOURCES)


@pytest.mark.parametrize("name", sorted(set(EFFICIENCIES) - {"cpu"}))
def test_attention_has_a_kernel_whose_directions_know_the_same_widths(name: str) -> None:
    kernel = EFFICIENCIES[name].attention
    assert kernel is not None
    assert [width for width, _ in kernel.forward.tflops] == [width for width, _ in kernel.backward.tflops]
    for way in (kernel.forward, kernel.backward):
        assert all(rate > 0 for _, rate in way.tflops)
        assert way.half_causal >= way.half_full
    assert 1 < kernel.saved <= 2


def test_a_cpu_has_rates_of_every_kind_at_ascending_sizes() -> None:
    assert [rate.kind for rate in CPU_RATES] == ["elementwise", "reduction", "index", "copy"]
    assert all(list(rate.bytes) == sorted(rate.bytes) for rate in CPU_RATES)
    assert {rate.kind for rate in CPU_KERNELS} == {"attention", "causal_attention", "convolution"}


def test_the_documentation_shows_these_figures() -> None:
    rows = dict(re.findall(r"^\| (\S.*?) \| (\d+ %.*) \|$", DOCUMENT.read_text(), flags=re.MULTILINE))
    shown = {name: row for names, row in rows.items() for name in names.split(", ")}
    for name in set(EFFICIENCIES) - {"cpu"}:
        found = EFFICIENCIES[name]
        percents = [int(text.removesuffix(" %")) for text in shown[name].split(" | ")]
        reduced = [found.memory * part for part in found.reduction]
        assert percents == pytest.approx([100 * x for x in (found.matmul, found.memory, *reduced)], abs=0.51)


def test_the_documentation_shows_these_kernels() -> None:
    text = DOCUMENT.read_text()
    for name in set(EFFICIENCIES) - {"cpu"}:
        kernel = EFFICIENCIES[name].attention
        assert kernel is not None
        if len(kernel.forward.tflops) == 1:
            continue
        forward, backward = (
            " / ".join(f"{rate:.0f}" for _, rate in way.tflops) for way in (kernel.forward, kernel.backward)
        )
        assert f"| {kernel.name} | {forward} | {backward} |" in text, name
