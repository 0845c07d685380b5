import pytest
import sympy
import torch

from lightning_mist.model.spec.polynomial import BILINEAR, CONSTANT, QUADRATIC
from lightning_mist.model.spec.polynomial import MICROBATCH as b
from lightning_mist.model.spec.polynomial import SEQUENCE as s
from lightning_mist.model.trace.sizes import bases, sized

TOKENS = torch.zeros(4, 100, dtype=torch.int64)
IMAGES = torch.zeros(3, 1, 2, 2)
HUGE = torch.zeros(8, 1 << 20)
RAGGED = (torch.zeros(3, 2), torch.zeros(4, 2))


@pytest.mark.parametrize(
    ("batch", "powers"),
    [
        (TOKENS, [BILINEAR, QUADRATIC, CONSTANT]),
        (TOKENS[:, :3], [QUADRATIC, CONSTANT]),  # too short to be thinned out twice
        (IMAGES, [QUADRATIC, CONSTANT]),
        (RAGGED, [CONSTANT]),
    ],
)
def test_the_most_general_sizes_come_first(batch, powers):
    assert [basis.powers for basis in bases(batch, real=False)] == powers


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("batch", [TOKENS, TOKENS[:1], TOKENS.repeat(1, 50), TOKENS[:, :4], IMAGES, HUGE])
def test_sizes_determine_what_is_fitted_and_check_it(batch, real):
    expression = {BILINEAR: 3 + b + 5 * s + 2 * b * s + s**2 + 7 * b * s**2, QUADRATIC: 3 + b + 5 * b**2}
    for basis in bases(batch, real=real):
        if basis.powers == CONSTANT:
            continue
        wanted = expression[basis.powers]
        counts = [int(wanted.subs({b: rows, s: length})) for rows, length in basis.sizes]
        assert sympy.expand(basis.fit(counts, "bytes") - wanted) == 0
        assert basis.check not in basis.points
        assert min(rows for rows, _ in basis.sizes) >= 2


def points(batch, real=False):
    return next(bases(batch, real=real)).points


def test_sizes_stay_small():
    long = TOKENS.repeat(1, 50)
    assert max(length for _, length in points(long)) == 512
    assert max(length for _, length in points(long, real=True)) == 64
    assert [rows for rows, _ in points(IMAGES)] == [3, 6, 9]
    assert [rows for rows, _ in points(HUGE)] == [rows for rows, _ in points(IMAGES, real=True)] == [2, 4, 6]


def test_batches_are_made_for_their_sizes():
    made = {basis.powers: sized(TOKENS, basis, basis.points[-1], None) for basis in bases(TOKENS, real=False)}
    assert made[BILINEAR].shape == (8, 25)
    assert made[QUADRATIC].shape == (12, 100)
    assert made[CONSTANT] is TOKENS


def test_the_user_s_own_way_to_resize_is_taken():
    for basis in bases(TOKENS, real=False):
        if basis.powers != CONSTANT:
            made = sized("batch", basis, (5, 7), lambda *args: args)
            assert made == ("batch", 5, 7 if basis.powers == BILINEAR else None)
