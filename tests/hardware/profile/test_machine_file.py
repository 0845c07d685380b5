import json
from dataclasses import replace

import pytest

from lightning_mist.errors import ProfileError
from lightning_mist.hardware import catalog_profile, parse_cluster, read_machine, save_profile, write_profile


def test_what_is_written_is_read(tmp_path):
    cluster = parse_cluster("2x4xL4")
    profile = catalog_profile(cluster)
    write_profile(profile, tmp_path / "profile.json", cluster=cluster)
    assert read_machine(tmp_path / "profile.json") == (cluster, profile)


def test_kept_profiles_are_such_files_too(tmp_path):
    cluster = parse_cluster("2xcpu:8GiB")
    path = save_profile(catalog_profile(cluster), tmp_path, cluster)
    assert read_machine(path)[0] == cluster


def test_host_memory_is_kept_and_files_without_it_are_read(tmp_path):
    path, cluster = tmp_path / "profile.json", replace(parse_cluster("2x4xL4"), host_memory_bytes=2**38)
    write_profile(catalog_profile(cluster), path, cluster=cluster)
    assert read_machine(path)[0] == cluster
    content = json.loads(path.read_text())
    del content["cluster"]["host_memory_bytes"]
    path.write_text(json.dumps(content))
    assert read_machine(path)[0] == parse_cluster("2x4xL4")


def test_a_file_without_devices_says_how_to_get_one(tmp_path):
    path = tmp_path / "profile.json"
    write_profile(catalog_profile(parse_cluster("2xL4")), path)
    with pytest.raises(ProfileError, match=r"does not say what the devices are .*: measure again with lightning-mist"):
        read_machine(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "cluster": {"num_nodes": 1}}))
    with pytest.raises(ProfileError, match="'devices_per_node'"):
        read_machine(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="cannot be read"):
        read_machine(tmp_path / "none.json")
