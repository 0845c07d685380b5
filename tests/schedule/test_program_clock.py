import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.errors import ScheduleError
from lightning_mist.schedule import ActionSeconds, StepRules, generate, simulate
from lightning_mist.schedule.lowering import Program, add_transfers, add_update, program_of
from lightning_mist.schedule.program_clock import Epilogue, finish, run
from lightning_mist.schedule.seconds import crossing_seconds, slot_seconds
from tests.schedule.test_program import shapes, sizes

seconds = st.integers(0, 20).map(float)
WITHIN, BESIDE = StepRules(transfers="within"), StepRules()


def slow_within(lists, stages, received, sent):
    """The makespan where transfers use the lanes of both sides, action by action, from first principles."""
    (activations, gradients), (sent_activations, sent_gradients) = received, sent
    clock = [0.0] * len(lists)
    begun, there = {}, {}
    place = [0] * len(lists)
    last = len(stages) - 1
    while any(at < len(line) for at, line in zip(place, lists, strict=True)):
        for group, line in enumerate(lists):
            while place[group] < len(line):
                action = line[place[group]]
                stage, index, letter = action.stage, action.microbatch, action.kind.value
                if letter == "F":
                    source, takes = ((stage - 1, "F", index), activations[stage - 1]) if stage else (None, 0.0)
                    target = sent_activations[stage] if stage < last else None
                elif letter in "BI":
                    source, takes = ((stage + 1, "B", index), gradients[stage]) if stage < last else (None, 0.0)
                    target = sent_gradients[stage - 1] if stage else None
                else:
                    source, takes, target = None, 0.0, None
                if source is not None:
                    if source not in there:
                        break
                    # Nothing is received before it is being sent, and all of it only when all is sent.
                    clock[group] = max(max(clock[group], begun[source]) + takes, there[source])
                clock[group] += stages[stage].of(action.kind, is_first=False, is_again=False)
                if target is not None:
                    key = stage, "F" if letter == "F" else "B", index
                    begun[key] = clock[group]
                    clock[group] += target
                    there[key] = clock[group]
                place[group] += 1
    return clock


@given(shapes, st.data())
def test_transfers_within_computation_take_both_lanes(shape, data):
    name, stages, microbatches, groups = sizes(shape)
    each = data.draw(
        st.lists(
            st.builds(lambda f, i, w: ActionSeconds(forward=f, backward=i + w, weight=w), seconds, seconds, seconds),
            min_size=stages,
            max_size=stages,
        )
    )
    crossing = st.lists(seconds, min_size=stages - 1, max_size=stages - 1)
    activations, gradients = data.draw(crossing), data.draw(crossing)
    sent = data.draw(st.one_of(st.none(), st.tuples(crossing, crossing)))
    lists = generate(stages, microbatches, name, num_groups=groups)
    program = program_of(stages, microbatches, name, num_groups=groups)
    sending = None if sent is None else crossing_seconds(*sent)
    crossings = crossing_seconds(activations, gradients)
    times = run(program, slot_seconds(each), crossings, WITHIN, sending_seconds=sending)
    assert list(times.ends) == slow_within(lists, each, (activations, gradients), sent or (activations, gradients))
    times = run(program, slot_seconds(each), crossings, WITHIN)
    beside = run(program, slot_seconds(each), crossing_seconds(activations, gradients), BESIDE)
    free = run(program, slot_seconds(each), [0.0] * (2 * stages - 2), WITHIN)
    # Each receiver waits as long either way, and what uses its lane besides comes on top.
    assert max(free.ends) <= max(times.ends)
    assert max(free.ends) <= max(beside.ends)


@given(shapes, st.data())
def test_a_program_takes_as_long_as_its_lists(shape, data):
    name, stages, microbatches, groups = sizes(shape)
    each = data.draw(
        st.lists(
            st.builds(
                lambda f, i, w, s: ActionSeconds(
                    forward=f, backward=i + w, weight=w, first_backward=i + w / 2, reduce=s, step=2 * s, gather=s
                ),
                *[seconds] * 4,
            ),
            min_size=stages,
            max_size=stages,
        )
    )
    crossing = st.lists(seconds, min_size=stages - 1, max_size=stages - 1)
    activations, gradients = data.draw(crossing), data.draw(crossing)
    rules = StepRules(
        transfers=data.draw(st.sampled_from(["beside", "within"])),
        update_after=data.draw(st.sampled_from(["own", "last", "all"])),
    )
    lists = add_transfers(generate(stages, microbatches, name, num_groups=groups))
    whole = add_update(lists, tied=False, gathers=[True] * groups)
    wanted = simulate(whole, each, activation_seconds=activations, gradient_seconds=gradients, rules=rules)
    program = program_of(stages, microbatches, name, num_groups=groups)
    times = run(program, slot_seconds(each), crossing_seconds(activations, gradients), rules)
    found = finish(program, times, [stage.epilogue for stage in each[:groups]], rules, is_tied=False)
    assert found.makespan == wanted.makespan


@pytest.mark.parametrize(
    ("received", "sent", "wanted"),
    [
        # Sent from 1 to 5, computed on until 8, sent back until 12, computed on until 14; receiving hides in that.
        (1.0, 4.0, (14.0, 12.0)),
        # Sent from 1 to 2, received until 5, computed on until 8, sent back until 9, received from 8 until 12.
        (4.0, 1.0, (14.0, 9.0)),
    ],
)
def test_senders_and_receivers_are_each_busy_for_their_own_time(received, sent, wanted):
    each = [ActionSeconds(forward=1, backward=2)] * 2
    times = run(program_of(2, 1), slot_seconds(each), [received] * 2, WITHIN, sending_seconds=[sent] * 2)
    assert times.ends == wanted


def ends_of(rules, *, is_tied=False):
    """When the optimizer steps where the stages end after 6 s and 4 s, and reducing takes 1 s and 9 s."""
    program = program_of(2, 1)
    each = [ActionSeconds(forward=1, backward=2), ActionSeconds(forward=1, backward=2)]
    times = run(program, slot_seconds(each), [0.0, 0.0], rules)
    assert times.ends == (6.0, 4.0)
    return finish(
        program, times, [Epilogue(reduce=1, step=1), Epilogue(reduce=9, tied=5, gather=2)], rules, is_tied=is_tied
    )


def test_the_optimizer_waits_for_whom_the_rules_say():
    assert ends_of(StepRules()).step == (7.0, 13.0)
    assert ends_of(StepRules(update_after="last")).step == (13.0, 13.0)
    assert ends_of(StepRules(update_after="all")).step == (13.0, 13.0)
    assert ends_of(StepRules()).makespan == 15.0
    tied = ends_of(StepRules(), is_tied=True)
    assert (tied.tied, tied.tied_seconds, tied.step, tied.makespan) == (13.0, 5.0, (18.0, 18.0), 20.0)


def test_the_first_stage_holds_up_the_others_only_where_all_wait():
    program = program_of(2, 1)
    times = run(program, slot_seconds([ActionSeconds(forward=1, backward=2)] * 2), [0.0, 0.0], BESIDE)
    steps = {
        name: finish(program, times, [Epilogue()] * 2, StepRules(update_after=name), is_tied=False).step
        for name in ("own", "last", "all")
    }
    assert steps == {"own": (6.0, 4.0), "last": (6.0, 4.0), "all": (6.0, 6.0)}


def test_a_group_steps_when_what_it_sent_has_arrived():
    program = program_of(2, 1)
    times = run(program, slot_seconds([ActionSeconds(forward=1, backward=2)] * 2), [0.0, 7.0], BESIDE)
    assert finish(program, times, [Epilogue()] * 2, BESIDE, is_tied=False).step == (13.0, 11.0)


def test_groups_that_wait_for_each_other_are_refused():
    step = (0, 0, 0, (3,)), (0, 1, 0, (1,))
    lines = ((step[0],), (step[1],))
    program = Program(num_stages=2, lines=lines, first=((), ()), links=((0,), (1,)), senders=(0, 1), has_transfers=True)
    with pytest.raises(ScheduleError, match="wait for each other for ever"):
        run(program, [1.0], [0.0, 0.0], BESIDE)
