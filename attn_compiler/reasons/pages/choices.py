"""AC4xx: what was asked for, and what is faster."""

from __future__ import annotations

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.pages.page import ExampleKind, Page

PAGES = (
    Page(
        code=Code.FP8_NOT_ASKED,
        title="No recipe asks for FP8 here",
        cause="Attention in FP8 has coarser numbers, so it runs only where `options={'fp8_recipe': ...}` asks for it. "
        "This reason stands at each lowering in FP8 of each model without a recipe.",
        remedy="Nothing to do, unless you want FP8: `options={'fp8_recipe': attn_compiler.Fp8Recipe()}`.",
        kind=ExampleKind.DECISION,
        example='why_not("triton_fp8", attention(), Target.fake())',
    ),
    Page(
        code=Code.FP8_RECIPE,
        title="The recipe asks for what this kernel can't do in FP8",
        cause="Kernels in FP8 differ in how they scale, which formats they take, and whether they have a backward in "
        "FP8.",
        remedy="Change the recipe as the remedy in the report says. Another kernel may serve it as it is.",
        kind=ExampleKind.DECISION,
        example='why_not("triton_fp8", attention(needs_grad=True, fp8=Fp8Recipe(backward=True)), Target.fake())',
    ),
    Page(
        code=Code.FP8_SLOWER,
        title="FP8 is slower for such a shape",
        cause="Rounding q, k and v takes time. For few keys, or a small batch, it takes more than what the kernel "
        "saves. The report has the measurement.",
        remedy="Nothing to do for speed. `Fp8Recipe(force=True)` takes FP8 all the same.",
        kind=ExampleKind.DECISION,
        example="""why_not(
    "triton_fp8",
    attention(batch=1, length=512, head_dim=64, fp8=Fp8Recipe()),
    Target.fake(),
    chosen=True,
)""",
    ),
    Page(
        code=Code.OWN_KERNEL,
        title="The model calls a kernel itself, and this one would hold more in memory",
        cause="FlexAttention's kernel, or a library's, holds no number for each score. A lowering that does may not "
        "take its place: a model that fits into memory would no longer fit.",
        remedy="`options={'lowering': 'math'}`, or the name in the report, takes it all the same.",
        kind=ExampleKind.PROGRAM,
        example="""from torch.nn.attention.flex_attention import flex_attention


def model(q, bias):
    return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + bias[i, j] ** 2)


inputs = (torch.randn(1, 2, 128, 16), torch.randn(128, 128))""",
    ),
    Page(
        code=Code.NOTHING_LEFT_OUT,
        title="Every key is seen, so that nothing is gained",
        cause="`rows` computes each row of a batch by itself and leaves out keys that its mask shuts out. Here it shuts "
        "out none.",
        remedy="There is nothing to do: PyTorch's kernel is as fast.",
        kind=ExampleKind.DECISION,
        example='why_not("rows", attention(device="cpu", dtype="float32"), Target.fake(device="cpu"))',
    ),
    Page(
        code=Code.IN_ORDER_SLOWER,
        title="Hopper's backward in one order is not the faster one",
        cause="`torch.use_deterministic_algorithms(True)` was in force. Hopper's backward then adds gradients up in one "
        "order, for which programs wait for each other. The Triton kernels' backward needs no order. The site gets the "
        "one that was measured to be faster, and the Triton kernels' for shapes like none that was measured. The "
        "forward is the same, and so are the last bits of each run.",
        remedy="Nothing to do, unless the last bits may differ: `torch.use_deterministic_algorithms(False)`.",
        kind=ExampleKind.TOLD,
        example="Packed documents in training on an H100 or H200, after `torch.use_deterministic_algorithms(True)`: the "
        "site's note in the report begins with `backward: triton`.",
    ),
    Page(
        code=Code.ADDED_SLOWER,
        title="Hopper's kernel was not measured to be faster with such a mask or bias",
        cause="The mask or the bias is a tensor with an element for each score, or numbers by distance. Hopper's kernel "
        "takes these. It is chosen where it was measured to be faster than the Triton kernel, and only there.",
        remedy="Nothing to do. `options={'lowering': 'hopper'}` takes it all the same.",
        kind=ExampleKind.TOLD,
        example="A learned bias of (1, 12, 100, 200) elements on an H100 or H200: no row has such lengths.",
    ),
    Page(
        code=Code.OWN_IS_FASTEST,
        title="No kernel is known to be faster than the model's own attention",
        cause="The model writes its attention out, and the inner compiler's code for that was measured to be as fast as any "
        "kernel, for such sizes on such a machine. So no kernel was asked. The reason has the measurement.",
        remedy="Nothing to do. `options={'lowering': 'math'}`, or another name, takes a kernel all the same.",
        kind=ExampleKind.PROGRAM,
        example="""def model(q):
    allowed = torch.ones(8, 8, dtype=torch.bool).tril()
    return F.softmax((q @ q.mT).masked_fill(~allowed, float("-inf")), -1) @ q


inputs = (torch.randn(1, 2, 8, 16, requires_grad=True),)""",
    ),
)
