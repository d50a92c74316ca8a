"""A host that is gone without a word ends the job at once: ``--exo-lost-host-timeout``.

The death of a process closes its connections, and whoever waits for it learns of that. A host that loses its power or
its network closes nothing, and the others wait for it in a collective until that times out, which takes ten minutes by
default. So on each host one process, forked by its first rank, counts up in the store where the ranks have met, and
looks whether the others do. It has no part in the training: a rank that computes for long, or holds Python's lock, is
not taken for lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_exo.platform.children import die_with_parent
from megatron_exo.roll_call import host_of, meeting_point, of_this_attempt, pid_of, ranges

_BEATS_PER_TIMEOUT = 10


@dataclass(frozen=True)
class Host:
    """A machine and the ranks on it."""

    name: str
    ranks: range

    def __str__(self) -> str:
        return f"{self.name} (rank{'s' if len(self.ranks) > 1 else ''} {ranges(self.ranks)})"


class Sightings:
    """When each host was last seen to be alive; times are in seconds of any one clock."""

    def __init__(self, hosts: Mapping[int, Host], now: float) -> None:
        self._hosts = hosts
        self._counts: dict[int, bytes] = {}
        self._seen = dict.fromkeys(hosts, now)
        self._answered = now

    def note(self, counts: Mapping[int, bytes], now: float) -> None:
        """The store has answered, with what hosts have counted up to."""
        self._answered = now
        for number, count in counts.items():
            if self._counts.get(number) != count:
                self._counts[number], self._seen[number] = count, now

    def trouble(self, now: float, timeout_s: float) -> str | None:
        """Which hosts have not been seen for ``timeout_s``, or nothing.

        Without an answer nothing is known of any host but the one that owes it, so others are judged by the last.
        """
        if now - self._answered > timeout_s:
            return f"host {self._hosts[0]}, where all ranks have met, has not answered"
        lost = [str(host) for number, host in self._hosts.items() if self._answered - self._seen[number] > timeout_s]
        return f"host{'s' if len(lost) > 1 else ''} {', '.join(lost)} gave no sign of life" if lost else None


def watch_hosts(store: dist.Store, timeout_s: float) -> None:
    """Watch over the other hosts of this job, if there are any, from now until this process ends.

    Args:
        store: where all ranks have answered (:func:`~megatron_exo.roll_call.call_roll`).
        timeout_s: seconds after which a host counts as lost; 0 for never.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if timeout_s <= 0 or here == world_size or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    hosts = {
        number: Host(host_of(store, first), range(first, min(first + here, world_size)))
        for number, first in enumerate(range(0, world_size, here))
    }
    ours = rank // here
    pids = [pid_of(store, each) for each in hosts[ours].ranks]
    parent = os.getpid()
    if os.fork() == 0:  # and not multiprocessing's, which would wait at the end for what ignores its SIGTERM
        try:
            _watch(ours, hosts, pids, timeout_s, parent)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)


def _watch(ours: int, hosts: Mapping[int, Host], pids: list[int], timeout_s: float, parent: int) -> None:
    """Until ``parent`` ends, or a host is lost: the ranks ``pids`` on this host then end."""
    die_with_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # schedulers signal every process of a job, and ranks may then save long
    others = {number: host for number, host in hosts.items() if number != ours}
    sightings = Sightings(hosts, time.monotonic())
    beat_s = timeout_s / _BEATS_PER_TIMEOUT
    threading.Thread(target=_beat, args=(ours, others, sightings, beat_s, timeout_s), daemon=True).start()
    while (trouble := sightings.trouble(time.monotonic(), timeout_s)) is None:
        time.sleep(beat_s)
        if os.getppid() != parent:
            return
    print(
        f"error: {trouble} for {timeout_s:.0f} s (--exo-lost-host-timeout): the network or the host is down; the "
        f"ranks on {hosts[ours].name} end; with --save and --load, the same command goes on from the newest checkpoint",
        file=sys.stderr,
        flush=True,
    )
    # They wait for the lost ones, and would not hear of anything milder. The first has forked this process, which ends
    # with it: that one last.
    for pid in reversed(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _beat(ours: int, others: Mapping[int, Host], sightings: Sightings, beat_s: float, timeout_s: float) -> None:
    """Count up and look at the others, for ever; a store that does not answer keeps this waiting, or fails."""
    count = 0
    store: dist.Store | None = None
    while True:
        try:
            if store is None:
                address, port = meeting_point()
                patience = timedelta(seconds=timeout_s)
                served = dist.TCPStore(address, port, is_master=False, timeout=patience, wait_for_workers=False)
                store = dist.PrefixStore("alive", of_this_attempt(served))
            count += 1
            store.set(str(ours), str(count))
            begun = [number for number in others if store.check([str(number)])]
            counts = store.multi_get([str(number) for number in begun]) if begun else []
            sightings.note({ours: str(count).encode(), **dict(zip(begun, counts, strict=True))}, time.monotonic())
        except RuntimeError:  # of the store, whose connection does not come back by itself
            store = None
        time.sleep(beat_s)
