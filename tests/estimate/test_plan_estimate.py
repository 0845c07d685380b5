import pytest

from lightning_mist.estimate import Estimator, estimate_plan
from lightning_mist.estimate.plan_estimate import limit_of
from lightning_mist.hardware import parse_cluster
from lightning_mist.units import parse_bytes
from tests.plans import plan_of
from tests.specs import spec

CLUSTER = parse_cluster("1x2xL4")
NETWORK = spec(4, parameter_bytes=40_000_000)
PLAN = plan_of(4, 1, {"layers": 4, "data": 2})


def estimated(limit, **options):
    return estimate_plan(Estimator(NETWORK, CLUSTER, limit), PLAN, **options)


def test_an_estimate_says_what_it_is_of():
    found = estimated(CLUSTER.device.memory_bytes)
    assert (found.model, found.plan, found.precision) == (NETWORK.name, PLAN, NETWORK.precision)
    assert found.optimizer == "AdamW"
    assert found.cluster == "2 x L4 with 22.5 GiB each"
    assert len(found.stages) == 1
    assert found.changes == ()


def test_what_would_make_a_plan_fit_is_looked_for_only_where_it_does_not_and_that_is_wanted():
    roomy = estimated(CLUSTER.device.memory_bytes)
    limit = int(roomy.worst.device_total.p50 * 0.97)
    found = estimated(limit)
    assert found.verdict == "tight"
    assert not found.is_likely
    assert found.changes
    assert estimated(limit, advise=False).changes == ()
    assert estimated(limit, advise=False).stages == found.stages
    assert estimated(int(roomy.worst.least * 0.97), advise=False).verdict == "does not fit"


def test_limits_are_sizes_that_a_device_has():
    has = CLUSTER.device.memory_bytes
    assert limit_of(CLUSTER, None) == has
    assert limit_of(CLUSTER, "10GiB") == parse_bytes("10GiB") == limit_of(CLUSTER, 10 * 2**30)


@pytest.mark.parametrize("limit", ["much", "0GiB", "1000GiB", -1])
def test_other_limits_are_refused(limit):
    with pytest.raises(ValueError, match="memory_limit"):
        limit_of(CLUSTER, limit)
