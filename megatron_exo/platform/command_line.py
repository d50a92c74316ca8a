"""The command line, which Megatron parses more than once. Used only through :mod:`megatron_exo.platform.patches`."""

from __future__ import annotations

import functools
from collections.abc import Callable

from megatron.training import get_args


def fault_tolerance_where_asked_for(original: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``ft_integration.setup``: look for its option in the arguments that there are.

    The original parses the command line again, by Megatron's parser alone: values that only this program allows are
    refused then, after everything has been checked, and a run file is not read.
    """

    @functools.wraps(original)
    def setup() -> None:
        try:
            is_asked_for = get_args().enable_ft_package
        except AssertionError:  # a program that lets Megatron parse its arguments
            is_asked_for = True
        if is_asked_for:
            original()

    return setup
