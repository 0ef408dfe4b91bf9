from __future__ import annotations

import torch
from torch import fx

from attn_compiler.verifying.padding import Padded


class Before(torch.nn.Module):
    def forward(self, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return mask != 0, mask.sum()


MASK = torch.tensor([[1, 0], [1, 1], [0, 1]])


def test_padding_counts_for_nothing_whatever_axes_hold_it() -> None:
    places = {0: (0, 1), 1: (1, 0), 2: (0, 0), 3: (0, 2)}
    padded = Padded(before=fx.symbolic_trace(Before()), places=places)
    shapes = ((3, 2, 4), (2, 3), (6, 4), (3, 4, 2), (3, 2))
    found = padded.cleared({i: torch.ones(shape) for i, shape in enumerate(shapes)}, [MASK])
    real = MASK.float()
    assert torch.equal(found[0], real[..., None].expand(3, 2, 4))
    assert torch.equal(found[1], real.t())
    assert torch.equal(found[2], real.reshape(6, 1).expand(6, 4))
    assert torch.equal(found[3], real[:, None].expand(3, 4, 2))
    assert torch.equal(found[4], torch.ones(3, 2))


def test_what_is_not_finite_at_padding_counts_for_nothing() -> None:
    padded = Padded(before=fx.symbolic_trace(Before()), places={0: (0, 1)})
    found = padded.cleared({0: torch.full((3, 2), torch.nan)}, [MASK])
    assert torch.equal(found[0].isnan(), MASK == 1)
