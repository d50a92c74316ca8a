"""Patches are applied in order, and taken back without a trace."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest

from megatron_exo.platform.registry import Patch, PatchRegistry


class Base:
    def inherited(self) -> str:
        return "inherited"

    @staticmethod
    def static() -> str:
        return "static"


class Derived(Base):
    pass


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package to be patched."""
    module: Any = ModuleType("upstream")
    module.value, module.other, module.Base, module.Derived = 1, [2], Base, Derived
    monkeypatch.setitem(sys.modules, "upstream", module)
    return module


def _set(target: str, value: Any) -> Patch:
    return Patch(f"upstream:{target}", lambda original: value, "a test")


def test_a_patch_is_made_from_the_original(upstream: Any) -> None:
    registry = PatchRegistry()
    registry.apply([Patch("upstream:value", lambda original: original + 10, "a test")] * 2)
    assert upstream.value == 21
    registry.restore()
    assert upstream.value == 1


def test_restoring_gives_back_the_identical_objects(upstream: Any) -> None:
    before, static = dict(vars(upstream)), vars(Base)["static"]
    registry = PatchRegistry()
    registry.apply([_set("other", None), _set("Base.static", lambda: "patched"), _set("other", 5)])
    assert (upstream.other, Base.static()) == (5, "patched")
    registry.restore()
    assert all(vars(upstream)[name] is value for name, value in before.items())
    assert vars(Base)["static"] is static
    assert registry.applied == []


def test_a_patched_inherited_method_is_inherited_again_after_restoring(upstream: Any) -> None:
    registry = PatchRegistry()
    registry.apply([_set("Derived.inherited", lambda self: "patched")])
    assert (Derived().inherited(), Base().inherited()) == ("patched", "inherited")
    registry.restore()
    assert "inherited" not in vars(Derived)
    assert Derived().inherited() == "inherited"


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        (Patch("upstream:renamed", lambda original: 0, "a test"), AttributeError),
        (Patch("upstream:Gone.method", lambda original: 0, "a test"), AttributeError),
        (Patch("no_such_package:value", lambda original: 0, "a test"), ModuleNotFoundError),
        (Patch("upstream:other", lambda original: original["key"], "a test"), TypeError),
    ],
    ids=lambda value: value.target if isinstance(value, Patch) else "",
)
def test_a_patch_that_fails_takes_the_ones_before_it_back(
    upstream: Any, failing: Patch, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EXO_TEST", raising=False)
    other = upstream.other
    registry = PatchRegistry()
    registry.set_default_environ("EXO_TEST", "1")
    with pytest.raises(error):
        registry.apply([_set("value", 7), failing])
    assert upstream.value == 1
    assert upstream.other is other
    assert registry.applied == []
    assert "EXO_TEST" not in os.environ


def test_an_environment_variable_of_the_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXO_TEST", "theirs")
    registry = PatchRegistry()
    registry.set_default_environ("EXO_TEST", "ours")
    assert os.environ["EXO_TEST"] == "theirs"
    registry.restore()
    assert os.environ["EXO_TEST"] == "theirs"
