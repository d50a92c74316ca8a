"""Transformer Engine's Python wheel (1.2 MB), unpacked beside the environment: inside, it would break the CPU path."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

REQUIREMENT = "transformer_engine==2.20.2"
FOLDER_VARIABLE = "MEGATRON_EXO_TEST_TE"
"""Environment variable naming a folder the wheel has been unpacked into, for machines that reach no registry."""


def unpacked_wheel(cache: Path) -> Path:
    """The folder to put on PYTHONPATH; fetched with pip once, then kept in ``cache``.

    Skips the test, with pip's own words, where pip cannot get the wheel.
    """
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    folder = cache / REQUIREMENT
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            target = Path(scratch, "packages")
            options = ["--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:", "--retries", "1"]
            pip = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), REQUIREMENT]
            done = subprocess.run(pip, capture_output=True, text=True)
            if done.returncode:
                why = done.stderr.strip().splitlines()[-1]
                pytest.skip(
                    f"pip cannot get {REQUIREMENT} ({why}); or unpack it and name the folder in {FOLDER_VARIABLE}"
                )
            target.rename(folder)  # complete or not at all
    return folder
