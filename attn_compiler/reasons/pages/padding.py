"""AC6xx: why padding is computed, although `options={"unpad": True}` asks to leave it out. The model runs as it is."""

from __future__ import annotations

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.pages.page import ExampleKind, Page

_INPUTS = """inputs = (torch.randn(3, 10, 16), torch.arange(10) < torch.tensor([[4], [10], [7]]))
options = {"unpad": True}"""


def _model(
    ending: str, *, attention: str = "F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None, :])"
) -> str:
    return f"""def model(x, mask):
    q = x.view(3, 10, 2, 8).transpose(1, 2)
    y = {attention}
    y = y.transpose(1, 2).reshape(3, 10, 16)
    {ending}


{_INPUTS}"""


PAGES = (
    Page(
        code=Code.MIXES_POSITIONS,
        title="An op reads more than its own position",
        cause="Padding can be left out only where each position is computed by itself. This op adds up, sorts, "
        "convolves or normalises over positions or rows, so it reads padding, or nothing is known of it.",
        remedy="Multiply by the mask before a sum over positions. Batch norm, convolutions and `cumsum` over positions "
        "keep padding in.",
        kind=ExampleKind.PROGRAM,
        example=_model("return y.cumsum(1)"),
    ),
    Page(
        code=Code.PADDING_MASK,
        title="The mask is not one key padding that all layers share",
        cause="Each attention's mask has to be proved to be the same padding of keys, and besides only a diagonal or a "
        "window. What joins the scores has to go by the distance of query and key, or by numbers of the key's token. Here "
        "there is no mask, another tensor in another layer, another bias, a softcap, or an attention that is written out.",
        remedy="Pass `attention_mask`. Load the model with `attn_implementation='sdpa'`. Make masks inside of the "
        "compiled model.",
        kind=ExampleKind.PROGRAM,
        example=_model("return y", attention="F.scaled_dot_product_attention(q, q, q)"),
    ),
    Page(
        code=Code.PADDING_OTHER_CALLS,
        title="An attention is somewhere that packing does not reach",
        cause="It is in the body of a checkpoint, or is FlexAttention's, a library's or a DTensor's, or was not "
        "understood, or runs in FP8; or DistributedDataParallel's buckets cut the graph.",
        remedy="Train without gradient checkpointing. Load the model with `attn_implementation='sdpa'`. Give no "
        "`fp8_recipe`. With DistributedDataParallel, set `torch._dynamo.config.optimize_ddp = False`.",
        kind=ExampleKind.PROGRAM,
        example="""from torch.utils.checkpoint import checkpoint


def attention(q, mask):
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None, :])


def model(x, mask):
    q = x.view(3, 10, 2, 8).transpose(1, 2)
    return checkpoint(attention, q, mask, use_reentrant=False)


inputs = (torch.randn(3, 10, 16, requires_grad=True), torch.arange(10) < torch.tensor([[4], [10], [7]]))
options = {"unpad": True}""",
    ),
    Page(
        code=Code.PADDING_CACHE,
        title="A cache of keys and values is given back",
        cause="The model returns its keys and values, which a later call would read with their padding.",
        remedy="Call the model with `use_cache=False`.",
        kind=ExampleKind.PROGRAM,
        example=f"""def model(x, mask):
    for _ in range(2):
        q = x.view(3, 10, 2, 8).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None, :])
        x = y.transpose(1, 2).reshape(3, 10, 16)
    return x, q


{_INPUTS}""",
    ),
    Page(
        code=Code.PADDING_DRAWN,
        title="Random numbers are drawn at padding, too",
        cause="The same random numbers would have to be drawn twice: for real tokens, and for all. Dropout alone may be "
        "drawn for real tokens, where nothing reads it at padding; any other op that draws keeps padding in.",
        remedy="Do not return hidden states in training (`output_hidden_states=False`). Use a pointwise op that draws "
        "nothing in place of `rrelu`.",
        kind=ExampleKind.PROGRAM,
        example=f"""def model(x, mask):
    x = F.dropout(x, 0.5)
    q = x.view(3, 10, 2, 8).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None, :])
    return y.transpose(1, 2).reshape(3, 10, 16), x.cumsum(1)


{_INPUTS}""",
    ),
    Page(
        code=Code.PADDING_NO_KERNEL,
        title="No kernel leaves out other rows of the packed batch",
        cause="Packed rows are documents of one long row. Only kernels that leave out other documents make that "
        "worthwhile: `rows` on a CPU, `hopper` or `triton` on a GPU. Each refused, for instance because of "
        "float64 on a GPU or dropout on a CPU.",
        remedy="The reasons stand in the report. Use bfloat16 or float32, and `attention_dropout=0.0` on a CPU.",
        kind=ExampleKind.PROGRAM,
        example=_model(
            "return y",
            attention="F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None, :], dropout_p=0.1)",
        ).replace("torch.randn(3, 10, 16)", "torch.randn(3, 10, 16).double()"),
    ),
    Page(
        code=Code.PADDING_TOKENS,
        title="q, k and v are not of the tokens that the mask is of",
        cause="Queries and keys come from different inputs (cross attention), or from a cache, or are laid out "
        "otherwise.",
        remedy="Call a decoder with `use_cache=False`. Cross attention keeps padding in.",
        kind=ExampleKind.PROGRAM,
        example="""def model(x, memory, mask):
    q, k = (t.view(3, 10, 2, 8).transpose(1, 2) for t in (x, memory))
    y = F.scaled_dot_product_attention(q, k, k, attn_mask=mask[:, None, None, :])
    return y.transpose(1, 2).reshape(3, 10, 16)


mask = torch.arange(10) < torch.tensor([[4], [10], [7]])
inputs = (torch.randn(3, 10, 16), torch.randn(3, 10, 16), mask)
options = {"unpad": True}""",
    ),
    Page(
        code=Code.PADDING_SIZES,
        title="A size is asked for that packing would change",
        cause="The model computes with the number of positions, or has a symbolic size besides those of the batch.",
        remedy="Mark other sizes static, or compile with `dynamic=False`.",
        kind=ExampleKind.TOLD,
        example="A model has a symbolic number of heads. It takes dynamic shapes, which `explain` has only after a second call.",
    ),
    Page(
        code=Code.PADDING_WRITTEN,
        title="What is packed is written in place",
        cause="A tensor is read as packed in one place and written in another, so the two forms would not agree.",
        remedy="Write the in-place op as one that gives a new tensor.",
        kind=ExampleKind.PROGRAM,
        example=f"""def model(x, mask):
    q = x.view(3, 10, 2, 8).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None, :])
    x.zero_()
    return y.transpose(1, 2).reshape(3, 10, 16)


{_INPUTS}""",
    ),
    Page(
        code=Code.PADDING_OUT_OF_REACH,
        title="A value that packing needs is not in the graph, or is read by something that is not looked into",
        cause="Packing takes tensors of the captured graph. Here one exists only inside of a call, or a body reads it.",
        remedy="Call the model without higher-order ops around it (checkpointing, `torch.cond`).",
        kind=ExampleKind.TOLD,
        example="A mask is made inside of a call that Dynamo keeps whole.",
    ),
)
