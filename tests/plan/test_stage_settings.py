from dataclasses import replace

import pytest

from lightning_mist.errors import PlanError
from lightning_mist.plan import Checkpointing, StageMesh


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": (0, 1)}, r"2 devices with degrees \(1, 1, 1\).*is 1"),
        ({"devices": (0, 1), "data_parallel_degree": 3}, r"2 devices with degrees \(3, 1, 1\).*is 3"),
        ({"devices": (0, 0), "data_parallel_degree": 2}, r"devices \[0, 0\]: each must be named once"),
        ({"devices": (-1,)}, r"devices \[-1\]: each must be named once and not be negative"),
        ({"devices": (), "data_parallel_degree": 0}, r"degrees \(0, 1, 1\).*each must be at least 1"),
        ({"devices": (0,), "tensor_parallel_degree": -1}, r"degrees \(1, -1, 1\)"),
        (
            {"devices": tuple(range(6)), "data_parallel_degree": 6, "shard_degree": 4},
            r"shard_degree = 4 with 6 ranks that have the same parameters .*; use 2 or 3 or 6$",
        ),
        ({"devices": (0, 1), "data_parallel_degree": 2, "shard_degree": 0}, "shard_degree = 0 with 2 ranks.*; use 2$"),
        (
            {"devices": (0, 1), "data_parallel_degree": 2, "shard_degree": 1},
            "shard_degree = 1 with 2 ranks.*use zero_stage = 0",
        ),
        ({"devices": (0,), "sequence_parallel": True}, "sequence_parallel needs tensor_parallel_degree of at least 2"),
    ],
)
def test_meshes_that_contradict_themselves_are_refused(arguments, message):
    with pytest.raises(PlanError, match=message):
        StageMesh(**arguments)


def test_degrees_cover_the_devices():
    mesh = StageMesh(
        devices=tuple(range(8)),
        data_parallel_degree=2,
        tensor_parallel_degree=2,
        context_parallel_degree=2,
        sequence_parallel=True,
    )
    assert len(mesh.devices) == 8


def test_a_group_of_all_that_have_the_same_parameters_is_no_hybrid():
    mesh = StageMesh(
        devices=tuple(range(8)), data_parallel_degree=2, context_parallel_degree=2, tensor_parallel_degree=2
    )
    assert (mesh.num_peers, mesh.shard_degree, mesh.shard_ranks) == (4, None, 4)
    assert replace(mesh, shard_degree=4) == mesh
    assert replace(mesh, shard_degree=2).shard_ranks == 2


def test_without_recomputed_layers_there_is_nothing_to_tell_apart():
    assert Checkpointing(kind="selective") == Checkpointing()
    assert Checkpointing(layers=1, kind="selective") != Checkpointing(layers=1)
