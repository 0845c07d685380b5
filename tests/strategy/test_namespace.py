import pytest

from lightning_mist.strategy.namespace import Namespace


@pytest.mark.parametrize("root", ["lightning.pytorch", "pytorch_lightning"])
def test_each_copy_of_lightning_has_its_own_parts(root):
    names = Namespace(root)
    package = root.partition(".")[0]
    assert names.ddp_strategy.__module__.partition(".")[0] == package
    assert names.fitting == "fit"
    assert names.is_param_in_hook_signature(lambda batch, batch_idx: None, "batch_idx", min_args=2)
