import sympy

from lightning_mist.model.spec.polynomial import BILINEAR, CONSTANT, Basis
from lightning_mist.model.spec.polynomial import MICROBATCH as B
from lightning_mist.model.spec.polynomial import SEQUENCE as S
from lightning_mist.model.trace.layer_costs import boundary_specs
from lightning_mist.plan import LiveTensor, ModuleMap

BASIS = Basis(BILINEAR, tuple((b, s) for s in (8, 4, 2) for b in (2, 4)), (6, 6))


def live(*shape: int, batch_dim: int | None = 0) -> LiveTensor:
    return LiveTensor(key=shape, shape=shape, dtype="bfloat16", requires_grad=True, batch_dim=batch_dim)


def module_map(*cut: LiveTensor) -> ModuleMap:
    return ModuleMap(step="training_step", blocks=("a", "b"), cuts=(cut,), parameters=(), batch_rows=4)


def shapes(cut: tuple[LiveTensor, ...], basis: Basis = BASIS) -> list[tuple[sympy.Expr, ...]]:
    # What enters block b at every size: an activation whose width happens to be the traced length, and a mask.
    entering = [((), ((b, s, 8), (1, 1, s, s))) for b, s in basis.sizes]
    ((*tensors,),) = boundary_specs(module_map(*cut), basis, entering, 8)
    assert all(tensor.itemsize == 2 for tensor in tensors)
    return [tensor.shape for tensor in tensors]


def test_arguments_of_the_block_have_the_shapes_they_were_seen_with() -> None:
    assert shapes((live(4, 8, 8), live(1, 1, 8, 8, batch_dim=None))) == [(B, S, 8), (1, 1, S, S)]


def test_others_follow_the_batch_dimension_and_the_length() -> None:
    assert shapes((live(4, 8, 5), live(12, 4), live(32, 3), live(8, 4, 5, batch_dim=1))) == [
        (B, S, 5),
        (3 * B, 4),
        (B * S, 3),
        (S, B, 5),
    ]


def test_nothing_varies_where_one_size_was_traced() -> None:
    assert shapes((live(4, 3),), Basis(CONSTANT, ((4, 8),), None)) == [(4, 3)]


def test_bytes_of_a_boundary() -> None:
    ((tensor,),) = boundary_specs(module_map(live(4, 8, 5)), BASIS, [((), ())] * 7, 8)
    assert tensor.bytes == 2 * 5 * B * S
