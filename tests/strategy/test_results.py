import pytest
import torch

from lightning_mist.strategy.results import home, merge_extra


@pytest.mark.parametrize(
    ("parts", "merged"),
    [
        ([(0.75, torch.tensor(1.0)), (0.25, torch.tensor(5.0))], torch.tensor(2.0)),
        ([(0.75, 1.0), (0.25, 5.0)], 2.0),
        ([(0.5, torch.zeros(2, 3)), (0.5, torch.ones(1, 3))], torch.tensor([[0.0] * 3, [0.0] * 3, [1.0] * 3])),
        ([(0.5, "first"), (0.5, "last")], "last"),
        ([(0.5, torch.zeros(())), (0.5, "last")], "last"),
        ([(0.25, [1])], [1]),
    ],
)
def test_one_value_from_those_of_the_parts(parts, merged):
    found = merge_extra(parts)
    if isinstance(merged, torch.Tensor):
        assert torch.equal(found, merged)
    else:
        assert found == merged


def test_dictionaries_merge_by_entry_those_that_some_parts_lack_too():
    parts = [(0.5, {"a": torch.tensor(1.0), "b": "x"}), (0.5, {"a": torch.tensor(3.0), "c": torch.ones(1)})]
    assert merge_extra(parts) == {"a": torch.tensor(2.0), "b": "x", "c": torch.ones(1)}


def test_values_travel_without_their_graph():
    leaf = torch.ones(2, requires_grad=True)
    value = {"a": leaf * 2, "b": [leaf * 3, (leaf, "text")], "c": None}
    there = home(value)
    tensors = [there["a"], there["b"][0], there["b"][1][0]]
    assert [t.tolist() for t in tensors] == [[2.0, 2.0], [3.0, 3.0], [1.0, 1.0]]
    assert not any(t.requires_grad for t in tensors)
    assert isinstance(there["b"][1], tuple)
    assert (there["b"][1][1], there["c"]) == ("text", None)
    assert value["a"].requires_grad
