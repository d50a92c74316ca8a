"""English prose paragraphs out of documentation markup, docstrings and comments, by measured rules."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Iterator

MIN_WORDS = 6
MIN_WORDS_FROM_LOWER_CASE = 12
MAX_CHARACTERS = 6000
_LONGEST_MARKUP = 4 * MAX_CHARACTERS
"""Characters with markup; to look for its ends takes time that grows with the square of the length."""

_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        a an and are as at be been but by can do does for from has have if in into is it its may must no not of on or
        should so than that the their then there these they this to used uses was we were when where which will with
        would you your
        """,
    )
)
_MIN_STOP_WORD_SHARE = 0.2
_MIN_LETTER_SHARE = 0.92  # of all characters, spaces and sentence punctuation counted as letters
_MAX_CODE_SHARE = 0.02  # characters that prose hardly uses
_MEAN_WORD_LENGTH = (3.2, 8.0)
_MAX_WORD_LENGTH = 45

_WORD = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*")
_CODE_CHARACTERS = re.compile(r"[{}\[\]<>=|\\~^@#$%&*+]")
_PUNCTUATION = frozenset(" .,;:!?'\"’“”()-–—")
_ENDINGS = (".", "!", "?", ":", ")", '"', "'", "”", "’")
_BOILERPLATE = re.compile(
    r"copyright|all rights reserved|licen[sc]ed? (?:under|agreement)|as[- ]is\b|without warrant|redistribut|"
    r"permission (?:is|notice)|warrant(?:y|ies) of|hereby granted|apache\.org|"
    r"(?:this file|code) is (?:part of|generated)|do not edit|auto-?generated",
    re.IGNORECASE,
)

_MARKUP = (
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), ""),  # Markdown image
    (re.compile(r"\[([^\]]+)\]\([^)\s]*\)"), r"\1"),  # Markdown link
    (re.compile(r":[\w:.+-]+:`~?([^`<]+?)(?:\s*<[^`>]*>)?`"), r"\1"),  # reStructuredText role
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`__?"), r"\1"),  # reStructuredText link
    (re.compile(r"``([^`]+)``|`([^`]+)`_{0,2}"), lambda match: match[1] or match[2]),  # literal
    (re.compile(r"(\*\*|\*)(?=\S)(.+?)(?<=\S)\1(?!\w)"), r"\2"),  # emphasis
    (re.compile(r"</?[A-Za-z][^<>]*>"), ""),  # HTML tag
    (re.compile(r"\s+"), " "),
)
_BULLET = re.compile(r"(?:[-*+•]|\(?\d{1,2}[.)])\s+")
_SKIPPED_LINE = re.compile(r">>>|#|\.\.(?:\s|$)|:[\w -]+:(?:\s|$)|\||([^\w\s])\1{2,}")
_FENCE = re.compile(r"(?:```|~~~)")


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a text that are English prose, each reflowed into one line, without inline markup."""
    for block in _blocks(text):
        paragraph = " ".join(block)
        if len(paragraph) > _LONGEST_MARKUP:
            continue
        for pattern, replacement in _MARKUP:
            paragraph = pattern.sub(replacement, paragraph)
        paragraph = paragraph.strip()
        if is_prose(paragraph):
            yield paragraph


def _blocks(text: str) -> Iterator[list[str]]:
    """Runs of neighbouring lines with one indentation; a list item runs on with the indentation of its text."""
    block: list[str] = []
    indentation = -1
    fenced = False
    for line in text.expandtabs().splitlines():
        content = line.strip()
        if _FENCE.match(content):
            fenced = not fenced
            content = ""
        if fenced or not content or _SKIPPED_LINE.match(content):
            if block:
                yield block
            block, indentation = [], -1
            continue
        column = len(line) - len(line.lstrip())
        bullet = _BULLET.match(content)
        if bullet:
            column += bullet.end()
            content = content[bullet.end() :]
        if block and (bullet or column != indentation):
            yield block
            block = []
        block.append(content)
        indentation = column
    if block:
        yield block


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph reads as whole English sentences rather than code, a table, a heading or a licence."""
    if len(paragraph) > MAX_CHARACTERS or not paragraph.endswith(_ENDINGS):
        return False
    words = _WORD.findall(paragraph)
    capital = paragraph.lstrip("\"'“‘(")[:1].isupper()
    if len(words) < (MIN_WORDS if capital else MIN_WORDS_FROM_LOWER_CASE):
        return False
    if not _MEAN_WORD_LENGTH[0] <= sum(map(len, words)) / len(words) <= _MEAN_WORD_LENGTH[1]:
        return False
    if max(map(len, paragraph.split())) > _MAX_WORD_LENGTH:
        return False
    if sum(word.lower() in _STOP_WORDS for word in words) < _MIN_STOP_WORD_SHARE * len(words):
        return False
    if len(_CODE_CHARACTERS.findall(paragraph)) > _MAX_CODE_SHARE * len(paragraph):
        return False
    lettery = sum(character.isalpha() or character in _PUNCTUATION for character in paragraph)
    return lettery >= _MIN_LETTER_SHARE * len(paragraph) and not _BOILERPLATE.search(paragraph)


_LEXEME = re.compile(
    r"""
    (?P<comment>\#[^\n]*)
    | (?P<block>[rRuU]?(?:
        \"{3}[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*\"{3}
        | '{3}[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'{3}))
    | "[^"\\\n]*(?:\\.[^"\\\n]*)*"
    | '[^'\\\n]*(?:\\.[^'\\\n]*)*'
    """,
    re.VERBOSE | re.DOTALL,
)
"""Comments, triple-quoted and other strings: enough to know that a ``#`` in a string is no comment."""


def python_prose(source: str) -> Iterator[str]:
    """The docstrings and blocks of whole-line comments of Python source code, as texts, in their order.

    Any triple-quoted string that begins a line counts as a docstring. The source is read as text, so it may be of
    another version of Python, or broken; it is never run.
    """
    comment: list[str] = []
    comment_end = 0
    for lexeme in _LEXEME.finditer(source):
        if lexeme.lastgroup is None or source[source.rfind("\n", 0, lexeme.start()) + 1 : lexeme.start()].strip():
            continue
        if comment and source[comment_end : lexeme.start()].strip(" \t") != "\n":
            yield "\n".join(comment)
            comment = []
        if lexeme.lastgroup == "comment":
            comment.append(lexeme[0].lstrip("#!:").removeprefix(" "))
            comment_end = lexeme.end()
        else:
            yield _string_value(lexeme[0])
    if comment:
        yield "\n".join(comment)


def _string_value(literal: str) -> str:
    """The value of a triple-quoted string, its common indentation removed; empty if it is not valid."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the escapes of other people's strings
            value = ast.literal_eval(literal)
    except (SyntaxError, ValueError):
        return ""
    return inspect.cleandoc(value)
