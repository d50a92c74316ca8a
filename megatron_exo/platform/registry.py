"""Patches as data: a dotted target, a replacement made from the original, and the reason."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """One attribute of another package that is replaced while the platform is active.

    To add one: write the replacement beside its kind (device, optimizer, ...), add a line to
    :data:`megatron_exo.platform.patches.PATCHES`, and say in ``reason`` what fails without it; the tests check
    that every target exists in the installed versions.
    """

    target: str
    """``package.module:attribute`` or ``package.module:Class.attribute``."""
    replace: Callable[[Any], Any]
    """Receives the original and returns what takes its place."""
    reason: str
    when: Literal["cpu", "without-fused-adam", "always"] = "cpu"
    """Where it is needed: without CUDA; where neither Transformer Engine nor Apex brings FusedAdam; everywhere."""

    def owner_and_name(self) -> tuple[Any, str]:
        """Import the target's module and return the object that holds the attribute, and its name."""
        module_name, _, path = self.target.partition(":")
        owner: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name


@dataclass
class PatchRegistry:
    """Applies patches in order and takes them back in reverse order."""

    applied: list[Patch] = field(default_factory=list)
    _undo: list[tuple[Any, str, Any]] = field(default_factory=list)

    def apply(self, patches: Iterable[Patch]) -> None:
        """Apply ``patches``; on any failure everything applied so far is restored and the error re-raised."""
        try:
            for patch in patches:
                owner, name = patch.owner_and_name()
                original = getattr(owner, name)  # raises AttributeError when upstream has renamed the target
                # An inherited attribute is shadowed, and uncovered again by deleting the shadow.
                self._undo.append((owner, name, vars(owner).get(name, _MISSING)))
                setattr(owner, name, patch.replace(original))
                self.applied.append(patch)
        except Exception:
            self.restore()
            raise

    def restore(self) -> None:
        while self._undo:
            owner, name, original = self._undo.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self.applied.clear()
