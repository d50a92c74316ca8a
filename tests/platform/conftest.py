"""The platform as it is on a machine without a GPU, on any machine, and inactive again after every test."""

from collections.abc import Iterator

import pytest

from megatron_exo import platform


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MEGATRON_EXO_DEVICE", "cpu")
    yield
    platform.deactivate()


@pytest.fixture
def active_platform(on_cpu: None) -> None:
    platform.activate()
