"""AC5xx: a softmax or a call that was not read as an attention. It stays as the model made it, and its numbers are right."""

from __future__ import annotations

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.pages.page import ExampleKind, Page

_Q = "inputs = (torch.randn(1, 2, 8, 16, requires_grad=True),)"
_PROGRAM = ExampleKind.PROGRAM

PAGES = (
    Page(
        code=Code.BEFORE_SOFTMAX,
        title="No product of q and k comes before the softmax",
        cause="Above the softmax, an op was met that is no scale, mask, bias, softcap, cast or view. Often the softmax "
        "is no attention at all: it chooses among classes or experts. The report names the op.",
        remedy="If it is an attention, do what the op does on q or k, or on the mask, instead of on the scores. If it is "
        "none, nothing is lost.",
        kind=_PROGRAM,
        example=f"""def model(q):
    return F.softmax((q @ q.mT).exp(), -1) @ q


{_Q}""",
    ),
    Page(
        code=Code.AFTER_SOFTMAX,
        title="No product with v comes after the softmax",
        cause="What follows the softmax is something besides views, casts, dropout, the scores' own mask and a product "
        "with v.",
        remedy="Multiply by v right after the softmax, and do the rest to the output. If it is no attention, nothing is "
        "lost.",
        kind=_PROGRAM,
        example=f"""def model(q):
    return F.softmax(q @ q.mT, -1).sum(-1)


{_Q}""",
    ),
    Page(
        code=Code.SOFTMAX_AXIS,
        title="The softmax does not run over the keys",
        cause="It runs over the queries, the heads or several axes, or the product with v sums over another axis than "
        "the softmax did.",
        remedy="If that is meant, nothing can be done. Often it is a wrong `dim=`.",
        kind=_PROGRAM,
        example=f"""def model(q):
    return F.softmax(q @ q.mT, 1) @ q


{_Q}""",
    ),
    Page(
        code=Code.SCORES_READ,
        title="The scores are used elsewhere",
        cause="Something besides the softmax reads the scores: they are returned, or a statistic is taken of them. A "
        "fused kernel never writes them down.",
        remedy="Compute what reads them only when it is needed, outside of the compiled model.",
        kind=_PROGRAM,
        example=f"""def model(q):
    scores = q @ q.mT
    return F.softmax(scores, -1) @ q, scores


{_Q}""",
    ),
    Page(
        code=Code.SINK_COLUMN,
        title="A column that joined the scores is not dropped again",
        cause="Logits were joined to the scores before the softmax, as attention sinks are, and their weights reach the "
        "values.",
        remedy="Drop the column after the softmax, before the product with v. If it is meant to reach the values, "
        "nothing can be done.",
        kind=_PROGRAM,
        example="""def model(q, sinks, v):
    scores = torch.cat([q @ q.mT, sinks.expand(1, 2, 8, 1)], -1)
    return F.softmax(scores, -1) @ v


inputs = (torch.randn(1, 2, 8, 16), torch.randn(1, 2, 1, 1), torch.randn(1, 2, 9, 16))""",
    ),
    Page(
        code=Code.PRODUCT_ADDS,
        title="A product adds a tensor that does not count and still gets a gradient",
        cause="`torch.baddbmm(bias, q, k, beta=0)` does not read `bias`, but gives it a gradient of zeros. A kernel "
        "would give it none.",
        remedy="Leave the tensor out (`torch.bmm`), or detach it.",
        kind=_PROGRAM,
        example="""def model(bias, q):
    scores = torch.baddbmm(bias, q, q.mT, beta=0)
    return F.softmax(scores, -1) @ q


inputs = (torch.randn(2, 8, 8, requires_grad=True), torch.randn(2, 8, 16, requires_grad=True))""",
    ),
    Page(
        code=Code.AXES,
        title="The axes could not be followed",
        cause="Between the scores and the output a tensor was cut, joined or multiplied in a way whose meaning for "
        "batch, heads, queries and keys could not be told. The report has the op.",
        remedy="Write that step with views that keep axes whole, or before the product.",
        kind=_PROGRAM,
        example="""def model(q, weight):
    return F.softmax((q @ q.mT) * weight, -1) @ q


inputs = (torch.randn(1, 2, 8, 16), torch.randn(8, 8))""",
    ),
    Page(
        code=Code.ARGUMENTS,
        title="An argument of the call can't be told",
        cause="q, k or v has too few axes, or its scale or dropout is known only at run time, or a kernel's op was "
        "called with arguments that it does not say all of.",
        remedy="Give the call plain numbers, and tensors of (batch, heads, positions, head dim). Mark a symbolic head "
        "dim static, or pass `scale=`.",
        kind=_PROGRAM,
        example="""kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def model(q, k, v):
    return kernel(q, k, v)[0]


inputs = (torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16))""",
    ),
    Page(
        code=Code.INSIDE_A_CALL,
        title="The attention is inside a call that stays whole",
        cause="The attention was found inside of a function that Dynamo keeps as one node, such as a custom "
        "autograd.Function or a higher-order op. There is no place in the graph where its output could be "
        "replaced.",
        remedy="Call the attention outside of that function.",
        kind=ExampleKind.TOLD,
        example="It takes a function that Dynamo keeps as one node and whose inside is seen when it is traced.",
    ),
    Page(
        code=Code.TRANSFORM,
        title="The attention is inside torch.func",
        cause="`vmap`, `grad`, `vjp` or `jvp` is applied to it in the graph. A kernel has no rule for such a transform.",
        remedy="Apply the transform outside of the compiled function, or write the batch as an axis.",
        kind=_PROGRAM,
        example="""def model(q):
    return torch.func.vmap(lambda x: F.scaled_dot_product_attention(x, x, x))(q)


inputs = (torch.randn(3, 1, 2, 8, 16),)""",
    ),
    Page(
        code=Code.CHOSEN_BY_SCOPE,
        title="An sdpa_kernel scope chooses the kernel",
        cause="The call is inside of `with torch.nn.attention.sdpa_kernel(...)`, which says what kernel has to run.",
        remedy="Remove the scope to let the backend choose.",
        kind=_PROGRAM,
        example="""def model(q):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q)


inputs = (torch.randn(1, 2, 8, 16),)""",
    ),
    Page(
        code=Code.GRADIENT_STOPPED,
        title="A gradient is stopped inside of the attention",
        cause="A part of the attention runs under `torch.no_grad()` or is detached, and the rest has a gradient. A "
        "kernel has one backward for all of it.",
        remedy="Compute the whole attention in one grad mode, and detach q or k before it, or the output after it.",
        kind=_PROGRAM,
        example=f"""def model(q):
    with torch.no_grad():
        scores = q @ q.mT
    return F.softmax(scores, -1) @ q


{_Q}""",
    ),
    Page(
        code=Code.RESHAPED_IN_PLACE,
        title="A tensor of the attention changes its shape in place",
        cause="`t_()`, `resize_()`, `set_()` or a relative is called on q, k, v, or what they are views of.",
        remedy="Use the form that gives a new tensor: `x = x.t()`.",
        kind=_PROGRAM,
        example="""def model(q):
    q = q + 1
    out = F.scaled_dot_product_attention(q, q, q)
    q.transpose_(1, 2)
    return out, q


inputs = (torch.randn(1, 2, 8, 16),)""",
    ),
    Page(
        code=Code.CLOSED_TENSOR,
        title="q, k, v or the mask is no plain tensor",
        cause="It is nested, sparse, quantised or of another class that wraps tensors. What its ops do is not written "
        "in the graph.",
        remedy="Call attention on plain tensors, such as the result of a linear layer with quantised weights.",
        kind=ExampleKind.TOLD,
        example="A tensor of a class that wraps tensors is given as q. tests/passes/graph/test_closed.py has such calls.",
    ),
    Page(
        code=Code.AUTOCAST_BODY,
        title="An exported program's attention is under autocast",
        cause="`torch.export` keeps what runs under `with torch.autocast` as a body of its own, which is left as it is.",
        remedy="Export the model in the dtype that autocast would have given: `model.bfloat16()`, without autocast.",
        kind=ExampleKind.TOLD,
        example="A model whose `forward` has `with torch.autocast` is exported and rewritten.",
    ),
    Page(
        code=Code.OTHER_OUTPUT,
        title="A kernel's other output is used",
        cause="The model calls a kernel that gives more than the attention: a logsumexp, or the state of random "
        "numbers. Something reads that.",
        remedy="Call FlexAttention without `return_lse`, or `scaled_dot_product_attention`. Sinks that are made of a "
        "logsumexp are understood.",
        kind=_PROGRAM,
        example="""kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def model(q):
    out, lse = kernel(q, q, q)
    return out + lse[..., None]


inputs = (torch.randn(1, 2, 8, 16),)""",
    ),
    Page(
        code=Code.LIBRARY_KERNEL,
        title="The model calls a library's kernel",
        cause="The attention is a custom op of another library, or of yours. Nothing is known of it but its name.",
        remedy="Load the model with `attn_implementation='sdpa'` if there is such a way; the report says which. Else the "
        "library's kernel runs as before.",
        kind=_PROGRAM,
        example="""@torch.library.custom_op("my_kernels::attention_forward", mutates_args=())
def attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


attention_forward.register_fake(lambda q, k, v: torch.empty_like(q))


def model(q, k, v):
    return attention_forward(q, k, v)


inputs = tuple(torch.randn(1, 2, 8, 16) for _ in range(3))""",
    ),
    Page(
        code=Code.LIBRARY_ARGUMENTS,
        title="A library's kernel is called with arguments that say too little",
        cause="flash_attn's or xFormers' op is known, but one of its arguments (paged keys, a softcap with a mask, say) "
        "is not.",
        remedy="Load the model with `attn_implementation='sdpa'`. Else the library's kernel runs as before.",
        kind=ExampleKind.TOLD,
        example="It takes flash_attn or xFormers. tests/passes/spelling/test_library_calls.py has stand-ins of their ops.",
    ),
    Page(
        code=Code.FLEX_CALL,
        title="FlexAttention is asked for something special",
        cause="`kernel_options` asks Flex's own kernel for something, its scale is known at run time only (a head dim that is "
        "dynamic gives such a one), or the op was called in another way than PyTorch's function calls it.",
        remedy="Leave `kernel_options` out, give `scale=` as a plain number, and call `torch.nn.attention.flex_attention.flex_attention`.",
        kind=_PROGRAM,
        example="""from torch.nn.attention.flex_attention import flex_attention


def model(q):
    return flex_attention(q, q, q, kernel_options={"BLOCK_M": 64})


inputs = (torch.randn(1, 2, 128, 16),)""",
    ),
    Page(
        code=Code.FLEX_BLOCK_MASK,
        title="FlexAttention's block mask comes from outside",
        cause="Flex's kernel leaves out the blocks that its block mask lists. Those lists were not made in this graph, "
        "so nobody knows that they agree with `mask_mod`.",
        remedy="Call `create_block_mask(mask_mod, ...)` inside of the compiled function. Compile a model of transformers "
        "by `attn_compiler.integrations.transformers.compile_model`.",
        kind=_PROGRAM,
        example="""from torch.nn.attention.flex_attention import create_block_mask, flex_attention

block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")


def model(q):
    return flex_attention(q, q, q, block_mask=block_mask)


inputs = (torch.randn(1, 2, 256, 16),)""",
    ),
    Page(
        code=Code.WRITTEN_BY_HAND,
        title="The softmax is written out",
        cause="The weights are made by `exp` and a division by their sum, by `exp(scores - logsumexp)`, or by `log_softmax` and "
        "`exp`. Patterns start from a call of softmax, so the attention was not looked at.",
        remedy="Write `torch.softmax(scores, dim=-1)`, or call `scaled_dot_product_attention`. `torch.softmax` takes off the "
        "largest score itself.",
        kind=_PROGRAM,
        example=f"""def model(q):
    weights = (q @ q.mT).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ q


{_Q}""",
    ),
    Page(
        code=Code.LINEAR_ATTENTION,
        title="A layer of linear attention",
        cause="The layer has a state that sums up the past (Qwen3-Next, Kimi-Linear, Mamba-2), and no softmax. No lowering "
        "computes it yet, so it runs as the model's own plain ops, which the inner compiler compiles.",
        remedy="Install the library whose kernels transformers calls: flash-linear-attention, or mamba-ssm with causal-conv1d.",
        kind=_PROGRAM,
        example=f"""class LinearAttention(torch.nn.Module):
    def forward(self, q):
        return q @ (q.mT @ q)


model = torch.nn.Sequential(LinearAttention())


{_Q}""",
    ),
)
