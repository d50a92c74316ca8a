#!/usr/bin/env python
"""Prove what docs/durability.md says: its tests, the campaigns of kills, and the damaged files, with their counts.

  python tools/prove_durability.py                                  # everything: hours, see the table of the page
  python tools/prove_durability.py --only kills async-kills --quick  # a few kills each
  python tools/prove_durability.py --document docs/durability.md    # ... and put the counts into the page

The tests are those that the page names. Each part shows its progress and leaves its record in --folder; the table at
the end has every part with a record there, with its date. The exit status is 0 if nothing failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_exo.errors import UserError, one_line_errors
from megatron_exo.files import replacing

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "durability.md"
_BEGIN, _END = "<!-- counted by tools/prove_durability.py -->", "<!-- end of what is counted -->"


@dataclass(frozen=True)
class Part:
    """One command and how its record becomes a sentence.

    Args:
        words: of the command, which is Python's; ``{record}`` is the file that it writes.
        quick: what is added to have less of it.
        environment: variables beside those there are.
    """

    words: str
    told: Callable[[Path], tuple[str, bool]]
    quick: str = ""
    environment: Mapping[str, str] | None = None

    def command(self, quick: bool) -> str:
        return f"{self.words} {self.quick}".strip() if quick else self.words


def named_tests(page: str) -> list[str]:
    """The files and folders of tests that a page names, in order."""
    return list(dict.fromkeys(re.findall(r"`(tests/[\w/]+(?:\.py|/))`", page)))


def told_tests(record: Path) -> tuple[str, bool]:
    suite = next(ET.parse(record).getroot().iter("testsuite")).attrib
    total, skipped, failed = (int(suite[name]) for name in ("tests", "skipped", "failures"))
    failed += int(suite["errors"])
    return f"{total - skipped - failed} passed, {skipped} skipped, {failed} failed", failed == 0


def told_kills(record: Path) -> tuple[str, bool]:
    kills = json.loads(record.read_text())
    trouble = [kill["trouble"] for kill in kills if kill["trouble"]]
    slowest = max(kill["seconds_to_end"] for kill in kills)
    return (
        f"{len(kills)} kills, {sum(kill['during_save'] for kill in kills)} of them in a save; other ranks ended after "
        f"at most {slowest} s; lost: {'; '.join(trouble) or 'nothing'}"
    ), not trouble


def told_files(record: Path) -> tuple[str, bool]:
    kinds: dict[str, Any] = json.loads(record.read_text())
    inputs = sum(sum(kind["counts"].values()) for kind in kinds.values())
    failures = sum(len(kind["failures"]) for kind in kinds.values())
    return f"{inputs:,} damaged files of {len(kinds)} kinds, {failures} of them not read or refused", failures == 0


_KILLS = "tools/crash_campaign.py --json {record}"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
PARTS: dict[str, Part] = {
    "tests": Part(
        "-m pytest -q -n 2 --dist loadfile --junitxml {record} {tests}", told_tests, "-m 'not slow'", _ONE_THREAD
    ),
    "kills": Part(f"{_KILLS} --seed 21", told_kills, "--kills 2"),
    "async-kills": Part(f"{_KILLS} --seed 22 --async-save", told_kills, "--kills 2"),
    "restarts": Part(f"{_KILLS} --seed 23 --max-restarts --async-save", told_kills, "--kills 2"),
    "muon-kills": Part(
        f"{_KILLS} --seed 24 --layout '--tensor-model-parallel-size 2 --optimizer muon'", told_kills, "--kills 2"
    ),
    "files": Part("tools/fuzz_readers.py --time-out 30 --json {record}", told_files, "--inputs 50"),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", choices=PARTS, default=list(PARTS), help="parts (default: all; none: the table alone)"
    )
    parser.add_argument("--quick", action="store_true", help="quick tests, 2 kills each, 50 files of each kind")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "durability", help="of the records (default: %(default)s)"
    )
    parser.add_argument("--document", type=Path, metavar="PAGE", help="put the counts between the marks of this page")
    return parser.parse_args(argv)


def run(name: str, part: Part, quick: bool, folder: Path) -> None:
    """Run a part, and leave what came of it in ``folder``: command, date, result, whether it held, and minutes."""
    written = folder / f"{name}.record"
    command = part.command(quick).replace("{tests}", " ".join(named_tests(PAGE.read_text())))
    print(f"== {name}: python {command}", flush=True)
    written.unlink(missing_ok=True)
    start = time.monotonic()
    words = shlex.split(command.replace("{record}", shlex.quote(str(written))))
    status = subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | (part.environment or {})).returncode
    told, held = part.told(written) if written.exists() else (f"ended with status {status} and without a record", False)
    record = {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "told": told,
        "held": held and status == 0,
        "minutes": round((time.monotonic() - start) / 60, 1),
    }
    with replacing(folder / f"{name}.json") as file:
        file.write(json.dumps(record, indent=1) + "\n")


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """What came of the parts, those of earlier calls included."""
    files = {name: folder / f"{name}.json" for name in PARTS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """What came of the parts, for a page."""
    lines = ["| part | command | result | minutes | date |", "| --- | --- | --- | ---: | --- |"]
    for name, result in results.items():
        command = result["command"].replace(" --json {record}", "")
        command = "pytest on every test named above" if name == "tests" else f"`python {command}`"
        lines.append(f"| {name} | {command} | {result['told']} | {result['minutes']} | {result['date']} |")
    return "\n".join([*lines, "", f"{os.cpu_count()} CPU cores, Python {platform.python_version()}."])


def renewed(page: str, counted: str) -> str:
    """A page with ``counted`` between its marks.

    Raises:
        UserError: it has no such marks.
    """
    if page.count(_BEGIN) != 1 or page.count(_END) != 1 or page.index(_BEGIN) > page.index(_END):
        raise UserError(f"the page lacks the lines {_BEGIN} and {_END}; put them where the counts belong")
    return f"{page[: page.index(_BEGIN)]}{_BEGIN}\n\n{counted}\n\n{page[page.index(_END) :]}"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    with one_line_errors():
        args.folder.mkdir(parents=True, exist_ok=True)
        for name in args.only:
            run(name, PARTS[name], args.quick, args.folder)
        results = records(args.folder)
        counted = table(results)
        print(counted)
        if args.document is not None:
            page = renewed(args.document.read_text(), counted)
            with replacing(args.document) as file:
                file.write(page)
    return 0 if all(result["held"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
