"""Which hooks of the user's own rule out plans that leave a rank with a part, and which cost nothing."""

import copy
import functools
import logging
import time
from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LambdaCallback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm, rank_zero_only
from torch import nn

from lightning_mist.strategy.user_code.hook_restrictions import (
    BUT_PLAIN,
    GRADIENTS_AWAY,
    PARAMETERS_AWAY,
    STATE_AWAY,
    user_exclusions,
)

PATH = []


class Net(pl.LightningModule):
    """Something to look at."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 1)
        self.scale, self.losses, self.config = 2.0, [], SimpleNamespace(every=2)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        return self.head(x)

    def note(self, value):
        self.losses.append(float(value) * self.scale)

    def norm(self):
        return torch.stack([p.norm() for p in self.parameters()]).norm()


def found(*callbacks, module=None, datamodule=None, kind=torch.optim.SGD, schedule=None, **options):
    module = module or Net()
    optimizer = kind(module.parameters(), lr=0.1)
    schedules = [] if schedule is None else [SimpleNamespace(scheduler=schedule(optimizer))]
    trainer = SimpleNamespace(
        lightning_module=module,
        callbacks=list(callbacks),
        strategy=SimpleNamespace(model=module, lr_scheduler_configs=schedules),
        datamodule=datamodule,
        model=module,
        optimizers=[optimizer],
        global_step=0,
    )
    for item in callbacks:
        if hasattr(item, "prepare"):
            item.prepare(module)
    exclusions = user_exclusions(trainer, [optimizer], **options)
    return {item.feature for item in exclusions}, " ".join(dict.fromkeys(item.reason for item in exclusions))


def helper(numbers, every=1):
    return sum(numbers) / every


def norm_of(parameters):
    return sum(float(p.grad.norm()) for p in parameters if p.grad is not None)


def decorated(function):
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


class Quiet(Callback):
    """Looks at losses, prints, counts, logs, at rates and flags; nothing that a rank might lack."""

    def __init__(self):
        self.seen, self.norms = [], nn.Linear(2, 2)

    def setup(self, trainer, pl_module, stage):
        self.first = copy.deepcopy(pl_module)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step % 2 == 0 and pl_module is not None:
            self.started = batch_idx

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.seen.append(helper([loss.item()], every=2))
        pl_module.log("seen", self.seen[-1])
        pl_module.note(loss)
        if pl_module.config.every == 2 and pl_module.training:
            print(trainer.callback_metrics, pl_module.current_epoch, pl_module.logger)
        for group in trainer.optimizers[0].param_groups:
            trainer.rate = group["lr"]
        rates = [group["lr"] for group in pl_module.optimizers().param_groups]
        self.report(trainer, pl_module, rates)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @rank_zero_only
    def report(self, trainer, pl_module, rates):
        print(trainer.current_epoch, type(pl_module).__name__, *rates)

    def on_after_backward(self, trainer, pl_module):
        self.seen.append(trainer.global_step)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        optimizer.param_groups[0]["lr"] = 0.1 * pl_module.steps.item() + float(self.norms.weight.norm())

    def on_validation_epoch_end(self, trainer, pl_module):
        self.values = [p.norm() for p in pl_module.parameters()]
        pl_module(torch.zeros(1, 2))

    def on_fit_end(self, trainer, pl_module):
        torch.save(pl_module.state_dict(), "x")


class QuietNet(Net):
    """Hooks of its own, as many modules have them."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.steps += 1
        self.note(outputs["loss"])

    def on_train_epoch_end(self):
        self.log("mean", torch.tensor(self.losses).mean())
        self.losses.clear()
        self.lr_schedulers().step()

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.1 / (number + 1)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=True)

    def backward(self, loss, *args, **kwargs):
        loss.backward(*args, **kwargs)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.current_epoch > 1:
            self.clip_gradients(optimizer, 1.0, "norm")


def test_code_that_needs_no_parameters_rules_nothing_out():
    quiet = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, *_: PATH.append(float(outputs["loss"])))
    known = [EarlyStopping("x"), ModelCheckpoint(), LearningRateMonitor()]
    assert found(Quiet(), quiet, *known, module=QuietNet(), datamodule=pl.LightningDataModule()) == (set(), "")


def _callback(hook, code, **more):
    return type("Mine", (Callback,), {hook: code, **more})()


def _clipped(function):
    """Has the function look at gradients, by a decorator of the user's own."""

    @functools.wraps(function)
    def around(self, trainer, module, *args):
        for parameter in module.parameters():
            parameter.grad.clamp_(-1.0, 1.0)
        return function(self, trainer, module, *args)

    return around


@functools.cache
def _kept(function):
    @functools.wraps(function)
    def around(*args):
        return function(*args)

    return around


def _timed(function):
    @functools.wraps(function)
    def around(*args, **kwargs):
        logging.getLogger(__name__).debug("%s", args)
        try:
            return function(*args, **kwargs)
        finally:
            TIMES.append(time.perf_counter())

    return around


TIMES = []


class Above(Callback):
    @_timed
    def on_train_batch_end(self, trainer, pl_module, *args):
        super().on_train_batch_end(trainer, pl_module, *args)


class AboveToo(Callback):
    @_timed
    @rank_zero_only
    def on_train_batch_end(self, trainer, pl_module, *args):
        super().on_train_batch_end(trainer, pl_module, *args)


def _looked_at(function):
    @functools.wraps(function)
    def around(self, *args, **kwargs):
        self.log("norm", self.head.weight.grad.norm())
        return function(self, *args, **kwargs)

    return around


class Timed(Net):
    @_timed
    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)

    on_before_optimizer_step = _timed(pl.LightningModule.on_before_optimizer_step)


class Wrapped(Net):
    on_before_optimizer_step = _looked_at(pl.LightningModule.on_before_optimizer_step)


def test_decorators_that_look_at_nothing_rule_nothing_out_and_those_of_lightnings_methods_are_read():
    assert found(Above(), AboveToo(), module=Timed()) == (set(), "")
    features, reason = found(module=Wrapped())
    assert features == set(GRADIENTS_AWAY)
    assert "on_before_optimizer_step of Wrapped may use gradients" in reason


def _shadow(self, module):
    self.shadow = {name: value.clone() for name, value in module.state_dict().items()}
    self.module, self.helper = module, SimpleNamespace(update=None, module=module)
    self.forward = module.forward


class _Ema:
    def __init__(self):
        self.decay = 0.9

    def update(self, module):
        for p in module.parameters():
            p.data.mul_(self.decay)


AT_PARAMETERS = {
    "norms": lambda self, trainer, module, *_: [p.norm() for p in module.parameters()],
    "samples": lambda self, trainer, module, *_: module(torch.zeros(1, 2)),
    "one of its own modules": lambda self, trainer, module, *_: module.head(torch.zeros(1, 2)),
    "a parameter": lambda self, trainer, module, *_: module.head.weight.clamp_(-1, 1),
    "its data": lambda self, trainer, module, *_: module.body[0].weight.data.clamp_(-1, 1),
    "state": lambda self, trainer, module, *_: module.state_dict(),
    "a copy": lambda self, trainer, module, *_: copy.deepcopy(module),
    "its own method": lambda self, trainer, module, *_: module.norm(),
    "through the trainer": lambda self, trainer, *_: trainer.model.state_dict(),
    "through the strategy": lambda self, trainer, *_: trainer.strategy.model.state_dict(),
    "through the wrapper": lambda self, trainer, *_: trainer.model.module.state_dict(),
    "by name": lambda self, trainer, module, *_: getattr(module, "head")(torch.zeros(1, 2)),  # noqa: B009
    "a shadow": lambda self, trainer, module, *_: _Ema().update(module),
    "a module that was kept": lambda self, *_: self.module.state_dict(),
    "a method that was kept": lambda self, *_: self.forward(torch.zeros(1, 2)),
    "an object that keeps it": lambda self, *_: self.helper.module(torch.zeros(1, 2)),
    "keeping it": lambda self, trainer, module, *_: setattr(self, "later", module),
    "unpacked": lambda self, *args: _Ema().update(*args[1:2]),
}


@pytest.mark.parametrize("name", AT_PARAMETERS)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_fit_start", "on_validation_start"])
def test_code_that_looks_at_parameters_rules_out_that_they_are_away(hook, name):
    features, reason = found(_callback(hook, AT_PARAMETERS[name], prepare=_shadow))
    assert features == set(PARAMETERS_AWAY)
    assert f"{hook} of Mine may use parameters (" in reason
    assert "test_hook_restrictions.py:" in reason


AT_GRADIENTS = {
    "norms": lambda self, trainer, module, *_: [p.grad.norm() for p in module.parameters()],
    "Lightning's norms": lambda self, trainer, module, *_: module.log_dict(grad_norm(module, norm_type=2)),
    "by a function": lambda self, trainer, module, *_: norm_of(module.parameters()),
    "clipping": lambda self, trainer, module, *_: torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0),
    "a parameter's": lambda self, trainer, module, *_: module.head.weight.grad,
    "a decorator": _clipped(lambda self, trainer, module, *_: None),
    "a decorator inside another": _kept(torch.no_grad()(_clipped(lambda self, trainer, module, *_: None))),
}


@pytest.mark.parametrize("name", AT_GRADIENTS)
@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step", "on_train_batch_end"])
def test_code_that_looks_at_gradients_rules_out_that_they_are_away(hook, name):
    features, reason = found(_callback(hook, AT_GRADIENTS[name]))
    assert features == set(GRADIENTS_AWAY)
    assert f"{hook} of Mine may use gradients (" in reason


def test_groups_have_on_every_rank_what_it_updates():
    def look(self, trainer, *_):
        return [p for g in trainer.optimizers[0].param_groups for p in g["params"]]

    features, reason = found(_callback("on_train_batch_end", look))
    assert features == {*GRADIENTS_AWAY, "offloaded_optimizer"}
    assert "may use optimizer state (" in reason


def _norms(module):
    return [p.grad.norm() for p in module.parameters()]


def _moments(optimizer):
    return list(optimizer.state.values())


def _looks_at_state(self, trainer, module, *_):
    moments = trainer.optimizers[0].state
    return [p.grad / moments[p]["exp_avg_sq"].sqrt() for p in module.parameters()]


def _saves_state(self, trainer, module, *_):
    return _norms(module), trainer.optimizers[0].state_dict()


def _calls_for_state(self, trainer, module, *_):
    return _norms(module), _moments(trainer.optimizers[0])


def _looks_at_the_trainers(self, trainer, module, optimizer):
    return _norms(module) if trainer.state.fn == "fit" else None


@pytest.mark.parametrize("look", [_looks_at_state, _saves_state, _calls_for_state])
def test_a_hook_may_use_gradients_and_optimizer_state(look):
    features, reason = found(_callback("on_before_optimizer_step", look))
    assert features == {*GRADIENTS_AWAY, "offloaded_optimizer"}
    assert "may use gradients, and optimizer state (" in reason


def test_the_state_of_a_trainer_is_none_of_an_optimizer():
    assert found(_callback("on_before_optimizer_step", _looks_at_the_trainers))[0] == set(GRADIENTS_AWAY)


def test_masters_are_with_who_updates_them():
    callback = _callback("on_train_batch_end", AT_PARAMETERS["a shadow"], prepare=_shadow)
    assert found(callback, master_weights=True)[0] == {*PARAMETERS_AWAY, "sharded_gradients", "offloaded_optimizer"}


def test_hooks_that_are_put_on_parameters_later_count_as_those_that_are_there():
    def put(self, trainer, module, *_):
        module.head.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))

    def accumulated(self, trainer, module, *_):
        module.head.weight.register_post_accumulate_grad_hook(print)

    assert found(_callback("on_fit_start", put))[0] == {*PARAMETERS_AWAY, "microbatches"}
    assert found(_callback("on_fit_start", accumulated))[0] == {*BUT_PLAIN}


def test_an_average_kept_by_hand_leaves_gradients_to_their_owners():
    """Under ZeRO-1 and ZeRO-2 every rank has all parameters."""
    features, _ = found(_callback("on_before_optimizer_step", lambda self, trainer, module, *_: _Ema().update(module)))
    assert features == set(PARAMETERS_AWAY)


def test_what_is_changed_between_forward_and_backward_leaves_plain_data_parallelism():
    features, reason = found(_callback("on_before_zero_grad", lambda self, trainer, module, *_: _Ema().update(module)))
    assert features == {*BUT_PLAIN}
    assert "between a batch's forward and backward" in reason


def test_gradients_in_validation_count_and_parameters_do_not():
    assert found(_callback("on_validation_end", AT_PARAMETERS["norms"])) == (set(), "")
    assert found(_callback("on_validation_end", AT_GRADIENTS["norms"]))[0] == set(GRADIENTS_AWAY)


class Clips(Net):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class Skips(Net):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()
        if all(torch.isfinite(p.grad).all() for group in optimizer.param_groups for p in group["params"]):
            optimizer.step()


class Teacher(Net):
    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.head)

    def on_train_batch_end(self, *_):
        for mine, other in zip(self.head.parameters(), self.teacher.parameters(), strict=True):
            other.data.lerp_(mine.data, 0.1)


class Augments(Net):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return self.body[0](batch)


class Steps(Net):
    def on_before_optimizer_step(self, optimizer):
        self.log("norms", len(optimizer.state))


@pytest.mark.parametrize(
    ("module", "features"),
    [
        (Clips, GRADIENTS_AWAY),
        (Skips, GRADIENTS_AWAY),
        (Teacher, PARAMETERS_AWAY),
        (Augments, PARAMETERS_AWAY),
        (Steps, (*GRADIENTS_AWAY, "offloaded_optimizer")),
        (QuietNet, ()),
    ],
)
def test_hooks_of_modules_are_read_too(module, features):
    assert found(module=module())[0] == set(features)


def test_what_cannot_be_read_counts():
    space = {"helper": helper}
    exec("def hook(self, trainer, pl_module, *_):\n    helper(pl_module)", space)
    assert found(_callback("on_train_batch_end", space["hook"]))[0] >= set(PARAMETERS_AWAY)
    wrapped = decorated(lambda self, trainer, module, *_: module.state_dict())
    assert found(_callback("on_train_batch_end", wrapped))[0] >= set(PARAMETERS_AWAY)
    module = Net()
    exec("def around(net):\n    def hook(*_):\n        print(net)\n    return hook", space)
    assert found(_callback("on_train_batch_end", space["around"](module)), module=module)[0] >= set(PARAMETERS_AWAY)
    assert found(_callback("on_train_batch_end", space["around"](1)), module=module)[0] == set()
    exec("def quiet(self, *_):\n    print(1)", space)
    assert found(_callback("on_train_batch_end", space["quiet"]))[0] == set()


def test_functions_given_to_lambda_callbacks_are_read():
    reads = LambdaCallback(on_train_epoch_end=lambda trainer, pl_module: print(list(pl_module.parameters())))
    features, reason = found(reads)
    assert features == set(PARAMETERS_AWAY)
    assert "on_train_epoch_end of LambdaCallback" in reason
    part = LambdaCallback(on_train_epoch_end=partial(AT_PARAMETERS["norms"], None))
    assert found(part)[0] >= set(PARAMETERS_AWAY)


TWO = (lambda _, module: module.state_dict()), (lambda trainer, module: print(lambda module: module.x))


def test_of_functions_on_one_line_each_is_read_as_itself():
    assert found(LambdaCallback(on_train_epoch_start=TWO[0]))[0] == set(PARAMETERS_AWAY)
    assert found(LambdaCallback(on_train_epoch_start=TWO[1]))[0] == set()


def test_hooks_on_parameters_see_parts_of_gradients():
    net = Net()
    net.head.weight.register_hook(lambda gradient: gradient - gradient.mean())
    assert found(module=net)[0] == {"pipeline", "tensor", "microbatches"}
    net.head.bias.register_post_accumulate_grad_hook(print)
    assert set(GRADIENTS_AWAY) < found(module=net)[0]


class Warm(torch.optim.lr_scheduler.LRScheduler):
    """Written as people write them, around another."""

    def __init__(self, optimizer):
        optimizer._opt_called = True
        self.behind = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        super().__init__(optimizer)

    def get_lr(self):
        return [rate * self.last_epoch for rate, group in zip(self.base_lrs, self.optimizer.param_groups, strict=True)]

    def step(self, epoch=None):
        if self.last_epoch >= 0:
            self.behind.step()
        super().step(epoch)
        for index in range(len(self.base_lrs)):
            self.optimizer.param_groups[index]["lr"] *= 1.0
        for group in reversed(self.optimizer.param_groups):
            group["lr"] *= 1.0
        for number, group in enumerate(reversed(self.optimizer.param_groups)):
            group["lr"] *= 1.0 + 0.0 * number
        for number, (group, rate) in enumerate(zip(self.optimizer.param_groups, self.get_lr(), strict=True)):
            group["lr"] = rate / (number + 1)


class Restarts(torch.optim.lr_scheduler.LambdaLR):
    """Forgets moments."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda step: 1.0)

    def step(self, epoch=None):
        super().step(epoch)
        self.optimizer.state.clear()


class ByNorm(Restarts):
    step = torch.optim.lr_scheduler.LambdaLR.step

    def get_lr(self):
        return [1 / sum(float(p.detach().norm()) for p in group["params"]) for group in self.optimizer.param_groups]


class Clears(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            group["cleared"] = True
        super().zero_grad(set_to_none)


class Clamps(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.clamp_(-1, 1)


@pytest.mark.parametrize(
    ("options", "features", "said"),
    [
        ({"schedule": Warm, "kind": Clears}, (), ""),
        ({"schedule": Restarts}, STATE_AWAY, "step of Restarts may use optimizer state (self.optimizer.state"),
        ({"schedule": ByNorm}, STATE_AWAY, "get_lr of ByNorm may use"),
        ({"kind": Clamps}, BUT_PLAIN, "zero_grad of Clamps may use"),
    ],
)
def test_what_schedules_and_optimizers_do_beside_a_step_is_read(options, features, said):
    excluded, reasons = found(**options)
    assert excluded == {*features}
    assert said in reasons


@pytest.mark.parametrize("place", ["_buffers", "kept", "first"])
def test_what_lies_in_the_memory_of_a_parameter_keeps_it_there(place):
    module = Net()
    view = module.head.weight.data[:1]
    if place == "_buffers":
        module.body[0].register_buffer("first", view)
    else:
        setattr(module.body[0], place, [view] if place == "kept" else view)
    excluded, reasons = found(module=module)
    assert excluded == {*PARAMETERS_AWAY}
    assert f"a tensor in {place} of body.0 lies in the memory of head.weight" in reasons


def test_weights_that_every_forward_makes_anew_may_begin_in_the_memory_of_others():
    module = Net()
    torch.nn.utils.spectral_norm(module.head)
    assert module.head.weight.data_ptr() == module.head.weight_orig.data_ptr()
    assert "lies in the memory" not in found(module=module)[1]


class AsksClass(Callback):
    def on_train_start(self, trainer, pl_module):
        print(pl_module.__class__.__name__)


class Asks(Callback):
    """Asks strategy, groups and optimizer for what every rank has."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        strategy, rank = trainer.strategy, trainer.global_rank
        strategy.barrier("here")
        if rank == 0 and strategy.num_processes > 1 and trainer.strategy.node_rank == 0:
            print(strategy.reduce(outputs), trainer.strategy.strategy_name)
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = group.get("initial_lr", 0.1) * group.get("lr_scale", 1.0)
            group.setdefault("lr_scale", group.pop("other", 1.0))


def test_what_every_rank_has_may_be_asked():
    assert found(Asks()) == found(AsksClass()) == (set(), "")


@pytest.mark.parametrize(
    "body",
    [
        "strategy, rank = trainer.strategy, 0; print(strategy.model)",
        "strategy = trainer.strategy; strategy.lightning_module_state_dict()",
        "[print(group.get('params')) for group in trainer.optimizers[0].param_groups]",
        "group = trainer.optimizers[0].param_groups[0]; print(group.get(self.name))",
        "module, rank = pl_module, 0; print(list(module.parameters()))",
        "m = pl_module\n        if self.other:\n            m = self.other\n        print(list(m.parameters()))",
        "m, n = pl_module, 2\n        if self.other:\n            m, n = None, 3\n        list(m.parameters())",
    ],
)
def test_what_reaches_parameters_is_seen_by_any_name(body, tmp_path):
    file, space = tmp_path / "hook.py", {"Callback": Callback}
    code = f"class Hook(Callback):\n    def on_train_epoch_end(self, trainer, pl_module):\n        {body}\n"
    file.write_text(code)
    exec(compile(code, str(file), "exec"), space)
    assert "on_train_epoch_end of Hook" in found(space["Hook"]())[1]


def test_it_is_said_that_a_file_has_changed_or_that_there_is_none(tmp_path):
    code = "class Hook(Callback):\n    def on_train_epoch_end(self, trainer, _):\n        print(trainer.global_step)\n"
    for name, told in ((str(tmp_path / "hook.py"), "has the file changed"), ("<string>", "is not at hand")):
        (tmp_path / "hook.py").write_text("# edited while it planned\n")
        space = {"Callback": Callback}
        exec(compile(code, name, "exec"), space)
        assert told in found(space["Hook"]())[1]
