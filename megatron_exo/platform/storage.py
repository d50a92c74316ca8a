"""What goes wrong on disks, told as it was. Used only through :mod:`megatron_exo.platform.patches`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def raise_storage_errors(original: Callable[..., Any]) -> Any:
    """Wrap ``FileSystemWriterAsync.write_preloaded_data``: raise the operating system's error.

    The original returns what torch's writer makes of a write that failed ("unexpected pos 704 vs 598"), and its caller
    passes on the type of that alone.
    """

    @functools.wraps(original)
    def write(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        error = answer[1] if isinstance(answer[1], BaseException) else None
        while error is not None and not isinstance(error, OSError):
            error = error.__cause__ or error.__context__
        if error is not None and kwargs.get("results_queue") is None:  # else it is a thread, whose error nobody sees
            raise error
        return answer

    return staticmethod(write)
