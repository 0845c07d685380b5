from dataclasses import replace

import pytest
import torch

from lightning_mist.cli.machine import measured_profile, open_cluster
from lightning_mist.hardware import catalog_profile, detect, save_profile
from lightning_mist.strategy.machine import default_directory


def test_plan_for_this_machine_uses_what_was_measured_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cluster = detect(1, 1, "cpu")
    kept = replace(catalog_profile(cluster), source="kept from earlier")
    save_profile(kept, default_directory(), cluster)
    assert open_cluster("local") == cluster
    assert measured_profile(cluster, "32-true") == kept


def test_more_processes_than_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="cluster 'local:3': this machine has 2 CUDA devices; write local:2"):
        open_cluster("local:3")
