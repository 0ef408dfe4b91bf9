"""AC2xx: q, k and v."""

from __future__ import annotations

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.pages.page import ExampleKind, Page

PAGES = (
    Page(
        code=Code.DTYPE,
        title="The kernel takes other dtypes",
        cause="Most fast kernels compute in bfloat16 or float16. The model runs in float32 or float64.",
        remedy="`model.bfloat16()`, or run the model under `torch.autocast`. Do so only if its accuracy suffices.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(dtype="float32"), Target.fake())',
    ),
    Page(
        code=Code.SEVERAL_DTYPES,
        title="q, k and v have different dtypes",
        cause="A kernel reads all three as one dtype. Often a rotary embedding in float32 makes q and k float32, and v "
        "stays as it was.",
        remedy="Cast the three alike before the attention.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(dtype="bfloat16", dtype_v="float32"), Target.fake())',
    ),
    Page(
        code=Code.SOFTMAX_DTYPE,
        title="The softmax runs in float64",
        cause="Kernels keep scores and softmax in float32. The model casts the scores to float64 first.",
        remedy="Drop the cast to float64 in the model.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(softmax_dtype="float64"), Target.fake())',
    ),
    Page(
        code=Code.SHAPES,
        title="The shapes of q, k and v do not go together",
        cause="k and v differ in batch, heads or length, or q and k differ in batch or head dim. PyTorch broadcasts "
        "some of these; a kernel does not.",
        remedy="Expand the tensors before the attention. Where nothing can be done, the attention stays right, and "
        "PyTorch computes it.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(batch=2, batch_kv=1), Target.fake())',
    ),
    Page(
        code=Code.EMPTY,
        title="An axis is empty, or may be",
        cause="There is no query, no key or no row. With dynamic shapes a length may be 0 in a later call, and kernels "
        "do not take that.",
        remedy="For a symbolic length, compile with `dynamic=False`, or mark the length static. Else there is nothing to "
        "compute.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(length=0), Target.fake())',
    ),
    Page(
        code=Code.SYMBOLIC,
        title="A size has to be known while compiling",
        cause="A number of heads, a head dim, or for some libraries every size is a symbol, since the model was "
        "compiled with dynamic shapes.",
        remedy="Compile with `dynamic=False`, or `torch._dynamo.mark_static(tensor, dim)`.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(head_dim="s0"), Target.fake())',
    ),
    Page(
        code=Code.HEAD_GROUPS,
        title="The heads of q are no multiple of those of k and v",
        cause="With grouped queries each head of k and v serves the same number of heads of q.",
        remedy="Check the model's numbers of heads.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(heads=8, heads_kv=3), Target.fake())',
    ),
    Page(
        code=Code.HEAD_DIM,
        title="The kernel does not take this head dim",
        cause="A head is wider than what the kernel's tiles hold, or not a multiple of what it loads at once. With "
        "gradients, and on GPUs with less shared memory, the bound is lower.",
        remedy="Where the remedy says so, pad q, k and v with zeros to the next multiple, and keep the scale of the "
        "narrower head. Too wide a head has no remedy but fewer dims for each head, when a model is made.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(head_dim=512), Target.fake())',
    ),
    Page(
        code=Code.HEAD_DIMS_DIFFER,
        title="v has another head dim than q and k",
        cause="The kernel takes one head dim for all three. Models with latent attention (DeepSeek) have 192 and 128.",
        remedy="Another kernel that takes both serves on a GPU. Or pad the smaller one with zeros.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(head_dim=64, head_dim_v=128), Target.fake())',
    ),
    Page(
        code=Code.TOO_LARGE,
        title="A size is beyond what the kernel counts",
        cause="Batch and heads become a grid with a largest size, and some kernels compute offsets in 32 bits.",
        remedy="Split the batch, or the heads.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_cudnn", attention(batch=70000), Target.fake())',
    ),
    Page(
        code=Code.LAYOUT,
        title="The tensors lie in memory as the kernel can't read them",
        cause="The elements of a head do not lie side by side, or a latent does not begin where a vector does, and a "
        "copy would cost more than the kernel gains, or change how the numbers are rounded.",
        remedy="Call `contiguous()` in the model where the tensor is made.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_cpu_flash", attention(device="cpu", last_stride=2), Target.fake(device="cpu"))',
    ),
    Page(
        code=Code.GRADIENT,
        title="The kernel has no backward",
        cause="The output is differentiated: the model is training, or it runs with gradients enabled.",
        remedy="For inference, run under `torch.no_grad()` or `torch.inference_mode()`, in the same way in each call: "
        "gradient mode is part of what is compiled. For training, another kernel serves.",
        kind=ExampleKind.DECISION,
        example='why_not("decode", attention(length=1, length_kv=4096, needs_grad=True), Target.fake())',
    ),
    Page(
        code=Code.DROPOUT,
        title="The kernel drops no attention weights, or not by this share",
        cause="The model trains with attention dropout. Few kernels draw random numbers, and cuDNN takes multiples of "
        "1/16.",
        remedy="`attention_dropout=0.0` in the model's config if training allows it. In inference call `model.eval()`.",
        kind=ExampleKind.DECISION,
        example='why_not("hopper", attention(dropout=0.1), Target.fake())',
    ),
    Page(
        code=Code.WEIGHTS_READ,
        title="The attention weights are used elsewhere",
        cause="The model returns them, or computes with them. A fused kernel never writes them down.",
        remedy="Call the model with `output_attentions=False`; for `nn.MultiheadAttention`, with `need_weights=False`.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(returns_weights=True), Target.fake())',
    ),
    Page(
        code=Code.LENGTHS,
        title="The number of queries or keys does not suit the kernel",
        cause="A kernel for decoding takes few queries. One for long sequences gains nothing with few, or can't have a "
        "single one.",
        remedy="There is nothing to do: another kernel serves such lengths.",
        kind=ExampleKind.DECISION,
        example='why_not("decode", attention(length=512), Target.fake())',
    ),
    Page(
        code=Code.LATENT,
        title="k and v are not made of one latent, or not so that it can be read in their place",
        cause="Kernels over a latent (MLA) need k and v to be linear maps of one tensor, found in the graph. In most "
        "models they are not, and the reason says nothing about them. In a model with latent attention the report "
        "says what stands in between.",
        remedy="With LoRA adapters, merge them into the weights: `model.merge_and_unload()`. See *Latent attention*.",
        kind=ExampleKind.DECISION,
        example='why_not("decode_latent", attention(length=1, length_kv=4096), Target.fake())',
    ),
    Page(
        code=Code.LSE_READ,
        title="The logsumexp of the scores is used, or differentiated",
        cause="Parts of an attention are merged by it: those of a ring (context parallelism), or of a cache that ranks "
        "share. Our own kernels give it, those for training with its gradient. PyTorch's, cuDNN's and FA4 are not asked "
        "for it, and what is rounded to FP8 has another one.",
        remedy="There is nothing to do: another kernel serves. `lowering=` naming this one would leave it to plain products.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(lse="read"), Target.fake())',
    ),
)
