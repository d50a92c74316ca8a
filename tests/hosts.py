"""Hosts of one's own: network namespaces with a bridge between them, each with an address and a name."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

BRIDGE = "exobr0"


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

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Run a command there, under the host's name; what it prints goes to ``log``."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name, *command]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "MEGATRON_EXO_DEVICE": "cpu"}
        with log.open("wb") as out:
            words = ["ip", "netns", "exec", self.name, *named]
            return subprocess.Popen(words, stdout=out, stderr=out, env=environment)

    def set_cable(self, state: str) -> None:
        """Pull the cable (``down``): nobody learns of it. Or plug it in again (``up``)."""
        _ip("-n", self.name, "link", "set", "eth0", state)

    def processes(self) -> list[int]:
        """All that run there; torchrun's ranks outlive it and are in sessions of their own."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], check=True, capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def signal(self, number: int) -> None:
        """To every process there."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """So many hosts, 10.77.0.1 and on."""
    made = [Host(f"exohost{n}", f"10.77.0.{n}") for n in range(1, number + 1)]
    with ExitStack() as stack:
        _ip("link", "add", BRIDGE, "type", "bridge")
        stack.callback(_ip, "link", "del", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for number, host in enumerate(made):
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "del", host.name)
            _ip("link", "add", f"exoveth{number}", "type", "veth", "peer", "name", "eth0", "netns", host.name)
            # A connection that was cut off keeps a namespace, and what is in it, for minutes.
            stack.callback(_ip, "link", "del", f"exoveth{number}")
            _ip("link", "set", f"exoveth{number}", "master", BRIDGE, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield made
