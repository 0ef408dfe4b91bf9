"""What a fact compares lies row by row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.passes.unpad.encoder import BATCH, LENGTH, MASK, WIDTH, Encoder, check, ids_of


@pytest.mark.in_turns
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("both", [True, False])
def test_a_loss_over_positions_before_rows(both: bool, reduction: str) -> None:
    def loss(x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = (x.transpose(0, 1) if both else x).reshape(-1, WIDTH)
        found = F.cross_entropy(logits, labels.t().reshape(-1), reduction=reduction)
        return found if reduction == "mean" else (found * (mask.t() if both else mask).reshape(-1)).sum()

    # Ignored where padding would be if labels lay row by row: some labels at padding count.
    flat = torch.where(MASK.view(-1) == 1, (ids_of(MASK) % WIDTH).t().reshape(-1), -100)
    labels = flat.view(LENGTH, BATCH).t().contiguous()
    check(Encoder(ending=loss), labels=labels, close=2e-5)
