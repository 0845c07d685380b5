"""Programs of other people's repositories, run as they stand.

``PROJECTS_SOURCES`` is a folder with checkouts. The word that is changed stands in the script's call of ``Trainer``, in
the command line or in a configuration's override; the numbers of batches are cut for time.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.projects.inputs import write_mnist, write_pictures, write_words

LIGHTNING = Path("pytorch-lightning") / "examples" / "pytorch"
LIMITS = ("limit_train_batches=12", "limit_val_batches=4", "limit_test_batches=4", "limit_predict_batches=2")


def _run(script: Path, arguments: Sequence[str] = (), *, changes: Sequence[tuple[str, str]] = ()) -> Any:
    """Run a script as if it had been started; changes of its text are those that a user makes."""
    path = Path(os.environ["PROJECTS_SOURCES"]) / script
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        if old not in text:
            raise ValueError(f"{path} does not contain {old!r}")
        text = text.replace(old, new)
    if changes:
        path = Path.cwd() / f"rank{os.environ['RANK']}" / script.name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    return runpy.run_path(str(path), run_name="__main__")


def _in_call(strategy: str, *others: str) -> str:
    return "Trainer(" + ", ".join([f"strategy={strategy!r}", "accelerator='cpu'", "devices=2", *others, ""])


def _flags(strategy: str, *others: str) -> list[str]:
    every = (f"strategy={strategy}", "accelerator=cpu", "devices=2", *others)
    return [f"--trainer.{flag}" for flag in every]


def bug_report(strategy: str) -> None:
    """Lightning's template for reports of bugs."""
    changes = [
        ("Trainer(\n", _in_call(strategy) + "\n"),
        ("limit_train_batches=1", "limit_train_batches=12"),
        ("def run():\n", "def run():\n    torch.manual_seed(1)\n"),
    ]
    _run(LIGHTNING / "bug_report" / "bug_report_model.py", changes=changes)


def transformer(strategy: str) -> None:
    """Lightning's example of a language model: clipping, validation, test."""
    write_words(Path("data") / "wikitext-2.txt", 200_000)
    changes = [
        ("L.Trainer(", "L." + _in_call(strategy, *LIMITS)),
        ("max_epochs=20", "max_epochs=2"),
        ("n - 4000, 2000, 2000", "n - 400, 200, 200"),
    ]
    _run(LIGHTNING / "basics" / "transformer.py", changes=changes)


def autoencoder(strategy: str) -> None:
    """Lightning's autoencoder: a command line, pictures drawn by a callback on rank 0, best checkpoint, predictions."""
    _with_digits("autoencoder", strategy)


def classifier(strategy: str) -> None:
    """Lightning's classifier of digits: a command line, best checkpoint, predictions."""
    _with_digits("backbone_image_classifier", strategy)


def _with_digits(name: str, strategy: str) -> None:
    folder = Path("digits").resolve()
    write_mnist(folder)
    write_mnist(Path("data"))
    place = 'path.join(path.dirname(__file__), "..", "..", "Datasets")'
    arguments = _flags(strategy, "max_epochs=2", *LIMITS)
    _run(LIGHTNING / "basics" / f"{name}.py", arguments, changes=[(place, repr(str(folder)))])


def imagenet(strategy: str) -> None:
    """Lightning's ResNet-18: batch normalisation, metric objects in the step, a command line."""
    write_pictures(Path("pictures"), classes=4, each=16)
    arguments = ["fit", *_flags(strategy, "max_epochs=2", "limit_train_batches=6", "limit_val_batches=2")]
    arguments += ["--model.data_path=pictures", "--model.batch_size=8", "--model.workers=0"]
    _run(LIGHTNING / "domain_templates" / "imagenet.py", arguments)


def hydra_template(strategy: str) -> None:
    """The template with Hydra: batch normalisation, metric objects, its callbacks, a CSV logger, best checkpoint."""
    root = Path(os.environ["PROJECTS_SOURCES"]) / "lightning-hydra-template"
    folder = Path("digits").resolve()
    write_mnist(folder)
    arguments = [
        f"trainer.strategy={strategy}".replace("trainer.", "+trainer.", 1),
        "trainer.devices=2",
        "trainer.max_epochs=2",
    ]
    arguments += [f"+trainer.{limit}" for limit in LIMITS[:3]]
    arguments += ["seed=1", "logger=csv", f"data.data_dir={folder}", "extras.print_config=False"]
    arguments += [f"hydra.run.dir={Path('logs').resolve()}"]
    # It keeps its network among the hyperparameters of a checkpoint, and tests by the best one.
    os.environ.update(PROJECT_ROOT=str(root), TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
    sys.path.insert(0, str(root))
    _run(Path("lightning-hydra-template") / "src" / "train.py", arguments)
