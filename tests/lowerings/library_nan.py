"""What kernels of libraries do with NaN that takes no part in an attention, on a GPU: python -m tests.lowerings.library_nan

A line for each lowering, form of mask, and place of the NaN: which of out and the gradients of q, k and v it got into, beside those rows
that hold it. PyTorch's documentation and cuDNN's say nothing of it; this asks the kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_compiler.lowerings import by_name
from attn_compiler.spec.target import Target
from tests.lowerings import poison

DEVICE = "cuda"
BF16 = torch.bfloat16
LENGTH = 200
NUMBERS = (130, 0)
#: by name what the model masks, given positions of queries and keys, and numbers of keys
MASKS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "lengths": lambda q, k, numbers: (k < numbers[:, None, None, None]) & (q >= 0),
    "lengths, causal": lambda q, k, numbers: (k < numbers[:, None, None, None]) & (k <= q),
    "dense": lambda q, k, numbers: ((q * 7 + k * 3) % 5 > 1) & (k % 11 > 0) & (q % 6 > 0),
    "strict": lambda q, k, numbers: k < q,
    "window before": lambda q, k, numbers: (k <= q - 5) & (k >= q - 60),
}
LOWERINGS = ("cudnn", "sdpa_cudnn", "sdpa_efficient", "fa4", "triton", "math")
PLACES = ("k", "v", "q", "kv")


def attention(form: str) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
        rows, keys = torch.arange(LENGTH, device=q.device)[:, None], torch.arange(LENGTH, device=q.device)
        allowed = MASKS[form](rows, keys, numbers)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, attn_mask=allowed, enable_gqa=True)

    return run


def whole_mask(form: str) -> Tensor:
    """bool (B|1, 1, Sq, Skv)"""
    rows, keys = torch.arange(LENGTH, device=DEVICE)[:, None], torch.arange(LENGTH, device=DEVICE)
    found = MASKS[form](rows, keys, torch.tensor(NUMBERS, device=DEVICE))
    return found.reshape(-1, 1, LENGTH, LENGTH)


def leaks(lowering: str, form: str, place: str) -> str:
    """Words for where the NaN got."""
    torch.manual_seed(0)
    whole = whole_mask(form)
    unseen, keyless = poison.unseen_of(whole, 2), ~whole.any(-1)
    made = [torch.randn(2, LENGTH, n, 64, device=DEVICE).to(BF16).transpose(1, 2) for n in (4, 2, 2)]
    held = {"q": keyless, "k": unseen, "v": unseen}
    if not any(held[name].any() for name in place):
        return "nothing to fill"
    pairs = zip("qkv", made, strict=True)
    filled = [poison.filled(x, held[n], poison.NOT_FINITE) if n in place else x for n, x in pairs]
    options: dict[str, Any] = {"lowering": lowering, "strict": True}
    torch._dynamo.reset()
    function: Any = torch.compile(attention(form), backend="attn_compiler", options=options, dynamic=False)
    leaves = [x.clone().requires_grad_() for x in filled]
    out = function(*leaves, torch.tensor(NUMBERS, device=DEVICE))
    grads = torch.autograd.grad(out, leaves, torch.randn_like(out))
    found = [
        f"{name} ({int((~x.isfinite()).any(-1).sum())} of {x[..., 0].numel()} rows)"
        for name, x in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True)
        if not x.isfinite().all()
    ]
    not_0 = [name for name, x in (("out", out), ("dq", grads[0])) if x[keyless.expand(x.shape[:3])].nan_to_num().any()]
    words = f"got into {', '.join(found)}" if found else "nowhere"
    return words + (f"; rows without keys are not 0 in {', '.join(not_0)}" if not_0 else "")


def main() -> int:
    if not torch.cuda.is_available():
        sys.stdout.write("needs a CUDA device, and there is none\n")
        return 2
    target = Target.current(DEVICE)
    for lowering in LOWERINGS:
        reasons = by_name(lowering).unavailable(target)
        if reasons:
            sys.stdout.write(f"{lowering}: {reasons[0]}\n")
            continue
        for form in MASKS:
            for place in PLACES:
                try:
                    words = leaks(lowering, form, place)
                except Exception as failure:  # noqa: BLE001 - a refusal is an answer, too
                    words = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:150]}"
                sys.stdout.write(f"{lowering}, {form}, NaN in {place}: {words}\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
