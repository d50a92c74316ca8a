"""Hosts of one's own: network namespaces with a bridge between them, each with an address and a name.

What the machine has only one of by a name is named after this process, so that others may have such hosts, or have left
some.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def why_not() -> str:
    """Why this machine lets nobody make hosts, or nothing."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is missing"
    probe = f"exoprobe{os.getpid()}"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces are not permitted: {getattr(error, 'stderr', None) or error}"
    return ""


class Host:
    """A network namespace; ``address`` is reachable from the others."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.namespace = f"{name}-{os.getpid()}"

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Run a command there, under the host's name; what it prints goes to ``log``."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name, *command]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "MEGATRON_EXO_DEVICE": "cpu"}
        with log.open("wb") as out:
            words = ["ip", "netns", "exec", self.namespace, *named]
            return subprocess.Popen(words, stdout=out, stderr=out, env=environment)

    def set_cable(self, state: str) -> None:
        """Pull the cable (``down``): nobody learns of it. Or plug it in again (``up``)."""
        _ip("-n", self.namespace, "link", "set", "eth0", state)

    def processes(self) -> list[int]:
        """All that run there; torchrun's ranks outlive it and are in sessions of their own."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], check=True, capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def signal(self, number: int) -> None:
        """To every process there."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """Kill every process there, until none is left: one may start another while they are listed."""
        deadline = time.monotonic() + 60
        while self.processes():
            assert time.monotonic() < deadline
            self.signal(signal.SIGKILL)
            time.sleep(0.05)


@contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """So many hosts, 10.77.0.1 and on."""
    made = [Host(f"exohost{n}", f"10.77.0.{n}") for n in range(1, number + 1)]
    bridge = f"exobr{os.getpid()}"
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("link", "set", bridge, "up")
        for number, host in enumerate(made):
            cable = f"exo{os.getpid()}-{number}"
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "del", host.namespace)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            # A connection that was cut off keeps a namespace, and what is in it, for minutes.
            stack.callback(_ip, "link", "del", cable)
            _ip("link", "set", cable, "master", bridge, "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield made
