"""What families lack with older releases of transformers than the one that they are written for."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping

_NO_SDPA = "transformers 4 has no SDPA implementation of {}"

#: family -> implementation, scenario, or both as "implementation scenario" -> why it is absent with transformers 4
TRANSFORMERS_4: Mapping[str, Mapping[str, str]] = {
    "t5": {"sdpa": _NO_SDPA.format("T5")},
    "swin": {"sdpa": _NO_SDPA.format("Swin")},
}


def why_absent(family: str, scenario: str, impl: str) -> str | None:
    """Why the installed transformers does not have the case, or None if it has, or there is no transformers."""
    if _major() != 4:
        return None
    absent = TRANSFORMERS_4.get(family, {})
    return absent.get(impl) or absent.get(scenario) or absent.get(f"{impl} {scenario}")


@functools.cache
def _major() -> int | None:
    try:
        return int(importlib.metadata.version("transformers").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return None
