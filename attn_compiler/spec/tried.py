"""The oldest supported release of torch, and the newest tried releases of torch and Triton. Newer ones are reported."""

from __future__ import annotations

from attn_compiler.spec.target import Target

#: by name, the oldest supported release
OLDEST = {"torch": (2, 11)}
#: by name, the newest release that the tests ran with
NEWEST = {"torch": (2, 15), "triton": (3, 9)}


def not_tried(name: str, version: str) -> str | None:
    """Return a notice of a release newer than all tried ones, else None. version: "2.16.0+cu132", or "" if absent."""
    if not version:
        return None
    newest = NEWEST[name]
    found = tuple(int(part) for part in version.split(".")[:2])
    if found <= newest:
        return None
    return f"{name} {_words(found)} was not tried with this version of attn_compiler; {_words(newest)} is the newest that was"


def notices(target: Target) -> tuple[str, ...]:
    """Return a notice for each of torch and Triton that is newer than every tried release. On a CPU only torch counts."""
    releases = {"torch": target.torch, "triton": target.triton if target.device == "cuda" else ""}
    return tuple(filter(None, (not_tried(name, version) for name, version in releases.items())))


def _words(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
