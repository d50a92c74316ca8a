"""The command line of the doctor: ``python -m megatron_exo.doctor [--json]``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from megatron_exo.doctor.backends import Choice, choose_backends
from megatron_exo.doctor.inspector import Inspector
from megatron_exo.doctor.probes import Finding, examine


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align the columns of ``rows``; the last one is left as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    padded = ([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]] for row in rows)
    return "\n".join("  ".join(cells) for cells in padded)


def format_report(findings: Sequence[Finding], backends: Sequence[Choice]) -> str:
    """The findings, the backends, the remedies (those that training waits for first), and the verdict."""
    sections = [format_table([("PART", "STATUS", "DETAIL"), *((f.part, f.status, f.detail) for f in findings)])]
    if backends:
        choices = ((choice.part, choice.backend, choice.reason) for choice in backends)
        sections.append(format_table([("BACKEND OF", "IS", "BECAUSE"), *choices]))
    for title, prevents in (("BEFORE TRAINING", True), ("OPTIONAL", False)):
        remedies = [f"- {f.part}: {f.remedy}" for f in findings if f.remedy and f.prevents_training is prevents]
        if remedies:
            sections.append("\n".join([title, *remedies]))
    obstacles = ", ".join(finding.part for finding in findings if finding.prevents_training)
    sections.append(f"To be put right before training: {obstacles}." if obstacles else "Training can work here.")
    return "\n\n".join(sections)


def main(argv: Sequence[str] | None = None, inspector: Inspector | None = None) -> int:
    """Print the report; return the exit status, 0 when training can work here and 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_exo.doctor", description="What works on this machine, and why."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args(argv)
    inspector = inspector or Inspector()
    findings = examine(inspector)
    backends = choose_backends(inspector, findings)
    can_train = not any(finding.prevents_training for finding in findings)
    if arguments.json:
        report = {
            "can_train": can_train,
            "findings": [dataclasses.asdict(finding) for finding in findings],
            "backends": [dataclasses.asdict(choice) for choice in backends],
        }
        print(json.dumps(report, indent=2))
    else:
        print(format_report(findings, backends))
    return 0 if can_train else 1


if __name__ == "__main__":
    sys.exit(main())
