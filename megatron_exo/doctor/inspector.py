"""Questions about an installed environment that are answered without importing what is asked about.

Packages are examined through their metadata and their files; where only an import can tell whether something works, it
happens in a subprocess, because a broken installation of one package can take the importing process down with it.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

IMPORT_TIMEOUT_S = 180


@dataclass(frozen=True)
class Torch:
    """What torch says about itself and its devices; ``error`` is the reason when it cannot be imported."""

    version: str = ""
    cuda: str | None = None
    devices: tuple[str, ...] = ()
    error: str = ""


class Inspector:
    """The questions that probes may ask about an environment.

    Args:
        path: directories to look for packages in, in the place of this interpreter's own.
        environ: environment variables, in the place of this process's own.
    """

    def __init__(self, path: Sequence[Path] | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self.path = None if path is None else [str(entry) for entry in path]
        self.environ = environ

    def version(self, distribution: str) -> str | None:
        """The installed version of a distribution, or ``None``."""
        path = sys.path if self.path is None else self.path
        for found in importlib.metadata.Distribution.discover(name=distribution, path=path):
            return found.metadata["Version"] or "unknown version"
        return None

    def find(self, module: str) -> importlib.machinery.ModuleSpec | None:
        """Where a dotted module would be imported from; unlike ``find_spec`` this does not import its parents."""
        top, *rest = module.split(".")
        if self.path is None:
            spec = importlib.util.find_spec(top)
        else:
            spec = importlib.machinery.PathFinder.find_spec(top, self.path)
        for name in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
        return spec

    def which(self, program: str) -> str | None:
        """The path of a program on PATH, or ``None``."""
        return shutil.which(program, path=self.environ.get("PATH", ""))

    def run(self, code: str) -> tuple[str, str]:
        """Run Python ``code`` in a subprocess; return its output and one line of error (empty on success)."""
        environ = dict(self.environ)
        if self.path is not None:
            environ["PYTHONPATH"] = os.pathsep.join(self.path)
        command = [sys.executable, "-W", "ignore", "-c", code]
        try:
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "", f"no answer within {IMPORT_TIMEOUT_S} s"
        if done.returncode == 0:
            return done.stdout, ""
        lines = done.stderr.strip().splitlines() or [f"the process ended with status {done.returncode}"]
        return done.stdout, textwrap.shorten(lines[-1], 160)

    @functools.cached_property
    def torch(self) -> Torch:
        """What torch in this environment reports."""
        output, error = self.run(
            "import json, torch; c = torch.cuda; n = c.device_count() if c.is_available() else 0\n"
            "print(json.dumps([torch.__version__, torch.version.cuda, [c.get_device_name(i) for i in range(n)]]))"
        )
        if error:
            return Torch(error=error)
        version, cuda, devices = json.loads(output.splitlines()[-1])
        return Torch(version, cuda, tuple(devices))

    @property
    def on_gpu(self) -> bool:
        """Whether training would use CUDA devices, by the same rule as :func:`megatron_exo.platform.is_gpu`."""
        return bool(self.torch.devices) and self.environ.get("MEGATRON_EXO_DEVICE") != "cpu"


def in_range(version: str, bounds: str) -> bool:
    """Whether a release such as ``2.14.1+cu130`` lies in bounds such as ``>=2.14,<2.15``; suffixes do not count."""

    def release(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", text.split("+")[0])[:3])

    low, high = (release(bound) for bound in bounds.split(","))
    return low <= release(version) < high
