"""Which values exist for real tokens alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.passes.unpad.encoder import HEADS, MASK, Encoder, compiled, ids_of, on_real_tokens, report


def test_queries_of_other_tokens_keep_padding_in() -> None:
    class Cross(Encoder):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, **further: torch.Tensor) -> torch.Tensor:
            queries, keys = (
                self.words(x).view(*ids.shape, HEADS, -1).transpose(1, 2) for x in (further["asking"], ids)
            )
            return F.scaled_dot_product_attention(queries, keys, keys, attn_mask=self.allowed(mask)).transpose(1, 2)

    model, asking = Cross(), ids_of(MASK).flip(0)
    out = compiled(model)(ids_of(MASK), MASK, asking=asking)
    kept = report().kept
    assert kept is not None
    assert "same tokens" in kept.rule
    torch.testing.assert_close(out, model(ids_of(MASK), MASK, asking=asking))


def test_dropout_that_is_given_back_is_the_one_that_layers_read() -> None:
    class Shown(Encoder):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, **further: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = F.dropout(self.words(ids), 0.5, self.training)
            return x, self.layers[0](x, self.allowed(mask))

    for training in (True, False):
        model = Shown().train(training)
        given, out = compiled(model)(ids_of(MASK), MASK)
        expected = model.layers[0](given, model.allowed(MASK))
        torch.testing.assert_close(on_real_tokens(out, MASK), on_real_tokens(expected, MASK), atol=2e-6, rtol=1e-5)
        assert (report().kept is not None) is training
