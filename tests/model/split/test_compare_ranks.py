import pytest
import torch

from lightning_mist.model.split.compare_ranks import Reference, Result
from lightning_mist.plan.tensor_split import ParameterSplit

WEIGHT = torch.arange(24.0, dtype=torch.float64).view(6, 4) + 1
SPLITS = {
    "rows": ParameterSplit(name="weight", dim=0, factors=((6, True),)),
    "columns": ParameterSplit(name="weight", dim=1, factors=((4, True),)),
    "parts of rows": ParameterSplit(name="weight", dim=0, factors=((3, False), (2, True))),
}


def run(weight=WEIGHT, output=2.0, given=None):
    x = torch.full((2, 2), output, dtype=torch.float64)
    return Result(outputs=(x,), inputs=(x * 3 if given is None else given,), parameters={"weight": weight})


def compared(ranks, splits=(), whole=None):
    whole = run() if whole is None else whole
    return Reference.of(whole, torch.float64).difference(ranks, splits)


def parts(split):
    sizes = {"rows": (6,), "columns": (4,), "parts of rows": (3, 2)}[split]
    view = WEIGHT.unflatten(SPLITS[split].dim, sizes)
    dim = SPLITS[split].dim + len(sizes) - 1
    return [part.reshape(SPLITS[split].local_shape((6, 4), 2)) for part in view.chunk(2, dim)]


def test_equal_runs_do_not_differ():
    assert compared([run(), run()]) is None
    assert compared([run(WEIGHT * (1 + 1e-12))]) is None


@pytest.mark.parametrize("split", SPLITS)
def test_parts_are_held_against_their_places_in_the_whole(split):
    first, second = parts(split)
    assert compared([run(first), run(second)], [SPLITS[split]]) is None
    assert "gradient of parameter weight differs" in compared([run(second), run(first)], [SPLITS[split]])
    assert "gradient of parameter weight has shape (6, 4) on rank 0" in compared([run(), run()], [SPLITS[split]])


def test_what_differs_most_is_named_on_whichever_rank_it_is():
    said = compared([run(), run(output=2.1, given=run().inputs[0])])
    assert said == "the result 0 differs by 5.0e-02 of its size, the tolerance is 1e-10"
    assert "gradient of input 0 differs by 5.0e-01" in compared([run(), run(given=torch.full((2, 2), 9.0))])


def test_a_missing_gradient_differs_unless_it_is_zero():
    assert "gradient of parameter weight differs by inf" in compared([run(None)])
    nothing = run(torch.zeros(6, 4))
    assert compared([run(None)], whole=nothing) is None
    assert compared([nothing], whole=run(None)) is None


def test_what_is_zero_but_for_rounding_is_compared_with_its_kind():
    whole = Result(outputs=(), inputs=(), parameters={"big": torch.ones(2), "none": torch.full((2,), 1e-17)})
    other = Result(outputs=(), inputs=(), parameters={"big": torch.ones(2), "none": torch.full((2,), -3e-17)})
    assert compared([other], whole=whole) is None


def test_numbers_that_are_none_differ():
    assert "differs by nan" in compared([run(WEIGHT * float("nan"))])
    assert "differs by nan" in compared([run()], whole=run(WEIGHT * float("nan")))


def test_tensors_larger_than_a_piece_are_compared_to_their_end():
    whole = Result(outputs=(torch.zeros(3, 2**21),), inputs=(), parameters={})
    other = Result(outputs=(torch.zeros(3, 2**21),), inputs=(), parameters={})
    assert compared([other], whole=whole) is None
    other.outputs[0][2, -1] = 1.0
    assert compared([other], whole=whole) is not None


def test_other_numbers_of_results_differ():
    other = Result(outputs=(), inputs=(), parameters={"weight": WEIGHT})
    assert compared([other]) == "rank 0 gives 1 results and gradients instead of 3"
