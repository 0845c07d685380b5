"""How models of the zoo are split over tensor-parallel ranks, written by hand."""

import re
from dataclasses import replace

from lightning_mist.plan import ModuleMap, ParameterSplit, SequenceSplit, TensorSplit

_FUSED = ((3, False), (32, True))
_RULES = {
    "nano": (
        (r"lm_head\.weight$", 0, None),
        (r"attn\.c_attn\.(weight|bias)$", 0, _FUSED),
        (r"attn\.c_proj\.weight$", 1, None),
        (r"mlp\.0\.(weight|bias)$", 0, None),
        (r"mlp\.2\.weight$", 1, None),
        (r"wte\.weight$", 0, None),
    ),
    "gpt2": (
        (r"attn\.c_attn\.weight$", 1, _FUSED),
        (r"attn\.c_attn\.bias$", 0, _FUSED),
        (r"attn\.c_proj\.weight$", 0, None),
        (r"mlp\.c_fc\.weight$", 1, None),
        (r"mlp\.c_fc\.bias$", 0, None),
        (r"mlp\.c_proj\.weight$", 0, None),
        (r"wte\.weight$", 0, None),
    ),
    "llama": (
        (r"(q|k|v|gate|up)_proj\.weight$", 0, None),
        (r"(o|down)_proj\.weight$", 1, None),
        (r"(embed_tokens|lm_head)\.weight$", 0, None),
    ),
    "bert": (
        (r"layer\.\d+\.attention\.self\.(query|key|value)\.(weight|bias)$", 0, None),
        (r"layer\.\d+\.attention\.output\.dense\.weight$", 1, None),
        (r"layer\.\d+\.intermediate\.dense\.(weight|bias)$", 0, None),
        (r"layer\.\d+\.output\.dense\.weight$", 1, None),
    ),
}
"""For each model: pattern of names, dimension, and its factors where it is not one."""


def hand_split(name: str, module_map: ModuleMap, degree: int = 2) -> ModuleMap:
    """The map with a split for one degree, also for sequence-parallel stages."""
    found = []
    for use in module_map.parameters:
        for pattern, dim, factors in _RULES[name.split("_", maxsplit=1)[0]]:
            if re.search(pattern, use.name) and use.shape[dim] % degree == 0:
                found.append(ParameterSplit(name=use.name, dim=dim, factors=factors or ((use.shape[dim], True),)))
    assert found
    split = TensorSplit(
        degree=degree,
        parameters=tuple(found),
        sequence=tuple(SequenceSplit(position=index, leaf=0, dim=1) for index in range(len(module_map.blocks))),
    )
    cuts = tuple(
        tuple(replace(live, sequence_dim=1) if live.requires_grad and len(live.shape) == 3 else live for live in cut)
        for cut in module_map.cuts
    )
    return replace(module_map, splits=(split,), cuts=cuts)
