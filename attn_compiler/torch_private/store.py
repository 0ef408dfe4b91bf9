"""Rewrites on disk: one file of JSON for each key, which any number of processes and ranks may read and write at once.

A file holds data alone, and its digest. An unreadable or wrong file counts as missing. A failed write is skipped. None raises an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_compiler.torch_private import caches as torch_caches, inductor as torch_inductor

log = logging.getLogger(__name__)

#: below PyTorch's cache folder
FOLDER = "attn_compiler/rewrites"
#: the most files; the oldest are removed
_MOST_FILES = 2048
#: age in seconds of a temporary file whose process has ended
_LONG_AGO = 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """root: PyTorch's cache folder."""

    root: Path

    @staticmethod
    def beside_inductors(patches: Mapping[str, Any]) -> Store | None:
        """Return the store in Inductor's cache folder; None if PyTorch's caches are off, or the folder is unavailable. patches: the user's
        settings of Inductor."""
        if not torch_caches.are_wanted(patches):
            return None
        try:
            return Store(root=torch_inductor.cache_folder())
        except OSError:
            return None

    @property
    def folder(self) -> Path:
        return self.root / FOLDER

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def get(self, key: str) -> Any | None:
        """Return the latest value of the key; None if no file of it can be read."""
        path = self.path(key)
        try:
            held = json.loads(path.read_bytes())
            if (
                not isinstance(held, dict)
                or held.get("key") != key
                or held.get("digest") != _digest(held.get("rewrite"))
            ):
                log.debug("ignored %s: it is damaged, or another file", path)
                return None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            log.debug("ignored %s: %s", path, error)
            return None
        self._was_used(key, held)
        return held["rewrite"]

    def put(self, key: str, rewrite: Any) -> None:
        """Store plain data. A temporary file is written and moved into place, so that a reader finds all of it or none."""
        held = {"key": key, "digest": _digest(rewrite), "rewrite": rewrite}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Not by tempfile, whose files only their owner may read: Inductor's files have the user's default permissions.
            name = self.folder / f"{key[:8]}{uuid.uuid4().hex}.tmp"
            try:
                with name.open("xb") as file:
                    file.write(torch_caches.content(held))
                os.replace(name, self.path(key))
            except BaseException:
                name.unlink(missing_ok=True)
                raise
            self._forget_oldest()
        except OSError as error:
            log.debug("a rewrite could not be kept in %s: %s", self.folder, error)
        self._was_used(key, held)

    def _was_used(self, key: str, held: Any) -> None:
        torch_caches.carry(f"{FOLDER}/{key}.json", held)
        with contextlib.suppress(OSError):  # The folder may be read-only.
            os.utime(self.path(key))

    def _forget_oldest(self) -> None:
        files = list(self.folder.glob("*.json"))
        if len(files) <= _MOST_FILES:
            return
        times = []
        for path in files:
            with contextlib.suppress(FileNotFoundError):  # Another process removed it.
                times.append((path.stat().st_mtime, path))
        for _, path in sorted(times)[: len(files) - _MOST_FILES * 3 // 4]:
            path.unlink(missing_ok=True)
        for path in self.folder.glob("*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - _LONG_AGO:
                    path.unlink()


def _digest(rewrite: Any) -> str:
    return hashlib.sha256(json.dumps(rewrite, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
