"""Who takes part: all ranks are called before they are connected, shown as a table, and asked for the shared folder.

Without this, a wrong address, a node that is not there or a rank that was started twice is minutes of silence, and a
checkpoint folder that nodes do not share is found out when it is to be loaded.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_exo.errors import UserError


def call_roll(timeout_s: float) -> dist.Store:
    """Return when every rank has answered; uses the store that torchrun's agents, or else rank 0, keep.

    Args:
        timeout_s: seconds for all ranks of all nodes to come this far.

    Returns:
        The store to connect with. It holds nothing of an earlier attempt: when torchrun starts the ranks again, its
        agents go on with the same store, in which ranks would find the addresses of those that have died.

    Raises:
        UserError: the store cannot be reached, ranks are missing, or one was started twice; which, and on what host.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience, host = timedelta(seconds=timeout_s), socket.gethostname()
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            address,
            port,
            is_master=rank == 0 and not has_agent,
            timeout=patience,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except Exception as error:
        raise UserError(
            f"rank {rank} on {host} cannot meet the others at MASTER_ADDR {address}, MASTER_PORT {port}, within "
            f"{timeout_s:.0f} s; check the address, that the port is open, and that the node of rank 0 is up"
        ) from error
    attempt = dist.PrefixStore(f"megatron_exo/attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    calls = dist.PrefixStore("roll-call", attempt)
    try:
        times = calls.add(f"times/{rank}", 1)
        if times > 1:
            raise UserError(
                f"rank {rank} was started {times} times, here on {host}; give each process a RANK of its own "
                "(0 to WORLD_SIZE - 1 over all nodes; LOCAL_RANK counts on one node only)"
            )
        calls.set(f"host/{rank}", host)
        if missing := _missing_after(calls, world_size, patience):
            raise UserError(
                f"{len(missing)} of {world_size} ranks have not come within {timeout_s:.0f} s: {ranges(missing)}; see "
                "what their nodes print, or give them more time with --exo-start-timeout"
            )
    except dist.DistError as error:
        raise UserError(
            f"rank {rank} on {host} has lost the store at {address}:{port}, its home has ended; see what rank 0 prints"
        ) from error
    return attempt


def _missing_after(calls: dist.Store, world_size: int, patience: timedelta) -> list[int]:
    """The ranks that have not answered by then."""
    try:
        calls.wait([f"host/{rank}" for rank in range(world_size)], patience)
    except dist.DistStoreError:
        return [rank for rank in range(world_size) if not calls.check([f"host/{rank}"])]
    return []


def ranges(numbers: Sequence[int]) -> str:
    """``0-3, 6, 8-9``; the numbers ascend."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


@dataclass(frozen=True)
class Place:
    """Where a rank is, and what it is in each kind of parallelism."""

    rank: int
    host: str
    device: str
    tp: int
    pp: int
    cp: int
    dp: int

    @classmethod
    def of_this_rank(cls, pg_collection: Any, device: str) -> Place:
        groups = {name: getattr(pg_collection, name).rank() for name in ("tp", "pp", "cp", "dp")}
        return cls(dist.get_rank(), socket.gethostname(), device, **groups)


def gather_places(place: Place) -> list[Place]:
    """Every rank's, on every rank."""
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, place)
    return places


def format_places(places: Sequence[Place], rows: int = 16) -> str:
    """A table with a line per rank; above ``rows`` ranks, a line per host with the ranges of its ranks."""
    head: tuple[str, ...] = ("rank", "host", "device", "tp", "pp", "cp", "dp")
    if len(places) <= rows:
        cells = [tuple(str(getattr(place, name)) for name in head) for place in places]
    else:
        cells = []
        for host in dict.fromkeys(place.host for place in places):
            here = [place for place in places if place.host == host]
            kinds = [ranges(sorted({getattr(place, name) for place in here})) for name in head[3:]]
            devices = {place.device for place in here}
            device = devices.pop() if len(devices) == 1 else f"{len(devices)} devices"
            cells.append((ranges([place.rank for place in here]), host, device, *kinds))
    widths = [max(len(row[i]) for row in [head, *cells]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *cells]
    )


def check_shared(folder: Path) -> None:
    """See that every rank finds in ``folder`` what rank 0 puts there.

    Raises:
        UserError: a rank does not; its checkpoints would be parts that nobody can put together.
    """
    name: list[str | None] = [f".shared-{uuid.uuid4().hex}" if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    assert name[0] is not None
    probe = folder / name[0]
    if dist.get_rank() == 0:
        probe.touch()
    dist.barrier()
    found = probe.exists()
    dist.barrier()
    if dist.get_rank() == 0:
        probe.unlink()
    if not found:
        raise UserError(
            f"--save {folder} on {socket.gethostname()} is not the folder of rank 0; a checkpoint is written by all "
            "nodes into one folder, pass one that they share"
        )
