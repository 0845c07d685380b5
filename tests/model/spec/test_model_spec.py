import dataclasses
import pickle

import pytest
import sympy

from lightning_mist.model.spec.model_spec import TensorSpec
from lightning_mist.model.spec.polynomial import MICROBATCH as b
from lightning_mist.model.spec.polynomial import SEQUENCE as s
from tests.specs import spec


@pytest.mark.parametrize(
    ("shape", "itemsize", "size"),
    [((b, s, sympy.Integer(8)), 2, 16 * b * s), ((), 4, 4), ((b, sympy.Integer(0)), 4, 0)],
)
def test_bytes_of_a_tensor(shape, itemsize, size):
    tensor = TensorSpec(shape=shape, dtype="float16", itemsize=itemsize, requires_grad=True)
    assert tensor.bytes == size
    assert isinstance(tensor.bytes, sympy.Expr)


def test_every_layer_counts_though_kinds_are_kept_once():
    network = spec(6, kinds=(0, 0, 1, 0, 1, 1), widths=(1000, 2000))
    assert network.num_layers == 6
    assert len(network.layers) == 2
    assert spec(0).num_layers == 0


def test_a_specification_is_a_value_that_can_travel():
    network = spec(3, measured=True)
    assert pickle.loads(pickle.dumps(network)) == network == spec(3, measured=True)
    assert dataclasses.replace(network, batch_bytes=b * s) != network
    with pytest.raises(dataclasses.FrozenInstanceError):
        network.name = "other"
