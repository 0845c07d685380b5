"""``Fabric(strategy="mist")``: registered for both copies of Fabric, and its options."""

import importlib
import pickle

import pytest

from lightning_mist import _autoload


@pytest.mark.parametrize("root", ["lightning.fabric", "lightning_fabric"])
@pytest.mark.parametrize(("name", "options"), _autoload.NAMES.items())
def test_names_are_known_to_both_copies(root, name, options):
    fabric = importlib.import_module(root)
    strategy = fabric.Fabric(strategy=name, accelerator="cpu", devices=1).strategy
    assert type(strategy).__name__ == "MistFabricStrategy"
    assert isinstance(strategy, importlib.import_module(f"{root}.strategies").DDPStrategy)
    assert strategy._start_method == options.get("start_method", "popen")


@pytest.mark.parametrize(
    ("option", "error", "text"),
    [({"memory_limit": "22 apples"}, ValueError, "22 apples"), ({"host_memory_limit": "x"}, ValueError, "x")],
)
def test_options_are_checked_when_it_is_made(option, error, text):
    from lightning_mist import MistFabricStrategy

    with pytest.raises(error, match=text):
        MistFabricStrategy(**option)


def test_it_can_be_sent_to_processes():
    from lightning_mist import MistFabricStrategy

    sent = pickle.loads(pickle.dumps(MistFabricStrategy(memory_limit="2GiB", start_method="spawn")))
    assert sent._request.memory_limit == 2 * 2**30
    assert sent.plan is sent.estimate is None
