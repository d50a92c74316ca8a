"""The platform, active for the tests of one module."""

from collections.abc import Iterator

import pytest

from megatron_exo import platform


@pytest.fixture(scope="module")
def active_platform() -> Iterator[None]:
    platform.activate()
    yield
    platform.deactivate()
