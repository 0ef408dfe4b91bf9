"""What is asked before each call is asked of the values that the model itself goes by."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.passes.unpad.encoder import MASK, WIDTH, Encoder, check, ids_of


def test_labels_that_are_written_in_place() -> None:
    def loss(x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        own = labels.clone()
        own.masked_fill_(own == -100, 3)
        return F.cross_entropy(x.view(-1, WIDTH), own.view(-1))

    labels = (ids_of(MASK) % WIDTH).masked_fill(MASK == 0, -100)
    kept = check(Encoder(ending=loss), labels=labels).kept
    assert kept is not None
    assert "in place" in kept.rule
