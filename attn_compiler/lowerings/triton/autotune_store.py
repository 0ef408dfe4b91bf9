"""What was measured, on disk: one JSON file for each key, which any number of processes may read and write at once."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TileStore:
    """folder: made when first written to. What can't be read counts as missing, what can't be written is measured again."""

    folder: Path

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def get(self, key: str) -> Any | None:
        """The JSON value that was put there last; None if there is none, or none that can be read."""
        path = self.path(key)
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.debug("ignored %s: %s", path, error)
            return None

    def put(self, key: str, value: Any) -> None:
        """Written beside its place and moved there, so that a reader finds all of it or none."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=key[:8], suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(value, file, indent=1, sort_keys=True)
                os.replace(name, self.path(key))
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            log.warning("what was measured could not be kept in %s, and will be measured again: %s", self.folder, error)
