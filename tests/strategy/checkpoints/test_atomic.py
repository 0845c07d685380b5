"""A checkpoint's name stands for a whole one, whenever the process that writes it is killed."""

import io
import os
import shutil

import pytest
import torch

from lightning_mist.strategy.checkpoints import atomic
from lightning_mist.strategy.checkpoints.atomic import META, discard, partial_path, publish, save_file
from tests.strategy.checkpoints.kill_points import kill_points
from tests.tiers import tiered

LEAST_POINTS = 20


def content(number):
    return {"weight": torch.full((50, 7), float(number)), "step": number}


def is_whole(path, number):
    return torch.equal(torch.load(path)["weight"], content(number)["weight"]) and torch.load(path)["step"] == number


def clear(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def folder_of(path, number):
    path.mkdir(parents=True)
    torch.save(content(number), path / META)
    torch.save(content(number), path / "shard")


@pytest.mark.parametrize("has_before", tiered([True, False], [True]))
def test_a_file_is_the_old_or_the_new_one(tmp_path, has_before):
    folder, seen = tmp_path / "run", []
    path = folder / "last.ckpt"

    def prepare():
        clear(folder)
        if has_before:
            save_file(content(1), path)

    for _ in kill_points(lambda: save_file(content(2), path), prepare):
        is_new = path.exists() and is_whole(path, 2)
        assert is_new or (is_whole(path, 1) if has_before else not path.exists())
        assert [name for name in os.listdir(folder) if name.endswith(".ckpt")] == ["last.ckpt"] * path.exists()
        seen.append(is_new)
        save_file(content(3), path)
        assert is_whole(path, 3)
        assert os.listdir(folder) == ["last.ckpt"]
    assert is_whole(path, 2)
    assert len(seen) >= LEAST_POINTS
    assert seen == sorted(seen)


@pytest.mark.parametrize("before", ["nothing", "file", "folder", "link"])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_the_old_or_the_new_one(tmp_path, monkeypatch, before, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(atomic.ctypes, "CDLL", lambda _: None)
    folder, seen = tmp_path / "run", []
    path, partial = folder / "last.ckpt", partial_path(folder / "last.ckpt")

    def prepare():
        clear(folder)
        if before == "file":
            save_file(content(1), path)
        elif before == "folder":
            folder_of(path, 1)
        elif before == "link":
            folder_of(folder / "epoch=1.ckpt", 1)
            path.symlink_to("epoch=1.ckpt")
        folder_of(partial, 2)

    for _ in kill_points(lambda: publish(partial, path), prepare):
        is_new = path.is_dir() and is_whole(path / META, 2) and is_whole(path / "shard", 2)
        if not is_new and before != "nothing":
            was = path
            if not can_exchange and not path.exists():
                was = partial.with_name(f"{partial.name}-before")
            assert is_whole(was, 1) if before == "file" else is_whole(was / META, 1) and is_whole(was / "shard", 1)
        seen.append(is_new)
    assert is_whole(path / META, 2)
    assert before != "link" or is_whole(folder / "epoch=1.ckpt" / "shard", 1)
    assert not partial.exists()
    assert seen == sorted(seen)


def test_nothing_is_left_of_a_folder_that_is_removed(tmp_path):
    path = tmp_path / "run" / "last.ckpt"

    def prepare():
        clear(path.parent)
        folder_of(path, 1)

    for _ in kill_points(lambda: discard(path), prepare):
        assert not path.exists() or (is_whole(path / META, 1) and is_whole(path / "shard", 1))
    assert os.listdir(path.parent) == []


def test_a_file_has_the_bytes_of_lightnings(tmp_path):
    save_file(content(1), tmp_path / "new" / "one.ckpt")
    torch.save(content(1), buffer := io.BytesIO())
    assert (tmp_path / "new" / "one.ckpt").read_bytes() == buffer.getvalue()


def test_what_fails_leaves_the_old_one_and_nothing_else(tmp_path):
    save_file(content(1), tmp_path / "one.ckpt")
    with pytest.raises(AttributeError, match="local object"):
        save_file({"function": lambda: None, **content(2)}, tmp_path / "one.ckpt")
    assert is_whole(tmp_path / "one.ckpt", 1)
    assert os.listdir(tmp_path) == ["one.ckpt"]


def test_a_folder_of_other_things_is_not_replaced(tmp_path):
    (tmp_path / "results").mkdir()
    save_file(content(1), tmp_path / "results" / "one.ckpt")
    with pytest.raises(IsADirectoryError, match=r"is a folder and no checkpoint .* Give the name of"):
        save_file(content(2), tmp_path / "results")
    assert is_whole(tmp_path / "results" / "one.ckpt", 1)


def test_a_link_is_replaced_and_not_what_it_names(tmp_path):
    save_file(content(1), tmp_path / "epoch=1.ckpt")
    (tmp_path / "last.ckpt").symlink_to("epoch=1.ckpt")
    save_file(content(2), tmp_path / "last.ckpt")
    assert is_whole(tmp_path / "epoch=1.ckpt", 1)
    assert is_whole(tmp_path / "last.ckpt", 2)
    discard(tmp_path / "last.ckpt")
    assert os.listdir(tmp_path) == ["epoch=1.ckpt"]
