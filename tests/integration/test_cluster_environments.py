"""Processes that SLURM or Kubeflow start, or a person by hand, train as under DDP; variables are set by hand."""

import json
import socket
import subprocess
import sys

import pytest

from tests.ranks import environment

pytestmark = pytest.mark.thorough


def variables(kind, rank, port):
    """What a process of rank 0 or 1 is told where two nodes have one each."""
    place = {"MASTER_PORT": port}
    if kind == "slurm":  # srun(1)
        numbers = {"NTASKS": 2, "NTASKS_PER_NODE": 1, "NNODES": 2, "PROCID": rank, "NODEID": rank, "LOCALID": 0}
        place |= {f"SLURM_{name}": str(value) for name, value in numbers.items()}
        return place | {"SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "localhost"}
    place["MASTER_ADDR"] = "localhost"
    if kind == "kubeflow":  # the operator of PyTorchJob
        return place | {"WORLD_SIZE": "2", "RANK": str(rank), "KUBERNETES_PORT": "tcp://127.0.0.1:443"}
    return place | {"NODE_RANK": str(rank), "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("kind", "name"),
    [("slurm", "SLURMEnvironment"), ("kubeflow", "KubeflowEnvironment"), ("by_hand", "LightningEnvironment")],
)
def test_a_pipeline_over_two_nodes_trains_as_ddp_does(tmp_path, kind, name):
    for strategy in ("mist", "ddp"):
        with socket.create_server(("localhost", 0)) as server:
            port = str(server.getsockname()[1])
        command = [sys.executable, "-m", "tests.integration.environment_worker", kind, strategy, str(tmp_path)]
        ranks = [
            subprocess.Popen(
                command,
                env={**environment(), **variables(kind, rank, port)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [process.communicate(timeout=300)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        assert [process.returncode for process in ranks] == [0, 0], outputs
    (known, losses), (_, expected) = (json.loads((tmp_path / f"{item}.json").read_text()) for item in ("mist", "ddp"))
    assert known == name
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]
