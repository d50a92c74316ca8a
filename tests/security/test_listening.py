"""What a run listens on, as ``docs/security.md`` says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, socket, struct, sys
import torch, torch.distributed as dist

def listening():
    files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    inodes = {os.readlink(file) for file in files if os.path.exists(file)}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
            local, _, state, *_, = line.split()[1:5]
            if state == "0A" and f"socket:[{line.split()[9]}]" in inodes:
                address = bytes.fromhex(local.split(":")[0])
                words = struct.pack(f">{len(address) // 4}I", *struct.unpack(f"<{len(address) // 4}I", address))
                yield socket.inet_ntop(family, words), int(local.split(":")[1], 16)

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
port = int(os.environ["MASTER_PORT"])
print(json.dumps({"store": [a for a, p in listening() if p == port], "gloo": [a for a, p in listening() if p != port]}))
"""


def addresses(**environment: str) -> dict[str, list[str]]:
    """Where the store and gloo of one rank listen."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | variables | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="reads Linux's table of sockets")
def test_gloo_stays_on_the_loopback_if_told_and_the_store_never_does() -> None:
    found = addresses(GLOO_SOCKET_IFNAME="lo")
    assert found["gloo"]
    assert set(found["gloo"]) <= {"127.0.0.1", "::1"}
    # PyTorch has no option for it; should this fail, the paragraph on firewalls can go.
    assert set(found["store"]) <= {"::", "0.0.0.0"}
    assert found["store"]
