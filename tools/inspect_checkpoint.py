#!/usr/bin/env python
"""Show what a checkpoint is, check its files, or compare it with another one.

  python tools/inspect_checkpoint.py runs/a                        # the one that the run would go on from, and a list
  python tools/inspect_checkpoint.py runs/a/iter_0002000 --verify
  python tools/inspect_checkpoint.py runs/a/iter_0002000 --diff runs/b/iter_0002000

Needs no GPU and no process group, and memory for two tensors; the files are read as data. Exit status: 1 if something
is damaged, with one line for each damage, and with --diff if tensors differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from megatron_exo import platform
from megatron_exo.errors import one_line_errors


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a run's folder, or an iter_N in it")
    parser.add_argument("--verify", action="store_true", help="compare all files with their checksums")
    parser.add_argument("--diff", type=Path, metavar="OTHER", help="another one, to compare settings and tensors with")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    with one_line_errors():
        platform.activate()
        return _diff(args) if args.diff is not None else _show(args)


def _show(args: argparse.Namespace) -> int:
    from megatron_exo.checkpoints import inspection

    folder = inspection.checkpoint_at(args.folder)
    damages = inspection.damages(folder, checksums=args.verify)
    result: dict[str, Any] = {"folder": str(folder), "damages": damages}
    if folder != args.folder:
        result["run"] = inspection.describe_run(args.folder, checksums=False)
    if not damages:
        result["description"] = inspection.read_description(folder)
    if args.json:
        print(json.dumps(result, indent=1))
        return 1 if damages else 0
    if not damages:
        print(inspection.format_description(folder, result["description"]))
        print(f"{'whole':<12}{'sizes and checksums' if args.verify else 'sizes'} agree")
    for step, found in result.get("run", {}).items():
        print(f"{'in the run':<12}iteration {step}: {'; '.join(found) or 'whole'}")
    for damage in damages:
        print(f"damage: {damage}", file=sys.stderr)
    return 1 if damages else 0


def _diff(args: argparse.Namespace) -> int:
    from megatron_exo.checkpoints import inspection

    folders = [inspection.checkpoint_at(path) for path in (args.folder, args.diff)]
    damages = [damage for folder in folders for damage in inspection.damages(folder, checksums=args.verify)]
    for damage in damages:
        print(f"damage: {damage}", file=sys.stderr)
    if damages:
        return 1
    difference = inspection.compare(*folders)
    if args.json:
        print(json.dumps(dataclasses.asdict(difference), indent=1))
    else:
        print(inspection.format_difference(difference))
    return 1 if difference.tensors_differ() else 0


if __name__ == "__main__":
    sys.exit(main())
