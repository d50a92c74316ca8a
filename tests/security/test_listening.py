"""What a run listens on, as ``docs/security.md`` says."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.platform.plain_gpt import parse_arguments
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
LOOPBACK = {"127.0.0.1", "::1"}


def _listening() -> Iterator[tuple[str, int]]:
    """Address and port of every socket at which this process waits for others."""
    own: set[str] = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed in between
            own.add(str(path.readlink()))
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A" and f"socket:[{line.split()[9]}]" in own:
                address = bytes.fromhex(local.split(":")[0])
                words = struct.pack(f">{len(address) // 4}I", *struct.unpack(f"<{len(address) // 4}I", address))
                yield socket.inet_ntop(family, words), int(local.split(":")[1], 16)


def _store_and_gloo() -> tuple[list[str], list[str]]:
    """The addresses of the store, and those of gloo after a first exchange of tensors."""
    dist.all_reduce(torch.ones(1))
    port = int(os.environ["MASTER_PORT"])
    return [at for at, p in _listening() if p == port], [at for at, p in _listening() if p != port]


def _connected(environment: dict[str, str]) -> tuple[list[str], list[str]]:
    from megatron_exo.startup import connect  # once the platform is active

    os.environ |= environment
    parse_arguments([])
    connect(60.0, 45.0)
    return _store_and_gloo()


def _plain_process_group() -> tuple[list[str], list[str]]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    return _store_and_gloo()


def test_a_single_process_has_no_store_and_is_reached_from_no_other_machine() -> None:
    ((store, gloo),) = run_on_ranks(1, _connected, {}, process_group=False)
    assert not store
    assert set(gloo) <= LOOPBACK


def test_tensors_of_ranks_on_one_machine_stay_on_its_loopback() -> None:
    found = run_on_ranks(2, _connected, {"LOCAL_WORLD_SIZE": "2"}, process_group=False)
    assert all(gloo and set(gloo) <= LOOPBACK for _, gloo in found)


@pytest.mark.parametrize("environment", [{"LOCAL_WORLD_SIZE": "1"}, {}], ids=["several", "unknown"])
def test_ranks_that_may_be_on_several_machines_can_reach_each_other(environment: dict[str, str]) -> None:
    assert run_on_ranks(2, _interface, environment, process_group=False) == [None, None]


def _interface(environment: dict[str, str]) -> str | None:
    _connected(environment)
    return os.environ.get("GLOO_SOCKET_IFNAME")


def test_an_interface_that_the_user_names_is_kept() -> None:
    environment = {"LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo,lo"}
    assert run_on_ranks(1, _interface, environment, process_group=False) == ["lo,lo"]


def test_the_store_takes_every_address_whatever_it_is_told() -> None:
    ((store, gloo),) = run_on_ranks(1, _plain_process_group, process_group=False)
    assert gloo
    assert set(gloo) <= LOOPBACK
    # PyTorch has no option for it; should this fail, the paragraph on firewalls can go.
    assert store
    assert set(store) <= {"::", "0.0.0.0"}
