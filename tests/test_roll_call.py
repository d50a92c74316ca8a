"""Before ranks are connected they are called: who is missing, started twice, or at another place is named."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_exo.errors import UserError
from megatron_exo.roll_call import (
    Place,
    call_nodes,
    call_roll,
    check_all_find,
    check_shared,
    format_places,
    gather_places,
    ranges,
)
from tests.ranks import run_on_ranks


def _call(pretend: dict[int, str] | None = None, timeout_s: float = 60.0) -> str:
    """What the call says on this rank, which may ``pretend`` to be another, or be absent."""
    rank = int(os.environ["RANK"])
    role = (pretend or {}).get(rank, str(rank))
    if role == "absent":
        return "absent"
    os.environ["RANK"] = role
    try:
        store = call_roll(timeout_s)
    except UserError as error:
        return str(error)
    store.set(f"leaving/{role}", "")
    if role == "0":  # the store's home must outlive the others
        store.wait([f"leaving/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))])
    return "all here"


def _call_in_three_attempts(port: int) -> list[str]:
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)}
    found = []
    for attempt in "012":
        os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
        store = call_roll(60.0)
        found.append("an old address" if store.check(["address"]) else "nothing")
        store.set(f"looked/{os.environ['RANK']}", "")
        store.wait(["looked/0", "looked/1"])
        store.set("address", "of a rank that will die")
    return found


def test_ranks_that_are_started_again_find_nothing_of_those_before_in_the_store() -> None:
    """As under ``torchrun --max-restarts``, whose agents keep one store for all attempts."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_on_ranks(2, _call_in_three_attempts, store.port, process_group=False) == [["nothing"] * 3] * 2


def test_nobody_is_missed_when_all_are_there() -> None:
    assert run_on_ranks(3, _call, process_group=False) == ["all here"] * 3


def test_missing_ranks_are_named() -> None:
    first, second, *_ = run_on_ranks(4, _call, {2: "absent", 3: "absent"}, 3.0, process_group=False)
    assert "2 of 4 ranks have" in second or "see what rank 0 prints" in second  # which may have ended before
    assert first.startswith("2 of 4 ranks have not come within 3 s: 2-3; see what their nodes print, or give them more")


def test_a_rank_that_is_started_twice_is_named() -> None:
    texts = run_on_ranks(3, _call, {2: "1"}, 3.0, process_group=False)
    assert sum("rank 1 was started 2 times" in text and "LOCAL_RANK counts on one node only" in text for text in texts)


def _call_at_a_closed_port() -> str:
    os.environ["MASTER_PORT"] = "1"
    return _call({0: "1", 1: "1"}, 2.0)


def test_a_port_where_nobody_listens_is_named() -> None:
    for text in run_on_ranks(2, _call_at_a_closed_port, process_group=False):
        assert (
            "cannot meet the others at MASTER_ADDR 127.0.0.1, MASTER_PORT 1, within 2 s: connection refused; check"
            in text
        )


def _call_node(numbers: list[int]) -> str:
    process, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    number = numbers[process]
    try:
        store, heard = call_nodes(number, 2, "127.0.0.1", port, 60.0), "all here"
    except UserError as error:
        store, heard = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), str(error)
    store.set(f"leaving/{process}", "")
    if number == 0:  # the store's home must outlive the others, the one that comes too often included
        store.wait([f"leaving/{each}" for each in range(len(numbers))])
    return heard


def test_nodes_are_called_before_their_ranks_and_one_that_comes_twice_is_named() -> None:
    assert run_on_ranks(2, _call_node, [0, 1], process_group=False) == ["all here"] * 2
    texts = run_on_ranks(3, _call_node, [0, 1, 1], process_group=False)
    twice = [text for text in texts if text.startswith("node 1 was started 2 times, here on ")]
    assert len(twice) == 1
    assert twice[0].endswith("; give each a --node-rank of its own (0 to 1)")


def test_a_port_that_another_program_has_is_named() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"node 0 on .* cannot keep port {port}, .* choose another port for all"):
            call_nodes(0, 2, "127.0.0.1", port, 2.0)


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([4], "4"), ([0, 1, 2, 3], "0-3"), ([0, 2, 3, 7, 8, 9], "0, 2-3, 7-9")]
)
def test_ranks_are_listed_as_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_a_few_ranks_are_a_line_each_and_many_a_line_per_host() -> None:
    places = [Place(rank, f"node{rank // 4}", "cpu", rank % 2, rank // 4, 0, rank // 2 % 2) for rank in range(8)]
    lines = format_places(places).splitlines()
    assert lines[0].split() == ["rank", "host", "device", "tp", "pp", "cp", "dp"]
    assert lines[6].split() == ["5", "node1", "cpu", "1", "1", "0", "0"]
    assert len(lines) == 9
    assert [line.split() for line in format_places(places, rows=4).splitlines()[1:]] == [
        ["0-3", "node0", "cpu", "0-1", "0", "0", "0-1"],
        ["4-7", "node1", "cpu", "0-1", "1", "0", "0-1"],
    ]


def _gather() -> list[int]:
    class Group:
        def rank(self) -> int:
            return dist.get_rank() * 10

    class Groups:
        tp = pp = cp = dp = Group()

    return [place.tp for place in gather_places(Place.of_this_rank(Groups(), "cpu"))]


def test_every_rank_knows_every_place() -> None:
    assert run_on_ranks(2, _gather) == [[0, 10]] * 2


def _check(folders: list[Path]) -> str:
    try:
        check_shared(folders[dist.get_rank()])
    except UserError as error:
        return str(error)
    return "shared"


def test_a_folder_that_nodes_do_not_share_is_told_before_the_first_save(tmp_path: Path) -> None:
    own = [tmp_path / "a", tmp_path / "b"]
    for folder in own:
        folder.mkdir()
    assert run_on_ranks(2, _check, [tmp_path, tmp_path]) == ["shared", "shared"]
    first, second = run_on_ranks(2, _check, own)
    assert first == "shared"
    assert f"--save {own[1]} on" in second
    assert "is not the folder of rank 0; a checkpoint is written by all nodes into one folder" in second
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def _find(names: list[str | None]) -> str:
    try:
        check_all_find("--load runs/a", names[dist.get_rank()])
    except UserError as error:
        return str(error)
    return "agreed"


def test_a_checkpoint_that_not_all_hosts_see_is_told_before_it_is_loaded() -> None:
    assert run_on_ranks(2, _find, ["iter_0000004"] * 2) == ["agreed"] * 2
    assert run_on_ranks(2, _find, [None, None]) == ["agreed"] * 2
    host = socket.gethostname()
    assert run_on_ranks(2, _find, ["iter_0000004", None]) == [
        "agreed",
        f"--load runs/a holds no checkpoint on {host}, and iter_0000004 on {host}, the host of rank 0; pass a folder "
        "that all nodes share",
    ]
