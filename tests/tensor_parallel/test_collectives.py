import pytest
import torch

from lightning_mist.tensor_parallel import collectives, run_ranks
from lightning_mist.tensor_parallel.shard_layout import Layout, take

LAYOUT = Layout((3, 8, 2), 1, 2)
X = torch.arange(48.0, dtype=torch.float64).reshape(3, 8, 2)


def on(function, leaf):
    """A function's value and the gradient of its leaf, for a cotangent that each rank makes of the shape."""

    def rank(group):
        x = leaf(group).clone().requires_grad_()
        value = function(x, group)
        cotangent = torch.linspace(0, 1, value.numel(), dtype=value.dtype).reshape(value.shape)
        value.backward(cotangent * (1 + group.rank) if value.shape == X.shape else cotangent)
        return value.detach(), x.grad, cotangent

    return run_ranks(2, rank)


def mine(group):
    return take(X, LAYOUT, group.rank, 2)


def test_copies_in():
    for value, grad, cotangent in on(collectives.copy_in, lambda g: X):
        assert torch.equal(value, X)
        torch.testing.assert_close(grad, 3 * cotangent)


def test_reduces():
    for rank, (value, grad, cotangent) in enumerate(on(collectives.reduce, lambda g: X)):
        assert torch.equal(value, 2 * X)
        torch.testing.assert_close(grad, cotangent * (1 + rank))


@pytest.mark.parametrize("is_partial", [False, True])
def test_gathers(is_partial):
    ranks = on(lambda x, g: collectives.gather(x, LAYOUT, g, is_partial=is_partial), mine)
    for rank, (value, grad, cotangent) in enumerate(ranks):
        assert torch.equal(value, X)
        torch.testing.assert_close(grad, take(cotangent, LAYOUT, rank, 2) * (3 if is_partial else 1 + rank))


def test_scatters():
    ranks = on(lambda x, g: collectives.scatter(x, LAYOUT, g), lambda g: X)
    for rank, (value, grad, cotangent) in enumerate(ranks):
        assert torch.equal(value, take(X, LAYOUT, rank, 2))
        torch.testing.assert_close(take(grad, LAYOUT, rank, 2), cotangent)
        assert torch.equal(grad, ranks[0][1])


def test_reduces_and_scatters():
    ranks = on(lambda x, g: collectives.reduce_scatter(x, LAYOUT, g), lambda g: X * (1 + g.rank))
    for rank, (value, grad, cotangent) in enumerate(ranks):
        assert torch.equal(value, take(3 * X, LAYOUT, rank, 2))
        torch.testing.assert_close(take(grad, LAYOUT, rank, 2), cotangent)


def test_nothing_is_done_for_values_without_gradient():
    def rank(group):
        assert collectives.copy_in(X, group) is X
        part = collectives.scatter(X, Layout((3, 8, 2), 1), group)
        assert part.untyped_storage().data_ptr() == X.untyped_storage().data_ptr()
        with torch.no_grad():
            leaf = torch.ones(2, requires_grad=True)
            assert collectives.copy_in(leaf, group) is leaf

    run_ranks(2, rank)


class _Later:
    """A group whose ranks leave gradients of what all hold as summands."""

    adds_later = True

    def __init__(self, group):
        self.rank, self.size = group.rank, group.size
        self.all_reduce, self.all_gather, self.reduce_scatter = group.all_reduce, group.all_gather, group.reduce_scatter


def later(function, leaf):
    return on(lambda x, group: function(x, _Later(group)), leaf)


def test_gradients_that_are_added_up_later_stay_summands():
    assert all(
        torch.equal(grad, cotangent * (1 + rank))
        for rank, (_, grad, cotangent) in enumerate(
            later(lambda x, group: collectives.copy_in(x, group) * 1, lambda g: X)
        )
    )
    for rank, (_, grad, cotangent) in enumerate(later(lambda x, g: collectives.scatter(x, LAYOUT, g), lambda g: X)):
        torch.testing.assert_close(take(grad, LAYOUT, rank, 2), cotangent)
        assert grad.count_nonzero() == cotangent.count_nonzero()
    for rank, (value, grad, cotangent) in enumerate(later(lambda x, g: collectives.gather(x, LAYOUT, g), mine)):
        assert torch.equal(value, X)
        torch.testing.assert_close(grad, 3 * take(cotangent, LAYOUT, rank, 2))
    for _, grad, cotangent in later(collectives.reduce, lambda g: X):
        torch.testing.assert_close(grad, 3 * cotangent)


def test_what_enters_and_leaves_has_whole_gradients():
    for rank, (value, grad, cotangent) in enumerate(later(collectives.leave, lambda g: X)):
        assert torch.equal(value, X)
        torch.testing.assert_close(grad, cotangent * (1 + rank) / 2)
    for _, grad, cotangent in later(collectives.enter, lambda g: X):
        torch.testing.assert_close(grad, 3 * cotangent)
    for function in (collectives.enter, collectives.leave):
        assert all(value.grad_fn is None for value, *_ in on(lambda x, g, f=function: f(x, g) * 1, lambda g: X))
