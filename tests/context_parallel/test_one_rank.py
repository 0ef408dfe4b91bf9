from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import attn_compiler
from attn_compiler import ContextParallel
from tests.meshes import fake_mesh


def test_the_option_is_taken_and_one_rank_computes_what_it_would_without() -> None:
    def attention(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x.sin(), x.cos(), x, is_causal=True)

    x = torch.randn(2, 3, 10, 8)
    with fake_mesh(1) as mesh:
        options = {"context_parallel": ContextParallel(mesh), "inner": "aot_eager", "strict": True}
        compiled = torch.compile(attention, backend="attn_compiler", options=options, fullgraph=True)
        torch.testing.assert_close(compiled(x), attention(x))
    assert attn_compiler.reports()[-1].num_sites == 1
