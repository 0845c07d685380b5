import itertools

import pytest

from lightning_mist.tuner.candidates import BEHIND, FRONT
from lightning_mist.tuner.inter_stage import heads_of, tails_of

ORDER = (2, 0, 1)


def seams_of(pipeline, index):
    front = index > 0 and pipeline[index - 1] != pipeline[index]
    behind = index < len(pipeline) - 1 and pipeline[index + 1] != pipeline[index]
    return FRONT * front + BEHIND * behind


def passed(count):
    """Every pipeline with a number of stages that passes the parts in order."""
    for sizes in itertools.product(range(1, count + 1), repeat=len(ORDER)):
        if sum(sizes) == count:
            yield tuple(part for part, size in zip(ORDER, sizes, strict=True) for _ in range(size))


@pytest.mark.parametrize("counts", [(3, 4, 5, 6), (5,), (3,)])
def test_places_are_those_of_all_pipelines(counts):
    """By stages behind, part and seams; each stands for the shortest pipeline that has it."""
    wanted = {}
    for count in counts:
        for pipeline in passed(count):
            for index in range(1, count):
                key = count - 1 - index, pipeline[index], seams_of(pipeline, index)
                wanted[key] = min(count, wanted.get(key, count))
    found = [place for behind in range(max(counts) - 1) for place in tails_of(ORDER, behind, counts)]
    for place in found:
        assert tuple(part for part, _ in itertools.groupby(place.pipeline)) == ORDER
        assert seams_of(place.pipeline, place.stage_index) == place.seams
        assert len(place.pipeline) == place.num_stages
    lengths = {(item.num_stages - 1 - item.stage_index, item.part, item.seams): item.num_stages for item in found}
    assert lengths == wanted


@pytest.mark.parametrize(("count", "seams"), [(2, []), (3, [BEHIND]), (4, [0, BEHIND])])
def test_first_stages_are_alone_in_their_part_or_not(count, seams):
    assert [place.seams for place in heads_of(ORDER, count)] == seams
    assert all(place.part == ORDER[0] for place in heads_of(ORDER, count))
