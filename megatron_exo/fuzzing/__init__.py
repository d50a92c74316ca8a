"""Damaged files of every kind that is read here, and what the readers make of them.

The library of ``tools/fuzz_readers.py``: :mod:`.samples` writes valid files, :mod:`.damage` and :mod:`.formats` damage
them, :mod:`.kinds` says which reader gets which, and :mod:`.process` reads them where it does no harm.
"""
