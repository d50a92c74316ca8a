"""Options of Megatron with which code could come in unseen are refused in one line."""

from __future__ import annotations

import sys

import pytest

from megatron_exo import startup
from megatron_exo.errors import UserError
from tests.programs import MOCK_DATA, MODEL, RUN


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--trust-remote-code", "would run code that comes with a tokenizer; leave it out"),
        ("--non-persistent-ckpt-type global", "such checkpoints would be loaded unchecked; leave it out"),
        ("--use-checkpoint-args", "reads the checkpoint before it has been checked"),
    ],
)
def test_an_option_that_goes_around_the_checks_is_refused(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_EXO_DEVICE", "cpu")
    monkeypatch.setattr(sys, "argv", ["pretrain", *f"{MODEL} {RUN} {MOCK_DATA}".split()])
    startup.preview()
    sys.argv += words.split()
    with pytest.raises(UserError, match=f"^{words.split()[0]}.*{message}") as refusal:
        startup.preview()
    assert "\n" not in str(refusal.value)
