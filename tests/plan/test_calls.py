import sys

import torch

from lightning_mist.plan.calls import (
    block_value,
    call_signature,
    call_site,
    describe_value,
    is_block_value,
    occurrence,
    results,
    select,
    user_line,
    without_caches,
)


def test_names_count_calls_at_one_place_within_a_region():
    counts = {}
    keys = [occurrence(counts, "glue", region, "mul") for region in (0, 0, 1)]
    assert [key[-1] for key in keys] == [0, 1, 0]
    assert keys[0][2:3] == ("mul",)
    assert keys[0][3][:2] == ("tests.plan.test_calls", "<listcomp>" if sys.version_info < (3, 12) else keys[0][3][1])
    assert occurrence({}, "glue", 0, "mul")[-1] == 0


def test_names_are_text_for_people():
    line = sys._getframe().f_lineno + 1
    key = (*occurrence({}, "glue", -1, "add"), 0)
    place = f"tests.plan.test_calls:{line}, in test_names_are_text_for_people"
    assert describe_value(key) == f"result of add ({place}, before layer 0)"
    assert describe_value(("inner", 3, *key[2:])) == f"result of add ({place}, inside layer 3)"
    assert describe_value(block_value(2, 1)) == "output 1 of layer 2"
    assert is_block_value(block_value(2, 1))
    assert not is_block_value(key)


def test_places_hold_no_paths():
    assert call_site()[0] == __name__
    assert user_line().startswith(__file__)


def test_signatures_tell_shapes_types_and_plain_values():
    def of(*leaves):
        return call_signature(leaves)

    x = torch.zeros(2, 3)
    assert of(x, 1, None) == of(x + 1, 1, None)
    assert len({of(x, 1), of(x.double(), 1), of(x[:1], 1), of(x, 2), of(x, True), of(x, "1")}) == 6 - 1  # 1 == True


def test_results_of_item_assignment_are_its_target():
    x = torch.zeros(2)
    assert tuple(results("__setitem__", (x, 0, 1.0), None)) == (x,)
    assert len(list(results("split", (x,), [(x, 1), {"a": x}]))) == 3


def is_mask(item):
    return isinstance(item, torch.Tensor) and item.dtype == torch.bool


def test_selecting_by_positions_equals_selecting_by_masks():
    x, mask = torch.arange(12.0).view(3, 4), torch.tensor([True, False, True])
    for index in (mask, (mask, 1), (mask, slice(1, 3)), (slice(0, 2), torch.tensor([True, False, True, True]))):
        function, args = select("__getitem__", torch.Tensor.__getitem__, (x, index), is_mask)
        assert torch.equal(function(*args), x[index])
        assert not any(is_mask(item) for item in (args[1] if isinstance(args[1], tuple) else (args[1],)))
    for other in (mask[:, None], x > 5, torch.ones(2, 1, 4, dtype=torch.bool)):
        function, args = select("masked_select", torch.masked_select, (x, other), is_mask)
        assert torch.equal(function(*args), torch.masked_select(x, other))
    target = x.clone()
    function, args = select("__setitem__", torch.Tensor.__setitem__, (target, mask, 0.0), is_mask)
    function(*args)
    x[mask] = 0.0
    assert torch.equal(target, x)


def test_only_empty_caches_are_taken_away():
    from transformers import DynamicCache

    empty, full = DynamicCache(), DynamicCache()
    full.update(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), 0)
    args, kwargs = without_caches((1, empty), {"past": empty, "full": full})
    assert args == (1, None)
    assert kwargs["past"] is None
    assert kwargs["full"] is full
