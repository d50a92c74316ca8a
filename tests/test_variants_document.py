"""The table of variants in the documentation is the registry's."""

from __future__ import annotations

from pathlib import Path

from megatron_exo.variants import VARIANTS, markdown_table

DOCUMENT = Path(__file__).parent.parent / "docs" / "variants.md"


def test_the_documented_table_is_current() -> None:
    assert markdown_table() in DOCUMENT.read_text(), "run python -m megatron_exo.variants and paste its output"


def test_every_row_names_gate_and_anchor() -> None:
    rows = markdown_table().splitlines()[2:]
    assert len(rows) == len(VARIANTS)
    for row, variant in zip(rows, VARIANTS.values(), strict=True):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1] == variant.exo.gate
        assert variant.exo.anchor in cells[2] or variant.exo.control in cells[2]
