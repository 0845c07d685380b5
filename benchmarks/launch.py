"""Starting a module in several processes, as ``torchrun`` does, and reading the JSON file that it writes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT


def run_module(
    module: str,
    arguments: Sequence[str],
    *,
    processes: int,
    timeout_seconds: float = 600.0,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run ``python -m module *arguments --out FILE`` in several processes and read the file.

    Args:
        module: Name of the module; its first rank writes a JSON object to ``--out``.
        arguments: Further arguments.
        processes: Number of processes, all on this machine, each with one thread unless ``OMP_NUM_THREADS`` says more.
        timeout_seconds: After this all processes are killed.
        environment: Environment variables that they have besides those of this process.

    Returns:
        The object.

    Raises:
        RuntimeError: If a process fails or the time is over; the end of their output is in the message.
    """
    with tempfile.TemporaryDirectory() as directory:
        out, log = Path(directory) / "out.json", Path(directory) / "log.txt"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += ["-m", module, *arguments, "--out", str(out)]
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout_seconds)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise RuntimeError(f"{module} ran for {timeout_seconds} s and was killed:\n{_end(log)}") from None
                raise
        if code != 0 or not out.is_file():
            raise RuntimeError(f"{module} {' '.join(arguments)} ended with {code}:\n{_end(log)}")
        content: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return content


def _end(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-100:])
