"""Padding of earlier batches, known without a wait: their numbers are copied to the host while the device works."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from attn_compiler.reporting.facts import MUCH_PADDING, Steps, UnpaddedStep

#: batches in a row that predict the next one
_IN_A_ROW = 2
#: the most copies on their way at once
_MOST_UNDER_WAY = 16


class Arriving:
    """Numbers on their way from an NVIDIA GPU to the host. told: int64 (n,)."""

    def __init__(self, told: torch.Tensor) -> None:
        # The copy goes to pinned memory, so that the call returns at once.
        self._host = told.to("cpu", non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(told.device))

    def are_there(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def numbers(self) -> list[int]:
        """Return the numbers, once they have arrived."""
        found: list[int] = self._host.tolist()
        return found


class BatchesBefore:
    """The last batches of one graph.

    steps: filled by this class. read: makes a step from a batch's numbers and its count of positions. are_awaited: the host has to wait for
    numbers, as on a GPU.
    """

    def __init__(
        self, *, steps: Steps, read: Callable[[Sequence[int], int], UnpaddedStep], are_awaited: bool = False
    ) -> None:
        self._steps, self._read, self._are_awaited = steps, read, are_awaited
        self._lately: deque[bool] = deque(maxlen=_IN_A_ROW)
        self._under_way: deque[tuple[Arriving, int]] = deque()
        self._lock = threading.Lock()

    def add(self, step: UnpaddedStep) -> None:
        """Note a batch that was waited for."""
        with self._lock:
            self._note(step)

    def are_better_padded(self) -> bool:
        """Return True if the next batch is to run padded, without a wait, as its predecessors should have. A wrong guess costs time."""
        with self._lock:
            while self._under_way and self._under_way[0][0].are_there():
                found, of = self._under_way.popleft()
                step = self._read(found.numbers(), of)
                self._note(dataclasses.replace(step, failed=(*step.failed, MUCH_PADDING)))
            are_better = len(self._lately) == _IN_A_ROW and all(self._lately)
        # The arrival time of numbers is chance, and the two graphs round differently.
        return are_better and self._are_awaited and not torch.are_deterministic_algorithms_enabled()

    @property
    def are_enough_under_way(self) -> bool:
        """True if a batch that runs padded need not be asked for its numbers."""
        return len(self._under_way) >= _MOST_UNDER_WAY

    def send(self, told: torch.Tensor, positions: int) -> None:
        """Ask a padded batch for its numbers, to be read on arrival. told: int64 (n,). positions: of the batch."""
        sent = Arriving(told)
        with self._lock:
            self._under_way.append((sent, positions))

    def _note(self, step: UnpaddedStep) -> None:
        self._lately.append(step.is_better_padded)
        self._steps.last.append(step)
