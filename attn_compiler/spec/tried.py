"""The oldest release of torch that serves, and the newest of torch and of Triton that this version was tried with. A newer one is said."""

from __future__ import annotations

from attn_compiler.spec.target import Target

#: by name, the oldest release that serves
OLDEST = {"torch": (2, 11)}
#: by name, the newest release that the tests ran with
NEWEST = {"torch": (2, 15), "triton": (3, 9)}


def not_tried(name: str, version: str) -> str | None:
    """What to tell of a release that is newer than all that were tried; None of any other. version: "2.16.0+cu132", or "" if absent."""
    if not version:
        return None
    newest = NEWEST[name]
    found = tuple(int(part) for part in version.split(".")[:2])
    if found <= newest:
        return None
    return f"{name} {_words(found)} was not tried with this version of attn_compiler; {_words(newest)} is the newest that was"


def on(target: Target) -> tuple[str, ...]:
    """The same of all that a machine's attention runs with. A CPU runs no Triton."""
    releases = {"torch": target.torch, "triton": target.triton if target.device == "cuda" else ""}
    return tuple(filter(None, (not_tried(name, version) for name, version in releases.items())))


def _words(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
