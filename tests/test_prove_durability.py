"""The program that proves the page on durability runs what the page names, and no failure looks like success."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_exo.errors import UserError
from tools.prove_durability import (
    PAGE,
    PARTS,
    ROOT,
    Part,
    named_tests,
    records,
    renewed,
    run,
    table,
    told_files,
    told_kills,
    told_tests,
)


def test_every_test_that_the_page_names_is_there() -> None:
    names = named_tests(PAGE.read_text())
    assert len(names) > 10
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_page_has_room_for_what_is_counted_and_keeps_everything_else() -> None:
    page = PAGE.read_text()
    new = renewed(page, "| 30 kills |")
    assert "| 30 kills |" in new
    assert renewed(new, "| 31 kills |") == new.replace("30 kills", "31 kills")
    with pytest.raises(UserError, match="the page lacks the lines"):
        renewed("# A page", "counts")


KILL = {"rank": 1, "iteration": 7, "during_save": True, "newest_complete": 6, "seconds_to_end": 3.5, "trouble": ""}


def test_a_record_tells_what_failed(tmp_path: Path) -> None:
    record = tmp_path / "record"
    record.write_text(json.dumps([KILL, KILL | {"during_save": False, "seconds_to_end": 9.0}]))
    told = "2 kills, 1 of them in a save; other ranks ended after at most 9.0 s; lost: nothing"
    assert told_kills(record) == (told, True)
    record.write_text(json.dumps([KILL | {"trouble": "the tracker names a damaged checkpoint"}]))
    assert told_kills(record)[0].endswith("lost: the tracker names a damaged checkpoint")
    assert not told_kills(record)[1]
    kinds = {"idx": {"counts": {"read": 5, "refused": 1995}, "failures": []}}
    record.write_text(json.dumps(kinds))
    assert told_files(record) == ("2,000 damaged files of 1 kinds, 0 of them not read or refused", True)
    kinds["idx"]["failures"] = [[3, "crash", "signal 11"]]
    record.write_text(json.dumps(kinds))
    assert told_files(record) == ("2,000 damaged files of 1 kinds, 1 of them not read or refused", False)
    for failures, errors, held in ((0, 0, True), (1, 0, False), (0, 2, False)):
        record.write_text(
            f'<testsuites><testsuite tests="9" skipped="2" failures="{failures}" errors="{errors}"/></testsuites>'
        )
        told, is_held = told_tests(record)
        assert told == f"{7 - failures - errors} passed, 2 skipped, {failures + errors} failed"
        assert is_held == held


def _told(record: Path) -> tuple[str, bool]:
    return record.read_text(), True


def test_a_part_whose_program_fails_does_not_hold(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    for source, told, held in (
        ("raise SystemExit(3)", "ended with status 3 and without a record", False),
        ("import sys; open(sys.argv[1], 'w').write('2 kills'); raise SystemExit(1)", "2 kills", False),
        ("import sys; open(sys.argv[1], 'w').write('3 kills')", "3 kills", True),
    ):
        program.write_text(source)
        run("kills", Part(f"{program} {{record}}", _told), False, tmp_path)
        (result,) = records(tmp_path).values()
        assert (result["told"], result["held"]) == (told, held)
        assert f"| {told} |" in table(records(tmp_path))


def test_every_part_can_be_had_in_short() -> None:
    assert all(part.command(quick=True) != part.command(quick=False) for part in PARTS.values())
