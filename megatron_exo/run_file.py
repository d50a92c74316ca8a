"""A run as data: ``--run-file FILE``, TOML whose keys are options of the command line, of torchrun's or training's.

    preset = "1B"
    train-tokens = 50e9
    bf16 = true                             # a switch
    data-path = ["0.7", "data/a", "0.3", "data/b"]
    save = "runs/1B-{exo-variant}-{seed}"   # values of other options

What the command line gives beside the file wins. Nothing here imports torch: the launcher reads such files, too.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from argparse import Action
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron_exo.errors import UserError

OPTION = "--run-file"
"""Not ``--run``, which torchrun would take for one of its own, wherever it stands."""
_NOT_IN_FILES = (OPTION, "--dry-run", "--help")

LAUNCHER_OPTIONS = (
    "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-backend",
    "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--local-addr", "--max-restarts", "--monitor-interval",
    "--shutdown-timeout", "--signals-to-handle", "--log-dir", "--tee",
)  # fmt: skip
"""torchrun's; it takes underscores as well."""

START_TIMEOUT_S = 180.0
"""What ``--exo-start-timeout`` is by default, which the launcher reads as well as the ranks."""

DATA_OPTIONS = ("--data-path", "--data-args-path", "--train-data-path", "--valid-data-path", "--test-data-path",
                "--per-split-data-args-path", "--mock-data")  # fmt: skip
LENGTH_OPTIONS = ("--train-tokens", "--train-iters", "--train-samples")
_ALTERNATIVES = (DATA_OPTIONS, LENGTH_OPTIONS)
"""Ways to say the same thing: one of them on the command line takes the place of all of them in the file."""

_LONGEST = 80
"""Characters of a file that a message repeats."""


class RunFileError(UserError):
    """A run file that cannot be read or means nothing: which key, why, what instead."""


def spelled(option: str) -> str:
    """An option of a command line as it is looked up here: with dashes, without its value."""
    return option.split("=")[0].replace("_", "-")


def named_by(words: Sequence[str]) -> Path | None:
    """The file that a command line names, the last one if there are several."""
    value = value_in(words, OPTION)
    return Path(value) if value is not None else None


def launcher_words(path: Path) -> list[str]:
    """torchrun's part of a run file, as words of its command line.

    Raises:
        RunFileError: the file cannot be read.
    """
    return [f"--{key}={value}" for key, value in _read(path).items() if f"--{key}" in LAUNCHER_OPTIONS]


def training_words(path: Path, actions: Iterable[Action], given: Sequence[str]) -> list[str]:
    """Training's part of a run file, as words to put before those of the command line.

    Args:
        path: of the file.
        actions: all that the parser of the command line knows.
        given: the command line beside the file.

    Raises:
        RunFileError: the file cannot be read, or has a key or a kind of value that the command line does not.
    """
    known = {spelled(option): action for action in actions for option in action.option_strings}
    content = _read(path)
    replaced = {spelled(word) for word in given if word.startswith("--")}
    replaced |= {option for options in _ALTERNATIVES if replaced & {*options} for option in options}
    words: list[str] = []
    for key, value in content.items():
        option = f"--{key}"
        if option in LAUNCHER_OPTIONS:
            continue
        if option not in known or option in _NOT_IN_FILES:
            possible = {*known, *LAUNCHER_OPTIONS} - {*_NOT_IN_FILES}
            near = [each[2:] for each in difflib.get_close_matches(option[:_LONGEST], possible, n=2)]
            hint = f"did you mean {' or '.join(near)}?" if near else "keys are options of the command line, see --help"
            raise RunFileError(f"{path}: unknown key {_short(repr(key))}; {hint}")
        if option in replaced:
            continue
        parts = value if isinstance(value, list) else [value]
        values = [_filled(part, path, content, known, given) for part in parts]
        words += _spelled_out(path, known[option], option, value, values)
    return words


def _read(path: Path) -> dict[str, Any]:
    """Keys with dashes → values."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        repr(content)  # a number in hexadecimal may have more digits than Python writes
    except OSError as error:
        raise RunFileError(
            f"--run-file {path} cannot be read: {error.strerror}; pass the path of a TOML file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RunFileError(f'--run-file {path} is not TOML: {_short(error)}; lines are like: preset = "1B"') from error
    for key, value in content.items():
        if isinstance(value, dict):
            name = _short(repr(key)[1:-1])
            raise RunFileError(
                f"{path}: [{name}] is a table; a run file has options of the command line only, no tables"
            )
        if any("\0" in part for part in (value if isinstance(value, list) else [value]) if isinstance(part, str)):
            raise RunFileError(f"{path}: {_short(key)} has a NUL, which no path or option can hold; remove it")
    return {key.replace("_", "-"): value for key, value in content.items()}


def _short(what: object) -> str:
    """For a message, which is one line."""
    text = str(what)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _spelled_out(path: Path, action: Action, option: str, value: object, values: list[str]) -> list[str]:
    """``values`` are those of ``value`` as text."""
    if (action.nargs == 0) != isinstance(value, bool):
        kind = "a switch, give it as true or false" if action.nargs == 0 else "not a switch, give it a value"
        raise RunFileError(f"{path}: {option[2:]} = {_short(repr(value))}: this is {kind}")
    if isinstance(value, bool):
        return [option] * value
    if isinstance(value, list):
        if action.nargs is None:
            raise RunFileError(f"{path}: {option[2:]} = {_short(repr(value))}: this takes one value, not a list")
        return [option, *values]
    return [f"{option}={values[0]}"]


def _filled(
    value: object, path: Path, content: Mapping[str, Any], known: Mapping[str, Action], given: Sequence[str]
) -> str:
    """The text of a value, with what the run has for each ``{option}`` in it."""

    def look_up(match: re.Match[str]) -> str:
        key = match[1].replace("_", "-")
        if f"--{key}" not in known:
            name = _short(match[1])
            raise RunFileError(f"{path}: {{{name}}} names no option; write for example {{exo-variant}} or {{seed}}")
        on_command_line = value_in(given, f"--{key}")
        return str(content.get(key, known[f"--{key}"].default) if on_command_line is None else on_command_line)

    return re.sub(r"\{([\w-]+)\}", look_up, value) if isinstance(value, str) else str(value)


def value_of(option: str, given: Sequence[str]) -> str | None:
    """What a command line says of an option, or else the run file that it names.

    Raises:
        RunFileError: the file cannot be read.
    """
    value, path = value_in(given, option), named_by(given)
    if value is None and path is not None and (found := _read(path).get(option.removeprefix("--"))) is not None:
        value = str(found)
    return value


def value_in(words: Sequence[str], option: str) -> str | None:
    """What the last ``--option VALUE`` or ``--option=VALUE`` says."""
    value = None
    for word, following in zip_longest(words, words[1:]):
        if word.startswith("--") and spelled(word) == option:
            value = word.split("=", 1)[1] if "=" in word else following
    return value
