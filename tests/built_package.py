"""Looks at a built package from an environment that has nothing but its wheel: ``make package`` runs it there.

    python tests/built_package.py dist site-packages

``dist`` has the wheel and the source distribution; ``site-packages`` is where all that the package needs lies.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import distribution
from pathlib import Path

WHOLE = (".ci/run", "CHANGELOG.md", "Makefile", "benchmarks/record.py", "constraints.txt", "docs/index.md")
WHOLE += ("examples/byte_gpt/train.py", "lightning_mist/py.typed", "mkdocs.yml", "setup.py", "tests/conftest.py")


def main(dist: Path, needed: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert not set(WHOLE) - names, set(WHOLE) - names

    found = distribution("lightning-mist")
    text = found.metadata.get_payload()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    assert not [link for link in links if not link.startswith(("http", "#"))], links
    assert {"url", "documentation"} & {url.partition(",")[0].lower() for url in found.metadata.get_all("Project-URL")}
    assert {point.group for point in found.entry_points} == {"console_scripts", "torch.backends"}

    # Without anything that it needs the package can be imported, and says what it offers.
    import lightning_mist

    home = Path(lightning_mist.__file__).parent
    assert home.is_relative_to(sys.prefix), home
    assert "MistStrategy" in dir(lightning_mist)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": f"{home.parent}{os.pathsep}{needed}"}
        # Searches, and writes a page: all data that come with the package are read.
        plan = ["plan", "--model", "gpt3-1.3b", "--cluster", "1x2xL4", "--global-batch-size", "8", "--seq-len", "512"]
        command = [str(Path(sys.prefix) / "bin" / "lightning-mist"), *plan, "--html", "plan.html"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        code = (
            'from lightning.pytorch import Trainer; print(type(Trainer(strategy="mist", accelerator="cpu").strategy))'
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
        assert "lightning_mist.strategy.lightning.MistStrategy" in done.stdout, done.stdout
    print(f"{archive.name} is a whole checkout, and its wheel runs: {len(links)} links")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
