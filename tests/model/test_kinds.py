from torch import nn

from lightning_mist.model.kinds import group, module_key


def test_equal_keys_are_one_kind_and_labels_are_unique() -> None:
    kinds = group(["Block", "Block", "Cross", "Block", "Cross"], ["a", "b", "c", "a", "c"])
    assert kinds.labels == ("Block", "Block#2", "Cross")
    assert kinds.examples == (0, 1, 2)
    assert kinds.of == (0, 1, 2, 0, 2)
    assert kinds.members(0) == (0, 3)


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


def test_what_stands_beside_an_example_may_run_itself_and_so_does_the_last():
    assert group("AAAAAA", [1] * 6).twins() == (None, 0, 0, 0, 0, 0)
    assert group("AAAAAA", [1] * 6).twins(surrounded=True) == (None, None, 0, 0, 0, None)
    kinds = group("AAAAABAAA", [1, 1, 1, 1, 1, 2, 1, 1, 1])
    assert kinds.twins(surrounded=True) == (None, None, 0, 0, None, None, None, 0, None)


def test_head_examples_and_tail_stand_for_all_parts():
    kinds = group(["A", "A", "B", "A"], [1, 1, 2, 1])
    head, one, other, tail = kinds.parts(["h.0", "h.1", "h.2", "h.3"])
    assert (head.part, head.label, head.block, head.follower) == (0, "head", "", None)
    assert (one.part, one.label, one.block, one.follower) == (1, "A", "h.0", 2)
    assert (other.part, other.label, other.block, other.follower) == (3, "B", "h.2", None)
    assert (tail.part, tail.label) == (5, "tail")
    assert [part.part for part in group((), ()).parts(())] == [0, 1]
