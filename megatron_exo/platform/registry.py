"""Patches as data: a dotted target, a replacement made from the original, and the reason."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

_INHERITED = object()


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
    """Where it is needed: where models live on CPUs; where no FusedAdam can be used, which is on every CPU, and on
    GPUs without Transformer Engine and Apex; everywhere."""

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
    _undo: list[Callable[[], object]] = field(default_factory=list)

    def set_default_environ(self, name: str, value: str) -> None:
        """Set an environment variable until :meth:`restore`, unless the user has set it."""
        if name not in os.environ:
            os.environ[name] = value
            self._undo.append(lambda: os.environ.pop(name, None))

    def apply(self, patches: Iterable[Patch]) -> None:
        """Apply ``patches``; on any failure everything done so far is restored and the error re-raised."""
        try:
            for patch in patches:
                owner, name = patch.owner_and_name()
                original = getattr(owner, name)  # raises AttributeError when upstream has renamed the target
                replacement = patch.replace(original)
                self._undo.append(_restoring(owner, name))
                setattr(owner, name, replacement)
                self.applied.append(patch)
        except Exception:
            self.restore()
            raise

    def restore(self) -> None:
        """Take everything back, the last change first."""
        while self._undo:
            self._undo.pop()()
        self.applied.clear()


def _restoring(owner: Any, name: str) -> Callable[[], object]:
    """A function that gives ``owner`` back what it holds under ``name`` now.

    A class may hold less than what ``getattr`` finds: a patch shadows an inherited attribute, and deleting the shadow
    uncovers it.
    """
    held = vars(owner).get(name, _INHERITED) if isinstance(owner, type) else getattr(owner, name)
    return (lambda: delattr(owner, name)) if held is _INHERITED else (lambda: setattr(owner, name, held))
