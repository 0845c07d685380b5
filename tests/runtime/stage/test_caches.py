import torch

from lightning_mist.model.cuts.mapping import map_module
from lightning_mist.runtime.stage.pipeline_stage import no_caches
from tests import zoo


def test_blocks_get_no_cache_while_gradients_are_wanted():
    module, make_batch = zoo.make("llama")
    batch, seen = make_batch(2), []
    found = map_module(module, zoo.step(module), batch)
    for block in module.model.model.layers:
        block.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: seen.extend(type(x).__name__ for x in [*args, *kwargs.values()]), with_kwargs=True
        )

    def sees_cache():
        seen.clear()
        zoo.step(module)(batch)
        return "DynamicCache" in seen

    before = [dict(block._forward_pre_hooks) for block in module.model.model.layers]
    with no_caches(module, found):
        assert not sees_cache()
        with torch.no_grad():
            assert sees_cache()
    assert sees_cache()
    assert [dict(block._forward_pre_hooks) for block in module.model.model.layers] == before
