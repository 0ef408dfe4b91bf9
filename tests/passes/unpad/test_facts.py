"""What is asked before each call is asked of the values that the model itself goes by."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

from attn_compiler.passes.unpad import facts
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


def test_what_is_asked_takes_what_it_reads() -> None:
    """A model has hundreds of parameters."""

    def asked(weight: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor) -> tuple[object, ...]:
        real = torch.ne(mask, 0)
        return real, (torch.all(real), torch.any(real)), None

    module, read = facts.with_places(fx.symbolic_trace(asked))
    assert read == (1,)
    told, tokens, _, _, _, _, starts = module(MASK)
    assert told.dtype == torch.int64
    assert told.tolist() == [21, 0, 1]
    assert starts.tolist() == [0, 4, 14, 21]
    assert tokens[:5].tolist() == [0, 1, 2, 3, 10]
