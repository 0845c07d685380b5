import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_mist.model.trace.rank_step import RankView, dims_of, parts_of, present_parts
from lightning_mist.plan import ModuleMap, ParameterSplit, ParameterUse, SequenceSplit, TensorSplit
from lightning_mist.tensor_parallel import SplitTensor

ROWS = ParameterSplit(name="0.weight", dim=0, factors=((6, True),))
SPLIT = TensorSplit(degree=2, parameters=(ROWS,), sequence=(SequenceSplit(position=1, leaf=0, dim=1),))


def test_hidden_states_enter_only_the_blocks_that_are_said_to_take_parts():
    view = RankView.of(SPLIT, sequence_parallel=True)
    hidden = torch.ones(2, 8, 4)
    (entered,), _ = view.enter(1, (hidden,), {})
    assert isinstance(entered, SplitTensor)
    assert entered.shape == hidden.shape
    assert view.enter(0, (hidden,), {})[0][0] is hidden
    assert RankView.of(SPLIT, sequence_parallel=False).enter(1, (hidden,), {})[0][0] is hidden
    value = {"a": [entered, 3], "b": hidden}
    assert dims_of(value) == (1, None, None)
    parts = parts_of(value)
    assert parts["a"][0].shape == (2, 4, 4)
    shown = view.show(parts, dims_of(value))
    assert shown["a"][0].shape == hidden.shape
    assert shown["b"] is hidden


def test_parts_stand_in_for_parameters_that_are_shared_out():
    module, mode = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False)), FakeTensorMode()
    uses = tuple(
        ParameterUse(name=f"{i}.weight", slots=((str(i), "weight", (0,)),), shape=shape, dtype="float32",
                     requires_grad=True)
        for i, shape in enumerate([(6, 4), (2, 6)])
    )  # fmt: skip
    found = ModuleMap(step="training_step", blocks=(), outputs=(), cuts=(), parameters=uses)
    stand_ins = dict(module.named_parameters())
    view = RankView.of(SPLIT, sequence_parallel=False)
    part, whole = present_parts(module, tuple(stand_ins.values()), found, SPLIT, view.context, mode)
    assert isinstance(part.data, FakeTensor)
    assert part.shape == (3, 4)
    assert whole is stand_ins["1.weight"]
    assert isinstance(module[0].weight, SplitTensor)
    assert module[0].weight.shape == (6, 4)
    assert module[1].weight is whole
