"""One process: what user code does to weights that have masters, and what is refused."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_mist import MistStrategy, PlanError
from tests.fits import make_trainer
from tests.strategy.test_strategy import Net, _end_of_the_process_group, loader, one_stage, profiles, train

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Lightning's own advice on loggers, workers and small datasets
    pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.10 is refused"),
]

__all__ = ["_end_of_the_process_group", "profiles"]


class Tied(Net):
    """A weight used twice, a frozen one, a norm with buffers, and an optimizer over what is trained."""

    def __init__(self, edit=lambda weight: None):
        super().__init__(norm=True)
        self.twice = self.blocks[0][0]
        self.blocks[2][0].weight = self.blocks[1][0].weight
        self.head.bias.requires_grad_(False)
        self.edit, self.types = edit, set()

    def training_step(self, batch, batch_idx):
        penalty = self.head.weight.square().sum()
        self.types.add(penalty.dtype)
        return super().training_step(batch, batch_idx) + 0.1 * penalty

    def on_train_batch_end(self, *_):
        with torch.no_grad():
            self.edit(self.head.weight)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def alone(module, *, batches=1, clip=None, edit=lambda weight: None, epochs=2):
    """The arithmetic without Lightning and this package: casts computed with, masters updated."""
    masters, computed = copy.deepcopy(module), copy.deepcopy(module).to(torch.bfloat16)
    computed.log = lambda *_, **__: None
    pairs = [p for p in zip(masters.parameters(), computed.parameters(), strict=True) if p[0].requires_grad]
    for master, cast in pairs:
        cast.grad_dtype = master.dtype
    optimizer = masters.configure_optimizers()
    for _ in range(epochs):
        for index, (rows,) in enumerate(loader()):
            with torch.no_grad():
                for master, cast in pairs:
                    cast.copy_(master)
            (computed.training_step([rows.bfloat16()], index) / batches).backward()
            if (index + 1) % batches == 0:
                for master, cast in pairs:
                    master.grad, cast.grad = cast.grad, None
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_([master for master, _ in pairs], clip)
                optimizer.step()
            with torch.no_grad():
                edit(masters.head.weight)
    return masters, computed


def clamp(weight):
    assert weight.dtype is torch.float32
    weight.clamp_(-0.1, 0.1)


@pytest.mark.parametrize(
    "options", [{}, {"clip": 0.1}, {"batches": 2}, {"edit": clamp}], ids=["plain", "clipped", "accumulated", "edited"]
)
def test_it_is_the_arithmetic_of_one_process(tmp_path, profiles, options):
    pl.seed_everything(1, verbose=False)
    module = Tied(options.get("edit", lambda weight: None))
    expected, computed = alone(module, **options)
    strategy = MistStrategy(plan=one_stage(), master_weights=True, profile_directory=profiles)
    given = {"gradient_clip_val": options.get("clip"), "accumulate_grad_batches": options.get("batches", 1)}
    _, trained = train(
        tmp_path, strategy, module, precision="bf16-true", limit_val_batches=0, use_distributed_sampler=False, **given
    )
    assert trained.types == {torch.bfloat16}
    for (name, mine), wanted in zip(trained.named_parameters(), expected.parameters(), strict=True):
        assert mine.dtype is (torch.float32 if wanted.requires_grad else torch.bfloat16), name
        assert torch.equal(mine, wanted.to(mine.dtype)), name
    for mine, wanted in zip(trained.buffers(), computed.buffers(), strict=True):
        assert torch.equal(mine, wanted)


def test_evaluation_after_the_fit_and_another_fit(tmp_path, profiles):
    strategy = MistStrategy(plan=one_stage(), master_weights=True, profile_directory=profiles)
    trainer, module = train(tmp_path, strategy, precision="bf16-true", epochs=1)
    assert module.head.weight.dtype is torch.float32
    before = module.head.weight.detach().clone()
    trainer.test(module, loader(), verbose=False)
    assert torch.equal(module.head.weight, before.bfloat16())


class Values(Callback):
    """Keeps all weights where the first step has ended."""

    def on_train_batch_end(self, trainer, module, *_):
        self.first = {name: p.detach().clone() for name, p in module.named_parameters()}
        trainer.should_stop = True


def test_weights_that_16_bits_would_not_move(tmp_path, profiles):
    """A step that is lost in bfloat16 is not lost in the masters."""

    def optimizer(parameters, lr):
        return torch.optim.SGD(parameters, lr=1e-5)

    def fit(**options):
        callback = Values()
        strategy = MistStrategy(plan=one_stage(), profile_directory=profiles, **options)
        module = Net(optimizer=optimizer)
        start = {name: p.detach().clone() for name, p in module.named_parameters()}
        train(tmp_path, strategy, module, [callback], precision="bf16-true", limit_val_batches=0)
        return start["head.weight"], callback.first["head.weight"]

    start, lost = fit()
    assert torch.equal(lost, start.bfloat16())
    start, kept = fit(master_weights=True)
    assert not torch.equal(kept, start)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "16-true"}, "whose gradients would have to be scaled.*use precision='bf16-true'"),
        ({"precision": "32-true"}, "use precision='bf16-true', or master_weights=False"),
        ({"precision": "bf16-mixed"}, "whose parameters are their own masters"),
        ({"precision": "bf16-true", "fast_dev_run": True}, "fast_dev_run=True, so only torch's"),
        ({"precision": "bf16-true", "sync_batchnorm": True}, "sync_batchnorm computes collectives"),
    ],
)
def test_refusals(tmp_path, profiles, options, message):
    strategy = MistStrategy(master_weights=True, profile_directory=profiles)
    with pytest.raises(PlanError, match=message):
        train(tmp_path, strategy, Net(norm=True), **options)


def test_manual_optimization_is_refused(tmp_path, profiles):
    strategy = MistStrategy(master_weights=True, profile_directory=profiles)
    with pytest.raises(PlanError, match="master_weights=True"):
        train(tmp_path, strategy, Net(automatic=False), precision="bf16-true")


class Momentum(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def epoch_by_hand(module, state, dtype):
    """An epoch of steps in bfloat16 on parameters of a type; the module and the optimizer's state afterwards."""
    own, computed = copy.deepcopy(module).to(dtype), copy.deepcopy(module).bfloat16()
    optimizer = own.configure_optimizers()
    if state is not None:
        optimizer.load_state_dict(state)
    for (rows,) in loader():
        for master, cast in zip(own.parameters(), computed.parameters(), strict=True):
            cast.data, cast.grad_dtype, cast.grad = master.data.bfloat16(), dtype, None
        computed(rows.bfloat16()).pow(2).mean().backward()
        for master, cast in zip(own.parameters(), computed.parameters(), strict=True):
            master.grad = cast.grad
        optimizer.step()
    return own, optimizer.state_dict()


def test_a_checkpoint_goes_on_in_plain_bfloat16_and_back(tmp_path, profiles):
    """Weights and state are those that were saved, in the type that each run has."""
    pl.seed_everything(1, verbose=False)
    expected, state, path = Momentum(), None, None
    for epochs, dtype in ((1, torch.float32), (2, torch.bfloat16), (3, torch.float32)):
        expected, state = epoch_by_hand(expected, state, dtype)
        masters = MistStrategy(plan=one_stage(), master_weights=True, profile_directory=profiles)
        trainer = make_trainer(
            masters if dtype is torch.float32 else "ddp",
            devices=1,
            precision="bf16-true",
            max_epochs=epochs,
            use_distributed_sampler=False,
            default_root_dir=tmp_path,
        )
        pl.seed_everything(1, verbose=False)
        module = Momentum()
        module.log = lambda *_, **__: None
        trainer.fit(module, loader(), ckpt_path=path)
        path = tmp_path / f"{epochs}.ckpt"
        trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)
        for (name, wanted), mine in zip(expected.named_parameters(), saved["state_dict"].values(), strict=True):
            assert mine.dtype is dtype
            assert torch.equal(mine, wanted), f"{name} after epoch {epochs}"
        for number, entry in state["state"].items():
            found = saved["optimizer_states"][0]["state"][number]["momentum_buffer"]
            assert torch.equal(found, entry["momentum_buffer"])
