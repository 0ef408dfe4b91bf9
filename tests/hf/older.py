"""What families lack with older releases of transformers than the one that they are written for."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping

_NO_SDPA = "transformers 4 has no SDPA implementation of {}"
_FAILS = "transformers 4 itself fails: {}"
_LONG_MASK = _FAILS.format("in a traced graph, BART's eager decoder makes its mask one key too long for a new cache")

#: family -> implementation, scenario, or both as "implementation scenario" -> why it is absent with transformers 4
TRANSFORMERS_4: Mapping[str, Mapping[str, str]] = {
    "t5": {"sdpa": _NO_SDPA.format("T5")},
    "swin": {"sdpa": _NO_SDPA.format("Swin")},
    "bart": {
        f"eager {scenario}": _LONG_MASK
        for scenario in ("no_mask", "padded", "no_cache", "dynamic", "output_attentions")
    },
    "bloom": {"static_decode": _FAILS.format("Bloom's ALiBi is as long as the tokens, not as the cache")},
    "mpt": {"static_decode": _FAILS.format("MPT's ALiBi is as long as the tokens, not as the cache")},
    "deepseek_v3": {"static_decode": _FAILS.format("its cache is as wide for values as for keys, which are wider")},
}


def why_absent(family: str, scenario: str, impl: str) -> str | None:
    """Why the installed transformers does not have the case, or None if it has, or there is no transformers."""
    if major() != 4:
        return None
    absent = TRANSFORMERS_4.get(family, {})
    return absent.get(impl) or absent.get(scenario) or absent.get(f"{impl} {scenario}")


@functools.cache
def major() -> int | None:
    """Of the installed transformers; None if there is none."""
    try:
        return int(importlib.metadata.version("transformers").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return None
