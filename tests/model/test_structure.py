"""Boundaries between files that a reader may rely on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "megatron_exo"


def _imports(path: Path) -> set[str]:
    """Every dotted module and every imported name of a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(
    "name", ["layer", "attention", "anchors", "mixing", "projections", "wire", "norm", "core_attention"]
)
def test_layers_attention_and_anchors_know_nothing_of_the_model_around_them(name: str) -> None:
    for imported in _imports(PACKAGE / "model" / f"{name}.py"):
        assert "models.gpt" not in imported
        assert not imported.startswith(("megatron_exo.model.gpt", "megatron_exo.builder", "megatron.training"))


@pytest.mark.parametrize("name", ["config", "variants", "accounting", "plan", "errors"])
def test_what_describes_a_variant_does_not_import_torch(name: str) -> None:
    assert not any(imported.split(".")[0] in ("torch", "megatron") for imported in _imports(PACKAGE / f"{name}.py"))


def test_no_file_of_the_model_is_longer_than_three_hundred_lines() -> None:
    for path in (PACKAGE / "model").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 300, path.name
