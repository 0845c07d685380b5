import pytest
import torch

from lightning_mist.errors import PlanError
from lightning_mist.strategy.training.batch_exchange import check_same_samples, digest_of


def test_ranks_that_have_loaded_the_same_go_on():
    check_same_samples(["a", "a"], (2, 3), 2)


@pytest.mark.parametrize(
    ("digests", "message"),
    [
        (["a", "a", "b"], "data_parallel_size = 2: ranks 3 to 5 share .*rank 5 has loaded other samples than rank 3"),
        (["a", None, "a"], "rank 4 has loaded other samples than rank 3"),
        ([None, None, None], "hold no tensors by which it could be told"),
    ],
)
def test_others_are_refused(digests, message):
    with pytest.raises(PlanError, match=message):
        check_same_samples(digests, range(3, 6), 2)


def test_batches_are_told_apart_by_their_values():
    batch = {"x": torch.arange(6.0).reshape(2, 3), "names": ["a"], "y": [torch.tensor(1), torch.empty(0)]}
    same = {"x": batch["x"].t().contiguous().t(), "names": ["b"], "y": [torch.tensor(1), torch.empty(0)]}
    assert digest_of(batch) == digest_of(same)
    for change in ({"x": batch["x"] + 1}, {"x": batch["x"].double()}, {"x": batch["x"].reshape(3, 2)}):
        assert digest_of({**batch, **change}) != digest_of(batch)
    unreadable = torch.ones(2, dtype=torch.complex64).conj(), torch.zeros(2, device="meta"), torch.eye(2).to_sparse()
    for nothing in ("no tensors", torch.empty(0), *unreadable):
        assert digest_of([nothing]) is None


def test_of_large_tensors_all_rows_count():
    batch = torch.zeros(100, 10_000)
    other = batch.clone()
    other[57] = 1.0
    assert digest_of(batch) != digest_of(other)
