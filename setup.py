"""For tools that still call setup.py; everything stands in pyproject.toml."""

from setuptools import setup

setup()
