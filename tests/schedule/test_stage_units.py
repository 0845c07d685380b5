from dataclasses import replace

from lightning_mist.plan import ModuleMap, ParameterUse
from lightning_mist.plan.module_map import Exclusion
from lightning_mist.schedule.action import HEAD, TAIL
from lightning_mist.schedule.stage_units import ShardUnit, shard_units


def use(name, module, *regions, trained=True):
    slots = ((module, name.rpartition(".")[2], regions),)
    return ParameterUse(name=name, slots=slots, shape=(2,), dtype="float32", requires_grad=trained)


MAP = ModuleMap(
    step="training_step",
    blocks=("h.0", "h.1", "h.2"),
    cuts=((), ()),
    parameters=(
        use("wte.weight", "wte", -1, 2),
        use("h.0.w", "h.0", 0),
        use("h.1.mlp.w", "h.1.mlp", 1),
        use("h.1.frozen", "h.1", 1, trained=False),
        use("bridge", "", 1),
        use("h.2.w", "h.2", 2),
        use("norm", "", 2),
        use("h.2.branch", "h.2"),
        use("sometimes", ""),
        use("h.10.w", "h.10", 2),
    ),
)


def test_units_of_a_module():
    assert shard_units(MAP, ((0, 3),), 0) == (
        ShardUnit(unit=HEAD, names=("wte.weight", "sometimes"), reduced=("wte.weight", "sometimes")),
        ShardUnit(unit=0, names=("h.0.w", "sometimes"), reduced=("h.0.w",)),
        ShardUnit(unit=1, names=("h.1.mlp.w", "h.1.frozen", "bridge", "sometimes"), reduced=("h.1.mlp.w", "bridge")),
        ShardUnit(unit=2, names=("h.2.w", "h.2.branch", "sometimes"), reduced=("h.2.w", "h.2.branch")),
        ShardUnit(unit=TAIL, names=("wte.weight", "norm", "sometimes", "h.10.w"), reduced=("norm", "h.10.w")),
    )


def test_units_of_a_pipeline():
    first, second = (shard_units(MAP, ((0, 2), (2, 3)), stage) for stage in (0, 1))
    assert [unit.unit for unit in first] == [HEAD, 0, 1]
    assert [unit.unit for unit in second] == [2, TAIL]
    assert second[1].names == ("wte.weight", "norm", "sometimes", "h.10.w")
    assert second[0].reduced == ("h.2.w", "h.2.branch", "sometimes")
    assert second[1].reduced == ("wte.weight", "norm", "h.10.w")


def test_parameters_that_are_used_anywhere_are_one_unit():
    mixed = replace(MAP, exclusions=(Exclusion(feature="shards", reason="a parameter is used somewhere else"),))
    (unit,) = shard_units(mixed, ((0, 3),), 0)
    assert (unit.unit, len(unit.names), len(unit.reduced)) == (HEAD, 10, 9)
