"""AC3xx: masks and scores."""

from __future__ import annotations

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.pages.page import ExampleKind, Page

PAGES = (
    Page(
        code=Code.SOFTCAP,
        title="The kernel has no softcap",
        cause="The model bounds its scores by `cap · tanh(scores / cap)`, as Gemma 2 does. PyTorch's kernels have no "
        "such argument.",
        remedy="Our Triton kernels apply it on a GPU. If accuracy allows, switch it off in the model's config (Gemma 2: "
        "`attn_logit_softcapping=None`).",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(changes=(scores.Softcap(cap=50.0),)), Target.fake())',
    ),
    Page(
        code=Code.SINKS,
        title="The kernel has no attention sinks",
        cause="One learned logit of each head joins the softmax and is dropped after it, as in gpt-oss.",
        remedy="There is nothing to do: our Triton kernels have sinks, on a GPU.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(changes=(scores.Sinks(requires_grad=False),)), Target.fake())',
    ),
    Page(
        code=Code.SCORE_CHANGE,
        title="The kernel does not apply this change of the scores",
        cause="The model changes its scores in a way that was understood, and that this kernel has no argument for.",
        remedy="There is nothing to do: the attention stays right, on another kernel or as the model has it.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(changes=(scores.Unusual(what="a weight of each pair"),)), Target.fake())',
    ),
    Page(
        code=Code.SCALE,
        title="The kernel does not take this scale",
        cause="Kernels scale the scores inside of the softmax, where a negative, zero or very large factor gives NaN or "
        "loses digits.",
        remedy="Multiply q in the model instead, before the product: put the scale's sign, or its size, into q.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(scale=-0.125), Target.fake())',
    ),
    Page(
        code=Code.DIAGONAL,
        title="The causal diagonal starts at another corner",
        cause="With another number of keys than of queries, a causal mask can start at the top left or end at the "
        "bottom right. PyTorch's kernels know one of these. A cache of keys and values has the other.",
        remedy="Where lengths are symbols, compile with `dynamic=False`. Else another kernel serves, or the mask is "
        "passed as a tensor.",
        kind=ExampleKind.DECISION,
        example="""why_not(
    "sdpa_efficient",
    attention(length=64, length_kv=128, mask=causal(masks.Alignment.BOTTOM_RIGHT)),
    Target.fake(),
)""",
    ),
    Page(
        code=Code.CAUSAL_AND_TENSOR,
        title="A causal mask and a mask tensor at once",
        cause="The kernel is not known to take both.",
        remedy="Put the diagonal into the mask tensor.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_cudnn", attention(mask=causal(dense=masks.Dense(shape=(2, 1, 1, 128), dtype="bool"))), Target.fake())',
    ),
    Page(
        code=Code.MASK_KIND,
        title="The kernel does not apply this kind of mask",
        cause="The mask was understood: a window, padding, documents, chunks. This kernel has no argument that says it.",
        remedy="There is nothing to do where another kernel serves. If none does, build the mask from comparisons of "
        "positions, or pass none.",
        kind=ExampleKind.DECISION,
        example="""why_not(
    "fa4",
    attention(mask=masks.MaskSpec(dense=masks.Dense(shape=(2, 1, 128, 128), dtype="bool"))),
    Target.fake(flash_attn_4="4.0.0b36"),
)""",
    ),
    Page(
        code=Code.MASK_TENSOR,
        title="The kernel reads no mask tensor",
        cause="What may be seen, or what is added to the scores, is a tensor that was not shown to be something "
        "simpler. Flash kernels read none. The row `unproved` of the report says why nothing simpler was shown.",
        remedy="Pass `is_causal=True`, or no mask, where the mask says only that. Make masks inside of the compiled "
        "model, so that they can be read: `attn_compiler.integrations.transformers.compile_model` does so for "
        "transformers.",
        kind=ExampleKind.DECISION,
        example="""why_not(
    "sdpa_flash",
    attention(mask=masks.MaskSpec(dense=masks.Dense(shape=(2, 1, 128, 128), dtype="bool"))),
    Target.fake(),
)""",
    ),
    Page(
        code=Code.MASK_SHAPE,
        title="The mask has a shape that the kernel does not take",
        cause="The tensor does not broadcast to (batch, heads, queries, keys), or the kernel wants a row for each "
        "query.",
        remedy="Expand the mask to the shape in the rule.",
        kind=ExampleKind.DECISION,
        example="""why_not(
    "sdpa_efficient",
    attention(mask=masks.MaskSpec(dense=masks.Dense(shape=(2, 1, 128, 64), dtype="bool"))),
    Target.fake(),
)""",
    ),
    Page(
        code=Code.MASK_DTYPE,
        title="The mask has a dtype that the kernel does not take",
        cause="The kernel reads truth values, or numbers of q's own dtype.",
        remedy="Cast the mask to q's dtype if rounding does it no harm. Distances above 256 are rounded in bfloat16.",
        kind=ExampleKind.DECISION,
        example="""why_not(
    "sdpa_efficient",
    attention(mask=masks.MaskSpec(dense=masks.Dense(shape=(2, 1, 128, 128), dtype="float64"))),
    Target.fake(),
)""",
    ),
    Page(
        code=Code.TWO_TENSORS,
        title="Two tensors are added to the scores",
        cause="A mask and a learned bias, say. A call has one argument for both.",
        remedy="Add the two up in the model.",
        kind=ExampleKind.DECISION,
        example="""why_not(
    "sdpa_efficient",
    attention(
        mask=masks.MaskSpec(dense=masks.Dense(shape=(2, 1, 1, 128), dtype="bool")),
        bias=scores.DenseBias(shape=(1, 8, 128, 128), dtype="bfloat16"),
    ),
    Target.fake(),
)""",
    ),
    Page(
        code=Code.LARGE_NUMBERS,
        title="Large numbers are added to the scores of a model that trains",
        cause="The model masks by adding a number such as -1e9. A kernel makes the weights anew in its backward, from "
        "the logarithm of a sum that is kept in float32. Beside 1e9 that logarithm has no digits left.",
        remedy="Mask by truth values, or by -inf.",
        kind=ExampleKind.DECISION,
        example="""why_not(
    "sdpa_efficient",
    attention(
        needs_grad=True,
        changes=(scores.Softcap(cap=1e9),),
        mask=masks.MaskSpec(dense=masks.Dense(shape=(2, 1, 1, 128), dtype="bool")),
    ),
    Target.fake(),
)""",
    ),
    Page(
        code=Code.KEYLESS_ROWS,
        title="A query may have no key, and the model trains",
        cause="The model masks by adding numbers, such as the lowest of a dtype, and may shut out every key of a query. "
        "A kernel makes the weights anew in its backward, from the logarithm of a sum. Beside such numbers that "
        "logarithm can't say how many keys there were.",
        remedy="Give the mask as truth values, or let every query see its own key.",
        kind=ExampleKind.DECISION,
        example="""why_not(
    "sdpa_cpu_flash",
    attention(
        device="cpu",
        dtype="float32",
        needs_grad=True,
        decomposed=True,
        mask=masks.MaskSpec(
            dense=masks.Dense(shape=(2, 1, 128, 128), dtype="float32"), reason="it comes in from outside of this graph"
        ),
    ),
    Target.fake(device="cpu"),
)""",
    ),
    Page(
        code=Code.BIAS_GRADIENT,
        title="The kernel gives a bias no gradient",
        cause="A learned bias is added to the scores, as T5's, and the model trains. This kernel has no gradient for "
        "it.",
        remedy="There is nothing to do: our Triton kernels and PyTorch's memory-efficient one have it. In inference, "
        "`torch.no_grad()`.",
        kind=ExampleKind.DECISION,
        example="""why_not(
    "sdpa_cudnn",
    attention(needs_grad=True, bias=scores.DenseBias(shape=(1, 8, 128, 128), dtype="bfloat16")),
    Target.fake(),
)""",
    ),
)
