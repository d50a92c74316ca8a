"""The tables of sizes in the documentation are what the code gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_exo.presets import PRESETS
from megatron_exo.presets.document import renewed
from megatron_exo.variants import VARIANTS

DOCUMENT = Path(__file__).parent.parent / "docs" / "sizes.md"


def test_the_documented_tables_are_current() -> None:
    text = DOCUMENT.read_text()
    assert renewed(text) == text, "run python -m megatron_exo.presets.document docs/sizes.md"


def test_every_size_has_a_row_for_every_variant() -> None:
    *_, counts = DOCUMENT.read_text().partition("## Counts")
    for preset in PRESETS:
        section = counts.split(f"### {preset}\n")[1].split("###")[0]
        named = [row.split("|")[1].strip(" `") for row in section.splitlines() if row.startswith("| `")]
        assert sorted(named) == sorted(VARIANTS)


def test_what_is_written_by_hand_is_kept() -> None:
    written = DOCUMENT.read_text().partition("<!--")[0]
    assert renewed(DOCUMENT.read_text().replace("| 28 |", "| 99 |")).startswith(written)


def test_a_document_without_the_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="has no line <!--"):
        renewed("# Sizes")
