"""Importing this makes a process ready for its first program."""

from tests.fuzz import preload

preload.warm()
