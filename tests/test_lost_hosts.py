"""When a host counts as lost; that a lost one ends the job is tried in ``test_several_nodes.py``."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from megatron_exo.lost_hosts import Host, Sightings, watch_hosts

HOSTS = {number: Host(f"node{number}", range(number * 8, number * 8 + 8)) for number in range(3)}


def counts(*values: int) -> dict[int, bytes]:
    return {number: str(value).encode() for number, value in enumerate(values)}


def test_a_host_that_counts_on_is_there_and_one_that_does_not_is_lost() -> None:
    sightings = Sightings(HOSTS, now=100.0)
    for now in range(100, 200, 4):
        sightings.note(counts(now, now, min(now, 120)), now)
        expected = "host node2 (ranks 16-23) gave no sign of life" if now > 140 else None
        assert sightings.trouble(now, timeout_s=20.0) == expected


def test_hosts_that_never_began_to_count_are_lost_after_the_same_time() -> None:
    sightings = Sightings(HOSTS, now=100.0)
    sightings.note({0: b"1"}, 119.0)
    assert sightings.trouble(119.0, timeout_s=20.0) is None
    sightings.note({0: b"2"}, 121.0)
    assert sightings.trouble(121.0, 20.0) == "hosts node1 (ranks 8-15), node2 (ranks 16-23) gave no sign of life"


def test_a_store_that_does_not_answer_is_the_trouble_of_its_home_and_of_nobody_else() -> None:
    sightings = Sightings(HOSTS, now=100.0)
    sightings.note(counts(1, 1, 1), 106.0)
    sightings.note(counts(1, 1, 2), 110.0)  # the first two were last seen before the last answer
    assert sightings.trouble(130.0, timeout_s=20.0) is None
    assert sightings.trouble(130.1, 20.0) == "host node0 (ranks 0-7), where all ranks have met, has not answered"


@pytest.mark.parametrize(
    ("local_rank", "local_world_size", "timeout_s"),
    [("0", "2", 45.0), ("1", "1", 45.0), ("0", "1", 0.0)],
    ids=["on one host", "not the first rank of its host", "told not to"],
)
def test_nothing_is_forked_where_there_is_nothing_to_watch(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, local_world_size: str, timeout_s: float
) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", local_rank)):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    watch_hosts(dist.HashStore(), timeout_s)
