"""Processes that SLURM, Kubeflow, MPI or a person start train as under DDP; variables are set by hand."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.plugins.environments import KubeflowEnvironment
from torch.utils.data import DataLoader

from lightning_mist import MistStrategy
from tests.fits import Project, Tokens, make_trainer, plan, quiet
from tests.ranks import environment

WORKER = [sys.executable, __file__]

pytestmark = pytest.mark.thorough


class Noted(Project):
    """Notes its losses."""

    def __init__(self):
        super().__init__(optimizer="sgd")
        self.losses = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


def fit(kind, name, folder):
    """On two nodes of one process each, or under MPI on one of two; rank 0 writes how it was started and the losses."""
    quiet()
    pl.seed_everything(1, verbose=False)
    module = Noted()
    trainer = make_trainer(
        MistStrategy(plan=plan([(2, [0]), (2, [1])], rows=4, microbatches=2)) if name == "mist" else name,
        devices=2 if kind == "mpi" else 1,
        num_nodes=1 if kind == "mpi" else 2,
        plugins=[KubeflowEnvironment()] if kind == "kubeflow" else None,
        max_epochs=2,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(Tokens(32, 0), batch_size=4))
    assert trainer.strategy.node_rank == (0 if kind == "mpi" else trainer.global_rank)
    if trainer.is_global_zero:
        known = type(trainer.strategy.cluster_environment).__name__
        Path(folder, f"{name}.json").write_text(json.dumps([known, module.losses]))


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


def trained_alike(folder, name):
    """Lightning knew the environment by this name, and losses under the strategy are those of DDP."""
    (known, found), (_, expected) = (json.loads((folder / f"{item}.json").read_text()) for item in ("mist", "ddp"))
    assert known == name
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] < found[0]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("slurm", "SLURMEnvironment"), ("kubeflow", "KubeflowEnvironment"), ("by_hand", "LightningEnvironment")],
)
def test_a_pipeline_over_two_nodes_trains_as_ddp_does(tmp_path, kind, name):
    for strategy in ("mist", "ddp"):
        with socket.create_server(("localhost", 0)) as server:
            port = str(server.getsockname()[1])
        ranks = [
            subprocess.Popen(
                [*WORKER, kind, strategy, str(tmp_path)],
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
    trained_alike(tmp_path, name)


def test_a_pipeline_that_mpi_starts_trains_as_ddp_does(tmp_path):
    pytest.importorskip("mpi4py", reason="Lightning's MPIEnvironment needs mpi4py")
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("there is no mpirun")
    for strategy in ("mist", "ddp"):
        command = [mpirun, "-n", "2", *WORKER, "mpi", strategy, str(tmp_path)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    trained_alike(tmp_path, "MPIEnvironment")


if __name__ == "__main__":
    fit(*sys.argv[1:])
