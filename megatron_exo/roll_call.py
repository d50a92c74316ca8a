"""Who takes part: all ranks are called before they are connected, shown as a table, and asked for the shared folder.

Without this, a wrong address, a node that is not there or a rank that was started twice is minutes of silence, and a
checkpoint folder that nodes do not share is found out when it is to be loaded.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_exo.errors import UserError

_POLL_S = 0.1


@dataclass(frozen=True)
class _Party:
    """Who is called: ``count`` of a kind, of which this process is one, at the store of number 0."""

    kind: str
    number: int
    count: int
    address: str
    port: int
    timeout_s: float
    where: str
    """How a user says where they meet."""
    own_numbers: str
    """What to do if two have the same number."""
    come: str
    """What to do about those that have not come."""

    @property
    def me(self) -> str:
        return f"{self.kind} {self.number} on {socket.gethostname()}"

    def open_store(self, *, keeps_it: bool) -> dist.TCPStore:
        """The store of number 0, which this process keeps or reaches.

        Raises:
            UserError: it cannot be had.
        """
        if not keeps_it:
            self._knock()
        try:
            return dist.TCPStore(
                self.address,
                self.port,
                is_master=keeps_it,
                timeout=timedelta(seconds=self.timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except Exception as error:
            if "EADDRINUSE" in str(error):
                raise UserError(
                    f"{self.me} cannot keep port {self.port}, where the others would come: another program has it; "
                    "end that, or choose another port for all of them"
                ) from error
            raise self._nobody_there(str(error).splitlines()[0]) from error

    def _knock(self) -> None:
        """Return once somebody listens: PyTorch's store would print its stack for every attempt that fails."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                with socket.create_connection((self.address, self.port), timeout=max(left, _POLL_S)):
                    return
            except OSError as error:
                if left < _POLL_S:
                    raise self._nobody_there(error.strerror or str(error)) from error
            time.sleep(_POLL_S)

    def _nobody_there(self, reason: str) -> UserError:
        return UserError(
            f"{self.me} cannot meet the others at {self.where}, within {self.timeout_s:.0f} s: {reason.lower()}; check "
            f"the address, that the port is open, and that the host of {self.kind} 0 is up"
        )

    def answer(self, calls: dist.Store) -> None:
        """Return when all have answered.

        Raises:
            UserError: some have not in time, or one came twice.
        """
        try:
            times = calls.add(f"times/{self.number}", 1)
            if times > 1:
                raise UserError(
                    f"{self.kind} {self.number} was started {times} times, here on {socket.gethostname()}; "
                    f"{self.own_numbers}"
                )
            calls.set(f"pid/{self.number}", str(os.getpid()))
            calls.set(f"host/{self.number}", socket.gethostname())
            if calls.add("come", 1) == self.count:
                calls.set("all have come", "")
            deadline = time.monotonic() + self.timeout_s
            while not calls.check(["all have come"]):  # and not wait(), at whose end PyTorch adds lines of its own
                if time.monotonic() > deadline:
                    missing = [number for number in range(self.count) if not calls.check([f"host/{number}"])]
                    raise UserError(
                        f"{len(missing)} of {self.count} {self.kind}s have not come within {self.timeout_s:.0f} s: "
                        f"{ranges(missing)}; {self.come}, or give them more time with --exo-start-timeout"
                    )
                time.sleep(_POLL_S)
        except dist.DistError as error:
            raise UserError(
                f"{self.me} has lost the store at {self.address}:{self.port}, its home has ended; see what "
                f"{self.kind} 0 prints"
            ) from error


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
    address, port = meeting_point()
    ranks = _Party(
        "rank",
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        address,
        port,
        timeout_s,
        where=f"MASTER_ADDR {address}, MASTER_PORT {port}",
        own_numbers="give each process a RANK of its own (0 to WORLD_SIZE - 1 over all nodes; LOCAL_RANK counts on one "
        "node only)",
        come="see what their nodes print",
    )
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = of_this_attempt(ranks.open_store(keeps_it=ranks.number == 0 and not has_agent))
    ranks.answer(_calls(attempt))
    return attempt


def _calls(attempt: dist.Store) -> dist.Store:
    return dist.PrefixStore("roll-call", attempt)


def host_of(attempt: dist.Store, rank: int) -> str:
    """Where a rank that has answered is."""
    return _calls(attempt).get(f"host/{rank}").decode()


def pid_of(attempt: dist.Store, rank: int) -> int:
    """The process, on its host, of a rank that has answered."""
    return int(_calls(attempt).get(f"pid/{rank}"))


def meeting_point() -> tuple[str, int]:
    """Address and port of the store of this process's job."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def of_this_attempt(store: dist.Store) -> dist.Store:
    """The part of a store that no earlier attempt of torchrun's has written."""
    return dist.PrefixStore(f"megatron_exo/attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def call_nodes(number: int, count: int, address: str, port: int, timeout_s: float) -> dist.Store:
    """:func:`call_roll` for nodes, before torchrun's agents meet there: those wait ten minutes and name nobody.

    Returns:
        The store, for the caller to hold: an agent in this process goes on with it.

    Raises:
        UserError: as :func:`call_roll`, of nodes.
    """
    nodes = _Party(
        "node",
        number,
        count,
        address,
        port,
        timeout_s,
        where=f"--master-addr {address}, --master-port {port}",
        own_numbers=f"give each a --node-rank of its own (0 to {count - 1})",
        come=f"start each with its own --node-rank and --master-addr {address}",
    )
    store = nodes.open_store(keeps_it=number == 0)
    nodes.answer(dist.PrefixStore("megatron_exo/nodes", store))
    return store


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


def check_all_find(what: str, found: str | None) -> None:
    """See that every rank has found the same.

    Args:
        what: where they have looked, as the command line says it.
        found: what is there, by name.

    Raises:
        UserError: another rank has found something else; its host does not share that place.
    """
    every: list[tuple[str, str | None]] = [("", None)] * dist.get_world_size()
    dist.all_gather_object(every, (socket.gethostname(), found))
    host, theirs = every[0]
    if found != theirs:
        raise UserError(
            f"{what} holds {found or 'no checkpoint'} on {socket.gethostname()}, and {theirs or 'none'} on {host}, the "
            "host of rank 0; pass a folder that all nodes share"
        )
