import pytest
import torch.distributed as dist

from lightning_mist.runtime.stage.processes import watched_processes


class Library:
    """Runs calls as code of another module would."""

    def __init__(self, name):
        self.space = {"__name__": name, "dist": dist}

    def __call__(self, text):
        return eval(text, self.space)


@pytest.fixture
def group():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def noticed(library, text, answer=True):
    found = []

    def notice(kind, what):
        found.append((kind, what.split(" at ")[0]))
        return answer

    with watched_processes(notice):
        result = Library(library)(text)
    return found, result


def test_collectives_are_noticed_and_may_do_nothing(group):
    found, result = noticed("project", "dist.barrier()")
    assert (found, result) == ([("collective", "barrier")], None)
    found, _ = noticed("project", "dist.all_gather_object([None], 1)")
    assert found[0][0] == "collective"


def test_the_rank_is_noticed_and_told(group):
    assert noticed("project", "dist.get_rank()") == ([("rank", "get_rank")], 0)


@pytest.mark.parametrize("library", ["lightning_mist.strategy", "torch.utils", "lightning.pytorch"])
def test_libraries_may_ask(group, library):
    assert noticed(library, "dist.get_rank()") == ([], 0)


def test_this_package_may_talk(group):
    assert noticed("lightning_mist.strategy", "dist.barrier()")[0] == []
    assert noticed("lightning.pytorch", "dist.barrier()")[0] == [("collective", "barrier")]


def test_the_number_of_processes_is_no_secret(group):
    assert noticed("project", "dist.get_world_size()") == ([], 1)


def test_a_notice_may_refuse(group):
    def refuse(kind, what):
        raise ValueError(what)

    with pytest.raises(ValueError, match=r"barrier at .*test_processes"), watched_processes(refuse):
        dist.barrier()
    dist.barrier()


def test_there_is_nothing_to_notice_without_processes():
    with watched_processes(lambda kind, what: True):
        pass
