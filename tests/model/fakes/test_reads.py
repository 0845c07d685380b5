import pytest
import torch

from lightning_mist.without_values import READS, guess_read


@pytest.mark.parametrize("name", sorted(READS - {"__array__", "__contains__", "__index__"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_guesses_have_the_type_of_answers(name, dtype):
    tensor = torch.ones(1, dtype=dtype)[0] if name in ("__format__", "__bool__") else torch.ones(1, dtype=dtype)
    args = {"__format__": (tensor, ""), "equal": (tensor, tensor), "allclose": (tensor, tensor)}.get(name, (tensor,))
    owner = torch if name in ("equal", "allclose", "is_nonzero") else torch.Tensor
    answer, guess = getattr(owner, name)(*args), guess_read(name, args, {}, tensor, truth=True, number=1.25)
    assert type(guess) is type(answer)
    if isinstance(answer, torch.Tensor):
        assert guess.dtype == answer.dtype
        assert guess.shape[1:] == answer.shape[1:]


def test_positions_by_where():
    tensor = torch.ones(2, 3)
    guess = guess_read("where", (tensor,), {}, tensor)
    assert len(guess) == 2
    assert all(part.shape == (6,) for part in guess)
