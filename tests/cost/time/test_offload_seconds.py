"""Copies: every second is also counted here unit by unit, one candidate at a time, by the module's docstring."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mist.cost import StageCandidates, StageCostModel
from lightning_mist.cost.inputs.candidates import OffloadCandidates
from lightning_mist.cost.time.overlap import FREE, concurrent_seconds
from lightning_mist.errors import ProfileError
from lightning_mist.plan import UPDATED_KINDS, OffloadRatios
from lightning_mist.plan.sharding import assign_owners
from tests.cost.memory.breakdown import breakdown
from tests.cost.memory.test_offload_bytes import moved
from tests.specs import candidates_of, cluster, profile, slot_of, spec
from tests.tiers import examples

KINDS = (*UPDATED_KINDS, "activations", "checkpoints")
ratios = st.sampled_from([0.0, 0.3, 0.5, 1.0])
TERMS = ("copies_K", "forward_copies_K", "update_copies_K", "gather_K", "reduce_K", "deferred_K")


def network(layers=4, **changes):
    kinds = [index % 2 for index in range(layers)]
    return spec(layers, kinds=kinds, widths=(1000, 1400), measured=True, **changes)


def machine(*, to_device=1e8, to_host=2e8, link=1e8, **changes):
    made = profile(link=link, latency=1e-5)
    return dataclasses.replace(
        made, host_to_device_bytes_per_second=to_device, device_to_host_bytes_per_second=to_host, **changes
    )


def slot(**changes):
    return slot_of(**{"num_microbatches": 4, "rows": 4, "batch_rows": 4, **changes})


def candidates(layers=(0, 4), *, checkpointed=0, zero=1, **given):
    return candidates_of(*layers, checkpointed, zero, offload=OffloadCandidates.of(OffloadRatios(**given)))


class Walk:
    """One candidate, unit by unit."""

    def __init__(self, uses, hardware, place, some, interference, kind="cuda"):
        self.model = StageCostModel(uses, hardware, cluster(place.data_parallel_degree, kind=kind))
        self.slot, self.some, self.interference = place, some, interference
        first, last = int(some.start_K[0]), int(some.end_K[0])
        count = uses.num_layers
        self.units = [*([0] if first == 0 else []), *range(first + 1, last + 1)]
        if last == count:
            self.units.append(count + 1)
        self.again = set(range(first + 1, first + 1 + int(some.checkpointed_K[0])))
        self.zero, self.ranks = int(some.zero_stage_K[0]), place.data_parallel_degree
        self.waits = self.zero == 3 and self.ranks > 1
        sizes = {}
        for item in uses.parameters:
            name = item.name.rsplit(".", 1)[0]
            at = (
                {"wte": 0, "head": count + 1 if count else 0}.get(name)
                if not name.startswith("blocks")
                else int(name[7:]) + 1
            )
            sizes.setdefault(at, []).append(item.bytes)
        self.sizes = {unit: sizes.get(unit, []) for unit in self.units}
        self.plain = self.model.seconds(place, dataclasses.replace(some, offload=None))
        self._loads(uses, hardware, kind)

    def share(self, ratio, since):
        """Moved bytes by unit, scaled to those of the rank that has most."""
        found = {
            unit: sum(s for s, m in zip(own, moved(own, ratio), strict=True) if m) for unit, own in self.sizes.items()
        }
        if self.zero < since or self.ranks == 1:
            return found
        owners = iter(assign_owners([size for own in self.sizes.values() for size in own], self.ranks))
        totals = [0] * self.ranks
        for own in self.sizes.values():
            for size, away in zip(own, moved(own, ratio), strict=True):
                totals[next(owners)] += size * away
        return {unit: size * max(totals) / max(1, sum(totals)) for unit, size in found.items()}

    def _loads(self, uses, hardware, kind):
        wo, go, oo, ao, co = (float(getattr(self.some.offload, f"{name}_K")[0]) for name in KINDS)
        down, up = hardware.host_to_device_bytes_per_second, hardware.device_to_host_bytes_per_second
        if kind == "cpu":
            down = up = hardware.memory_bytes_per_second / 2
        seconds = self.model.region_seconds(self.slot.rows)
        costs = self.model.memory(self.slot).costs(self.slot.rows)
        weights, grads = self.share(wo, 3), self.share(go, 2)
        owned, state = self.share(go, 1), self.share(oo, 1)
        everything = sum(map(sum, self.sizes.values()))
        deferred = max(wo, go, oo) > 0
        link, latency = 1e8, 1e-5
        if hardware.collectives[0].bytes_per_second != link:
            link = hardware.collectives[0].bytes_per_second
        whole = self.plain
        # With these sizes everything is in one bucket, and every owner sends one message.
        reduced = 0.0
        if self.ranks > 1 and self.zero < 2:
            reduced = everything / link + (2 if self.zero else 1) * latency
        given_out = everything / link + 2 * latency if self.ranks > 1 and 1 <= self.zero < 3 and deferred else 0.0
        update = float(whole.update_K[0]) if deferred else 0.0

        def of(unit):
            mine = unit in self.sizes
            part = sum(self.sizes[unit]) / everything if mine else 0.0
            layer = mine and 0 < unit < uses.num_layers + 1
            kept = costs.checkpointed_saved_R if unit in self.again else costs.saved_R
            activations = (co if unit in self.again else ao) * float(kept[unit]) if layer else 0.0
            messages = min(self.ranks, len(self.sizes[unit])) if mine else 0
            travels = sum(self.sizes[unit]) / link + messages * latency if mine and self.ranks > 1 else 0.0
            return {
                "f": float(seconds.forward_R[unit]) if mine else 0.0,
                "b": float(seconds.backward_R[unit]) if mine else 0.0,
                "o": update * part,
                "u": travels if self.zero >= 3 else 0.0,
                "g": travels if self.zero >= 2 else 0.0,
                "m": reduced * part,
                "e": given_out * part,
                "p": weights.get(unit, 0) / down,
                "q": grads.get(unit, 0) / down * (self.slot.num_microbatches > 1),
                "z": grads.get(unit, 0) / up,
                "s": (2 * state.get(unit, 0) + owned.get(unit, 0) + weights.get(unit, 0)) / down,
                "w": (2 * state.get(unit, 0) + weights.get(unit, 0)) / up,
                "in": activations / down,
                "out": activations / up,
            }

        self.of = {unit: of(unit) for unit in range(-1, uses.num_layers + 4)}

    def together(self, *loads):
        """Loads to compute, exchange, and copy both ways."""
        return float(concurrent_seconds(*(np.array([load]) for load in loads), self.interference, False)[0])

    def forward(self, copies, edge, away=False, with_input=False):
        """Seconds of a forward; ``away`` if its first two units are not there from the backward before.

        Args:
            with_input: Without what is issued before the first unit computes.
        """
        of, units, c = self.of, self.units, float(copies)
        total = of[units[0]]["u"] * away
        if edge:
            second = of[units[1]]["s"] if len(units) > 1 else 0.0
            total += c * of[units[0]]["s"] + self.together(of[units[0]]["o"], 0.0, c * second, 0.0)
            total += of[units[0]]["e"]
        for place, unit in enumerate(units):
            own, after, below = of[unit], of[unit + 1], of[unit - 1]
            # All is trained: a first forward finds what was fetched for the update.
            compute, network = own["f"], after["u"] * (away or place > 0)
            down, up = 0.0 if place == 0 or edge else after["p"], below["out"]
            if edge:
                compute, network = compute + after["o"], network + after["e"]
                down, up = down + (of[unit + 2]["s"] if place + 2 < len(units) else 0.0), up + own["w"]
            elif self.waits:
                total, down = total + c * down, 0.0
            total += self.together(compute, network, c * down, c * up)
            if place == 0 and with_input:
                total = own["f"]
        return total + c * of[units[-1]]["out"]

    def backward(self, copies, edge):
        of, units, c = self.of, self.units, float(copies)
        end = of[units[-1]]
        total = c * end["in"]
        for unit in reversed(units):
            own, above, below = of[unit], of[unit + 1], of[unit - 1]
            compute = own["b"] + (own["f"] if unit in self.again else 0.0)
            network = above["g"] + (above["m"] if edge else 0.0)
            # The last two units are there from the forward before.
            fetched, network = (below["p"], network + below["u"]) if unit != units[-1] else (0.0, network)
            written = own["z"] if unit != units[0] else 0.0
            if self.waits:
                total, fetched = total + c * fetched, 0.0
            total += self.together(compute, network, c * (fetched + own["q"] + below["in"]), c * written)
        begin = of[units[0]]
        return total + begin["g"] + (begin["m"] if edge else 0.0)

    def terms(self):
        forward, backward = (
            {(copies, edge): total(copies, edge) for copies in (0, 1) for edge in (0, 1)}
            for total in (self.forward, self.backward)
        )
        update = sum(self.of[unit]["o"] for unit in self.units)
        ahead = forward[1, 0] - forward[0, 0]
        begun, first = self.forward(0, 0, away=True), self.forward(1, 1, away=True)
        gather = given_out = max(0.0, self.forward(0, 1, away=True) - begun - update)
        late = max(0.0, self.forward(1, 1, away=True, with_input=True) - begun - ahead)
        offload = self.some.offload
        if max(offload.parameters_K[0], offload.gradients_K[0], offload.optimizer_K[0]) == 0:
            gather, late = float(self.plain.gather_K[0]), 0.0
        more = backward[1, 1] - backward[1, 0] - backward[0, 1] + backward[0, 0]
        return (
            ahead + backward[1, 0] - backward[0, 0],
            ahead,
            max(0.0, first - begun - ahead - update - given_out),
            gather,
            max(0.0, float(self.plain.reduce_K[0]) + more),
            late,
        )

    def found(self):
        seconds = self.model.seconds(self.slot, self.some)
        return [float(getattr(seconds, name)[0]) for name in TERMS]


SLOWED = dataclasses.replace(
    FREE, compute_network=0.2, compute_to_device=0.1, compute_to_host=0.3, to_device_to_host=0.5, network_to_device=0.4
)


@pytest.mark.parametrize("layers", [(0, 4), (1, 3), (0, 1), (2, 3), (3, 4), (0, 0)])
@given(
    zero=st.integers(0, 3),
    ranks=st.sampled_from([1, 2]),
    checkpointed=st.integers(0, 4),
    wo=ratios,
    go=ratios,
    oo=ratios,
    ao=ratios,
    co=ratios,
    down=st.sampled_from([1e7, 1e9]),
    microbatches=st.sampled_from([1, 4]),
    slowed=st.booleans(),
)
@settings(max_examples=examples(15))
def test_unit_by_unit(layers, zero, ranks, checkpointed, wo, go, oo, ao, co, down, microbatches, slowed):
    if layers == (0, 0):
        uses, checkpointed = network(0), 0
    else:
        uses, checkpointed = network(), min(checkpointed, layers[1] - layers[0])
    interference = SLOWED if slowed else FREE
    hardware = machine(to_device=down, to_host=1.5 * down, interference=interference)
    moved = dict(zip(KINDS, (wo, go, oo, ao, co), strict=True))
    some = candidates(layers, checkpointed=checkpointed, zero=zero, **moved)
    place = slot(data_parallel_degree=ranks, num_microbatches=microbatches)
    walk = Walk(uses, hardware, place, some, interference)
    if max(moved.values()) == 0:
        assert walk.found() == [float(getattr(walk.plain, name)[0]) for name in TERMS]
    else:
        assert walk.found() == pytest.approx(walk.terms(), rel=1e-9, abs=1e-12)


def test_on_a_cpu_copies_take_turns_with_everything_else():
    some = candidates(parameters=1.0, gradients=1.0, optimizer=1.0, activations=1.0)
    walk = Walk(network(), machine(to_device=0.0, to_host=0.0), slot(), some, None, kind="cpu")
    assert walk.found() == pytest.approx(walk.terms(), rel=1e-9, abs=1e-12)
    # 1e9 bytes/s of memory: a copy reads and writes.
    everything = sum(map(sum, walk.sizes.values()))
    activations = 4 * (2 * 10_000 + 2 * 14_000)
    # Parameters of head and first layer, tail and last layer stay, and nobody waits for the head's gradients.
    first, last = 80_000 + 40_400, 80_000 + 80_800
    assert walk.found()[0] == pytest.approx((4 * everything - first - last - 80_000 + 2 * activations) / 5e8)
    assert walk.found()[2] == pytest.approx((2 * 2 * everything + 2 * everything + first) / 5e8)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_nothing_moved_is_no_offload_to_the_last_bit(kind):
    model = StageCostModel(network(), machine(), cluster(2, kind=kind))
    place, some = slot(data_parallel_degree=2), candidates(checkpointed=2, zero=2)
    plain = model.seconds(place, dataclasses.replace(some, offload=None))
    found = model.seconds(place, some)
    for name in plain.__slots__:
        assert np.array_equal(getattr(found, name), getattr(plain, name)), name
    assert np.array_equal(found.steady_K, plain.steady_K)
    assert np.array_equal(found.boundary_K, plain.boundary_K)


def seconds_of(hardware, some, place=None, uses=None):
    return StageCostModel(uses or network(40), hardware, cluster(1, kind="cuda")).seconds(place or slot(), some)


def test_fast_copies_hide_but_for_the_ends():
    some = candidates((0, 40), parameters=1.0, gradients=1.0, activations=1.0)
    found = seconds_of(machine(to_device=1e9, to_host=1e9), some)
    edge, layer = 80_000, 2 * 40_400
    # All that the outermost units need is there, or is not waited for, but for what the last layer keeps.
    assert found.copies_K[0] <= 2 * 4 * 14_000 / 1e9
    # The head's parameters come before the first forward, and the first layer's beside the head's update.
    ends = (2 * edge + layer) / 1e9
    assert edge / 1e9 <= found.update_copies_K[0] <= ends


def test_slow_copies_set_the_pace():
    some = candidates((0, 40), parameters=1.0)
    found = seconds_of(machine(to_device=1e5), some)
    everything = 2 * 80_000 + 20 * 40_400 + 20 * 80_800
    # Head and first layer, tail and last layer stay.
    copied = (2 * everything - 2 * 80_000 - 40_400 - 80_800) / 1e5
    assert found.forward_K[0] + found.backward_K[0] + found.copies_K[0] == pytest.approx(copied, rel=0.01)


def of_batches(seconds):
    """What counts: seconds of a microbatch, and of a batch of one."""
    return float(seconds.steady_K[0]), float(seconds.steady_K[0] + seconds.boundary_K[0])


@pytest.mark.parametrize("kind", KINDS)
def test_more_bandwidth_is_never_slower_and_more_offload_never_faster(kind):
    rates = (1e6, 1e7, 1e8, 1e9)
    for ratio in (0.3, 1.0):
        some = candidates((0, 40), **{kind: ratio})
        found = [seconds_of(machine(to_device=rate, to_host=rate), some) for rate in rates]
        for values in zip(*map(of_batches, found), strict=True):
            assert list(values) == sorted(values, reverse=True)
    some = [candidates((0, 40), **{kind: ratio}) for ratio in (0.0, 0.25, 0.5, 0.75, 1.0)]
    for values in zip(*(of_batches(seconds_of(machine(), item)) for item in some), strict=True):
        assert list(values) == sorted(values)


def test_both_directions_are_used_at_once():
    # What is fetched for the next unit and what is written back of the one before do not wait for each other.
    some = candidates((0, 40), gradients=1.0)
    both = seconds_of(machine(to_device=1e6, to_host=1e6), some)
    one_way = seconds_of(machine(to_device=1e6, to_host=1e30), some)
    turns = dataclasses.replace(FREE, to_device_to_host=1.0)
    taking_turns = seconds_of(machine(to_device=1e6, to_host=1e6, interference=turns), some)
    assert both.copies_K[0] < 1.1 * one_way.copies_K[0]
    assert taking_turns.copies_K[0] > 1.8 * one_way.copies_K[0]


def test_time_and_memory_speak_of_the_same_bytes():
    # So slow that a step is nothing but copies: state comes once and goes once, activations of four microbatches too.
    uses, rate = network(), 1.0
    hardware = machine(to_device=rate, to_host=1e30)
    for ratio in ({"parameters": 0.5}, {"optimizer": 1.0}, {"activations": 0.5}, {"optimizer": 0.3}):
        some, place = candidates(zero=3, **ratio), slot(data_parallel_degree=2)
        model = StageCostModel(uses, hardware, cluster(2, kind="cuda"))
        host = breakdown(model.memory(place), place, some)[0].host_bytes
        found = model.seconds(place, some)
        # Parameters come twice, but those of the first and the last layer once; head and tail move none of theirs.
        passes = 1.5 if "parameters" in ratio else 1
        copied = found.copies_K[0] if "optimizer" not in ratio else found.update_copies_K[0]
        # What is not copying is less than a second in all.
        assert copied == pytest.approx(passes * host / rate, abs=1 + 2e-5 * host)


def test_a_node_shares_what_it_copies():
    some = candidates(parameters=1.0)
    found = []
    for per_node in (0.0, 4e8, 1e8):
        hardware = machine(to_device=1e8, host_bytes_per_second_per_node=per_node)
        model = StageCostModel(network(), hardware, cluster(4, kind="cuda"))
        found.append(float(model.seconds(slot(), some).copies_K[0]))
    assert found[0] == found[1] < found[2]
    slower = StageCostModel(network(), machine(to_device=2.5e7, to_host=2.5e7), cluster(4, kind="cuda"))
    assert found[2] == pytest.approx(float(slower.seconds(slot(), some).copies_K[0]))


def test_a_device_of_which_no_copies_are_known_is_refused():
    with pytest.raises(
        ProfileError, match="copies 0 bytes/s from the host and 2e\\+08 to it: offload needs both rates"
    ):
        seconds_of(machine(to_device=0.0), candidates(optimizer=1.0), uses=network())


def test_many_candidates_at_once_are_each_of_them_alone():
    model = StageCostModel(network(6), machine(interference=SLOWED), cluster(2, kind="cuda"))
    place = slot(data_parallel_degree=2, num_stages=2)
    rng = np.random.default_rng(0)
    count = 60
    start = rng.integers(0, 5, count)
    end = start + rng.integers(1, 7 - start)
    every = StageCandidates(
        start_K=start,
        end_K=end,
        checkpointed_K=rng.integers(0, end - start + 1),
        zero_stage_K=rng.integers(0, 4, count),
        offload=OffloadCandidates.of_kinds(rng.choice([0.0, 0.5, 1.0], (count, len(KINDS)))),
    )
    found = model.seconds(place, every)
    for index in range(count):
        alone = model.seconds(place, every.take(np.array([index])))
        for name in found.__slots__:
            assert getattr(alone, name)[0] == pytest.approx(getattr(found, name)[index], rel=1e-9, abs=1e-12), name


def test_tied_parameters_are_fetched_for_both_ends_and_updated_once():
    uses = spec(2, tied=True, measured=True)
    found = seconds_of(machine(to_device=1e3, to_host=1e30), candidates((0, 2), parameters=1.0), uses=uses)
    # Units are four; of the two outermost ones there is one still.
    assert found.copies_K[0] == pytest.approx((2 * 80_000 + 2 * 40_400) / 1e3, rel=1e-3)
    found = seconds_of(machine(to_device=1e3, to_host=1e30), candidates((0, 2), optimizer=1.0), uses=uses)
    assert found.update_copies_K[0] == pytest.approx(2 * (80_000 + 2 * 40_400) / 1e3, rel=1e-3)
