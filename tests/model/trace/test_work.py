import pytest
import sympy

from lightning_mist.model.spec.model_spec import OperatorCost
from lightning_mist.model.spec.polynomial import MICROBATCH as b
from lightning_mist.model.spec.polynomial import QUADRATIC, Basis, MisfitError
from lightning_mist.model.trace.layer_costs import fit_work
from lightning_mist.model.trace.ledger import PhaseCount

BASIS = Basis(powers=QUADRATIC, points=((2, 1), (3, 1), (5, 1)), check=(7, 1))
ROWS = [rows for rows, _ in BASIS.sizes]


def phases(work, rows=ROWS):
    return [PhaseCount(work=work(size)) for size in rows]


def entry(kind, flops, moved, calls):
    return OperatorCost(kind=kind, flops=sympy.sympify(flops), moved_bytes=sympy.sympify(moved), calls=calls)


def forward(rows):
    return [
        ("matmul", 100 * rows, 8 * rows + 4, ),
        ("elementwise", 0, 3 * rows),
        ("matmul", 7000 * rows, 9 * rows + 900),
        ("elementwise", 0, 5),
        ("matmul", 100 * rows, 8 * rows + 4),
    ]  # fmt: skip


def test_products_are_told_apart_by_size_and_others_by_kind_alone():
    assert fit_work(BASIS, phases(forward), "block") == (
        entry("elementwise", 0, 3 * b + 5, 2),
        entry("matmul", 200 * b, 16 * b + 8, 2),
        entry("matmul", 7000 * b, 9 * b + 900, 1),
    )


def test_products_that_are_equal_at_one_size_only_are_not_the_same():
    found = fit_work(
        BASIS, phases(lambda rows: [("matmul", 10 * rows, 0), ("matmul", 20, 0), ("matmul", 5 * rows**2, 0)]), "block"
    )
    assert [item.flops for item in found] == [10 * b, 20, 5 * b**2]


def test_adding_to_gradients_counts_instead_of_keeping_them():
    def first(rows):
        return [("matmul", rows, rows), ("copy", 0, 40), ("reduction", 0, rows)]

    def later(rows):
        return [("matmul", rows, rows), ("reduction", 0, rows), ("elementwise", 0, 120), ("elementwise", 0, 60)]

    found = fit_work(BASIS, phases(first), "block", later=phases(later, ROWS[:1]))
    assert found == (entry("elementwise", 0, 180, 2), entry("matmul", b, b, 1), entry("reduction", 0, b, 1))


def test_numbers_of_operators_that_depend_on_the_size_are_refused():
    with pytest.raises(MisfitError, match=r"operators of the block depends on the size: \[2, 3, 5, 7\]"):
        fit_work(BASIS, phases(lambda rows: [("copy", 0, 1)] * rows), "block")
    # As many of them, but of other kinds.
    with pytest.raises(MisfitError, match="operators of the block depends on the size"):
        fit_work(BASIS, phases(lambda rows: [("copy" if rows > 2 else "index", 0, 1)]), "block")


def test_what_is_no_polynomial_is_refused():
    with pytest.raises(MisfitError, match="FLOPs of the block"):
        fit_work(BASIS, phases(lambda rows: [("matmul", 2**rows, 0)]), "block")


def test_products_that_are_there_only_when_gradients_are_cannot_be_told_apart():
    with pytest.raises(MisfitError, match="adding to gradients changes the matmul operators of the block"):
        fit_work(BASIS, phases(lambda _: []), "block", later=phases(lambda _: [("matmul", 1, 1)]))
