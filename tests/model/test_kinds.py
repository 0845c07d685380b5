from torch import nn

from lightning_mist.model.kinds import group, module_key


def test_equal_keys_are_one_kind_and_labels_are_unique() -> None:
    kinds = group(["Block", "Block", "Cross", "Block", "Cross"], ["a", "b", "c", "a", "c"])
    assert kinds.labels == ("Block", "Block#2", "Cross")
    assert kinds.examples == (0, 1, 2)
    assert kinds.of == (0, 1, 2, 0, 2)
    assert kinds.members(0) == (0, 3)
    assert kinds.twins() == (None, None, None, 0, 2)


def test_no_blocks_have_no_kinds() -> None:
    assert group((), ()).twins() == ()


def test_blocks_are_told_apart_by_class_shapes_and_what_is_trained() -> None:
    frozen = nn.Linear(2, 3)
    frozen.weight.requires_grad = False
    keys = {
        module_key(nn.Linear(2, 3)),
        module_key(nn.Linear(3, 2)),
        module_key(nn.Linear(2, 3).double()),
        module_key(frozen),
        module_key(nn.Linear(2, 3).eval()),
        module_key(nn.Sequential(nn.Linear(2, 3))),
    }
    assert len(keys) == 6
    assert module_key(nn.Linear(2, 3)) == module_key(nn.Linear(2, 3))


def test_a_neighbour_of_an_example_may_run_itself():
    kinds = group(["A", "A", "A", "B"], [1, 1, 1, 2])
    assert kinds.twins() == (None, 0, 0, None)
    assert kinds.twins(neighbours=True) == (None, None, 0, None)
