"""Package metadata lives in pyproject.toml; this file only decides what to compile."""

from setuptools import setup

setup()
