"""Releases of Triton that our kernels are known to work with, and launch options that replace a release's defaults. Imports no triton.

kernels/releases.py and kernels/releases_sm90.py hold the code that differs between releases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

Release = tuple[int, int]

#: A product and a sum are fused into one instruction, and rounded once. Triton's default until 3.9, which warns that 3.10 changes it.
FUSION: Mapping[str, bool] = MappingProxyType({"enable_fp_fusion": True})

_TRITON: tuple[Release, ...] = ((3, 6), (3, 7), (3, 8), (3, 9))
#: Gluon may change from one release to the next
_GLUON: tuple[Release, ...] = ((3, 6), (3, 7), (3, 8), (3, 9))
#: Releases that the kernels of each lowering were compiled with for sm90, oldest first: benchmarks/results/triton_releases.csv.
#: `decode_latent` has a kernel in Gluon beside those in Triton.
COMPILED: Mapping[str, tuple[Release, ...]] = MappingProxyType(
    {
        "triton": _TRITON,
        "decode": _TRITON,
        "decode_latent": _TRITON,
        "decode_latent_sm90": _GLUON,
        "hopper": _GLUON,
        "hopper_fp8": _GLUON,
    }
)


def words(releases: Sequence[Release]) -> str:
    """Return text for people: "3.6, 3.7 or 3.8"."""
    *former, last = (f"{major}.{minor}" for major, minor in releases)
    return f"{', '.join(former)} or {last}" if former else last


def remedy(releases: Sequence[Release]) -> str:
    """Return the command that installs the newest of them."""
    return f"pip install 'triton=={words(releases[-1:])}.*'"
