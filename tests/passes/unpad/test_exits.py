"""What a fact compares lies row by row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.passes.unpad.encoder import BATCH, LENGTH, MASK, WIDTH, Decoder, Encoder, Windowed, check, ids_of, mask_of


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


def _shifted(x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As losses of language models: each token has the next one's label."""
    following = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(x.reshape(-1, WIDTH), following.reshape(-1))


@pytest.mark.parametrize("model", [Decoder, Encoder, Windowed])
def test_padding_whose_label_counts_is_computed_too(model: type[Encoder]) -> None:
    """Padded on the left, the last padding of a row has the first token as its label. It is a query without keys, and no key."""
    mask = mask_of(4, 10, 1, left=True)
    labels = (ids_of(mask) % WIDTH).masked_fill(mask == 0, -100)
    found = check(model(ending=_shifted), mask, labels=labels)
    assert "padding that has a label stands before the real tokens of its row" in found.facts
    assert [step.failed for step in found.last] == [()]
    assert found.last[0].fill == (4 + 10 + 1 + 2) / 30


def test_padding_whose_label_counts_behind_real_tokens_is_not_packed() -> None:
    labels = ids_of(MASK) % WIDTH
    found = check(Decoder(ending=_shifted), labels=labels)
    assert [step.failed for step in found.last] == [
        ("padding that has a label stands before the real tokens of its row",)
    ]
