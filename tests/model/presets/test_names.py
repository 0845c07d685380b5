import pytest

from lightning_mist.model.presets.named_models import check_length, check_name, check_precision


def test_near_names_are_told(tmp_path):
    check_name("gpt3-22b")
    with pytest.raises(ValueError, match=r"model 'nope': not a preset, .*; did you mean '.*' or '.*'\? Presets"):
        check_name("nope")
    with pytest.raises(ValueError, match="did you mean 'llama3-8b', "):
        check_name("llama3-8")
    with pytest.raises(ValueError, match="there is no such file"):
        check_name(str(tmp_path / "config.json"))


def test_precisions():
    check_precision("bf16-true")
    with pytest.raises(ValueError, match="precision '8bit': known precisions are 32-true"):
        check_precision("8bit")


def test_lengths():
    assert check_length("gpt3-22b", 8) == 8
    for length in (None, 0):
        with pytest.raises(ValueError, match=r"tokens per row are needed; give --seq-len 2048"):
            check_length("gpt3-22b", length)
