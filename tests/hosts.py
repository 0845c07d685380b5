"""Two hosts on one machine: network namespaces with names of their own, joined by a slow link.

Processes of a namespace see its interfaces only, so that what goes from one to the other goes over the link, while
those of one talk over its loopback. Needs root, ``ip`` and ``tc``.
"""

import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from lightning_mist.plan import Plan

ROOT = Path(__file__).parents[1]
INTERFACE = "link0"
PORT = 29617

_BURST = "128kb"
"""As long as the largest packet that a virtual interface passes on whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One of the two.

    Attributes:
        node: Its number.
        name: What programs on it hear as the host's name.
        namespace: Its network namespace's name.
        address: Its address on the link.
    """

    node: int
    name: str
    namespace: str
    address: str

    def start(self, command: Sequence[str], log: IO[str], hosts_file: Path, **variables: str) -> subprocess.Popen[str]:
        """Start a command on this host, in a session of its own."""
        inside = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
        prefix = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount"]
        return subprocess.Popen(
            [*prefix, "sh", "-c", inside, "sh", self.name, str(hosts_file), *command],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Both, and where their names stand."""

    both: tuple[Host, Host]
    hosts_file: Path

    def start_ranks(
        self, host: Host, module: str, arguments: Sequence[str], log: IO[str], *, per_node: int = 2, **variables: str
    ) -> subprocess.Popen[str]:
        """Start ``torchrun`` of a module on one of the hosts."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host.node)]
        command += ["--nproc-per-node", str(per_node), "--rdzv-backend", "static"]
        command += ["--master-addr", self.both[0].name, "--master-port", str(PORT), "-m", module, *arguments]
        return host.start(command, log, self.hosts_file, GLOO_SOCKET_IFNAME=INTERFACE, **variables)

    @contextmanager
    def running(self, folder: Path, module: str, arguments: Sequence[str], **options: Any) -> Iterator["Running"]:
        """Start ``torchrun`` of a module on both, whose output goes to the folder; in the end nothing of it is left."""
        with ExitStack() as stack:
            logs = tuple(folder / f"{host.name}.txt" for host in self.both)
            files = [stack.enter_context(path.open("w")) for path in logs]
            pairs = zip(self.both, files, strict=True)
            started = tuple(self.start_ranks(host, module, arguments, file, **options) for host, file in pairs)
            for host, process in zip(self.both, started, strict=True):
                stack.callback(process.wait)
                stack.callback(kill, host)
            yield Running(started=started, logs=logs)

    def pull_cable(self) -> None:
        """Nothing goes over the link any more, and nobody is told."""
        for host in self.both:
            _ip("-n", host.namespace, "link", "set", INTERFACE, "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """``torchrun`` on both hosts.

    Attributes:
        started: Its process on each host.
        logs: Where the output of each is.
    """

    started: tuple[subprocess.Popen[str], ...]
    logs: tuple[Path, ...]

    def codes(self, seconds: float) -> list[int]:
        """Exit status on each host; ``subprocess.TimeoutExpired`` if one of them runs longer."""
        until = time.monotonic() + seconds
        return [process.wait(max(0.0, until - time.monotonic())) for process in self.started]

    def come_to(self, signpost: "Signpost", seconds: float) -> bool:
        """Whether a process comes there within so many seconds; not if one of the hosts' ranks end before."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and all(process.poll() is None for process in self.started):
            if signpost.is_reached(1.0):
                return True
        return False

    def output(self) -> str:
        """The end of what has been written on each host."""
        return "\n".join(f"{path.stem}:\n{path.read_text(errors='replace')[-6000:]}" for path in self.logs)


class Signpost:
    """A named pipe through which a process says that it has come to a place.

    Args:
        path: Where it is made.
    """

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def is_reached(self, seconds: float) -> bool:
        """Whether a process opens and writes to it within so many seconds."""
        return bool(select.select([self._end], [], [], seconds)[0])

    def __del__(self) -> None:
        os.close(self._end)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _slow(namespace: str, rate: str) -> None:
    command = ["tc", "-n", namespace, "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate]
    subprocess.run([*command, "burst", _BURST, "latency", "1s"], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts(folder: Path, rate: str) -> Iterator[Hosts]:
    """Make both, and remove them with all processes that are left on them.

    Args:
        folder: For the file with their names.
        rate: Of the link in each direction, as ``tc`` reads it: ``"100mbit"``.

    Raises:
        subprocess.CalledProcessError: If one of them cannot be made, as :func:`why_not` would have told.
    """
    first, second = (
        Host(node=node, name=f"host{node}", namespace=f"mist-{os.getpid()}-{node}", address=f"10.77.0.{node + 1}")
        for node in range(2)
    )
    hosts_file = folder / "hosts"
    hosts_file.write_text("127.0.0.1 localhost\n" + "".join(f"{h.address} {h.name}\n" for h in (first, second)))
    with ExitStack() as stack:
        for host in (first, second):
            _ip("netns", "add", host.namespace)
            stack.callback(_remove, host.namespace)
        peer = ["peer", "name", INTERFACE, "netns", second.namespace]
        _ip("link", "add", INTERFACE, "netns", first.namespace, "type", "veth", *peer)
        for host in (first, second):
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", host.namespace, "link", "set", interface, "up")
            _slow(host.namespace, rate)
        yield Hosts(both=(first, second), hosts_file=hosts_file)


def hosts_of_stages(plan: Plan, places: Sequence[str]) -> list[set[str]]:
    """The hosts that each stage of a plan lies on, where ranks are in these places."""
    return [{places[device] for device in stage.mesh.devices} for stage in plan.stages]


def crossings(plan: Plan, places: Sequence[str]) -> int:
    """How many boundaries between stages lie between hosts."""
    return sum(before != after for before, after in pairwise(hosts_of_stages(plan, places)))


def processes_of(host: Host) -> list[int]:
    """Processes that are on a host."""
    found = subprocess.run(["ip", "netns", "pids", host.namespace], check=True, capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


def kill(host: Host) -> None:
    """End every process of a host at once, without a word."""
    for process in processes_of(host):
        try:
            os.kill(process, 9)
        except ProcessLookupError:
            continue  # it has just ended by itself


def _remove(namespace: str) -> None:
    kill(Host(node=0, name="", namespace=namespace, address=""))
    _ip("netns", "delete", namespace)


def why_not(folder: Path) -> str | None:
    """Why there cannot be two hosts here, if so."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}"
    try:
        with two_hosts(folder, "100mbit") as hosts, (folder / "try.txt").open("w") as log:
            code = hosts.both[0].start(["true"], log, hosts.hosts_file).wait(10)
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return None if code == 0 else f"no mounts in a namespace: {(folder / 'try.txt').read_text().strip()}"
