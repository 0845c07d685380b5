from lightning_mist.plan import Exclusion, ModuleMap, ParameterUse


def use(name, *slots):
    return ParameterUse(name=name, slots=slots, shape=(1,), dtype="float32", requires_grad=True)


MAP = ModuleMap(
    step="training_step",
    blocks=("h.0", "h.1", "h.2", "h.3"),
    cuts=(),
    parameters=(
        use("embed.weight", ("embed", "weight", (-1,)), ("head", "weight", (3,))),
        use("h.0.weight", ("h.0", "weight", (0,))),
        use("h.2.weight", ("h.2", "weight", (2,))),
        use("norm.weight", ("norm", "weight", (3,))),
        use("unused", ("", "unused", ())),
        use("h.1.sometimes.weight", ("h.1.sometimes", "weight", ())),
    ),
    exclusions=(
        Exclusion(feature="pipeline", reason="one"),
        Exclusion(feature="microbatches", reason="two"),
        Exclusion(feature="pipeline", reason="three"),
    ),
)


def test_owners_follow_the_regions_that_use_a_parameter():
    assert MAP.owners(((0, 2), (2, 4))) == {
        "embed.weight": (0, 1),
        "h.0.weight": (0,),
        "h.2.weight": (1,),
        "norm.weight": (1,),
        "unused": (1,),
        "h.1.sometimes.weight": (0,),
    }
    assert set(MAP.owners(((0, 4),)).values()) == {(0,)}


def test_what_the_trace_did_not_use_goes_with_its_block_or_with_the_loss():
    assert [MAP.home(use) for use in MAP.parameters[-2:]] == [3, 1]


def test_owners_of_a_module_without_blocks():
    assert set(MAP.owners(((0, 0),)).values()) == {(0,)}


def test_regions_of_all_slots():
    assert MAP.parameters[0].regions == (-1, 3)
    assert MAP.parameters[-1].regions == ()


def test_exclusions_by_feature():
    assert MAP.excludes("pipeline") == ("one", "three")
    assert MAP.excludes("checkpointing") == ()
