"""Entry point for setuptools; the metadata, the requirements and the extras are in pyproject.toml."""

from setuptools import setup

setup()
