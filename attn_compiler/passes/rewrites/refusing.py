"""The reason why a rewrite is not kept."""

from __future__ import annotations


class Unkeyed(Exception):
    """Something that a key does not show, or a record does not hold. Internal: the passes run, and the report has the text."""
