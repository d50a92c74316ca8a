"""Valid files of every kind, made once by the project's own writers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_exo.fuzzing.samples import make_samples


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers")
    pytest.importorskip("pyarrow")
    pytest.importorskip("zstandard")
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("samples")
    make_samples(folder)
    return folder
