"""AC9xx: errors that are raised."""

from __future__ import annotations

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.pages.page import ExampleKind, Page

_DUMP = "`options={'dump_dir': 'attn_dumps'}` writes the graphs before and after each pass. Please report it with that dump."

PAGES = (
    Page(
        code=Code.UNKNOWN_OPTION,
        title="There is no such option",
        cause="A key of `options=` is neither one of ours nor one of Inductor's. It is often misspelled, and the "
        "message has the nearest names.",
        remedy="Take a name from the message. `attn_compiler.Options` documents ours, `torch._inductor.list_options()` "
        "lists Inductor's.",
        kind=ExampleKind.RAISES,
        example='attn_compiler.explainer(options={"lowerin": "math"})',
    ),
    Page(
        code=Code.INVALID_OPTION,
        title="An option can't have this value",
        cause="A value of `options=`, of `mode=` or of an `Fp8Recipe` is of another type, or not one of those that are "
        "allowed.",
        remedy="Give what the message says that the option takes.",
        kind=ExampleKind.RAISES,
        example='attn_compiler.explainer(options={"unpad": "yes"})',
    ),
    Page(
        code=Code.UNSUPPORTED_TORCH,
        title="The installed torch is not supported",
        cause="The backend uses parts of `torch.compile` that older releases do not have. A release that is newer than what "
        "this version was tried with is not refused: the report says so.",
        remedy="Install a torch that is new enough.",
        kind=ExampleKind.RAISES,
        example='raise attn_compiler.UnsupportedTorch(found="2.10.0", minimum="2.11")',
    ),
    Page(
        code=Code.LOWERING_UNAVAILABLE,
        title="The lowering that was asked for can't run on this machine",
        cause="`options={'lowering': NAME}` asks for one kernel alone, and the machine has no such GPU or library.",
        remedy="Leave the option out, and the best that is available is taken. `python -m attn_compiler doctor` lists "
        "what is.",
        kind=ExampleKind.RAISES,
        example="""model = torch.compile(
    lambda q: F.scaled_dot_product_attention(q, q, q), backend="attn_compiler", options={"lowering": "sdpa_flash"}
)
model(torch.randn(1, 2, 8, 16))""",
    ),
    Page(
        code=Code.FP8_RECIPE_UNUSED,
        title="The FP8 recipe applies to no attention",
        cause="The patterns in the recipe's `exclude` match the module path of every attention of a graph.",
        remedy="Give other patterns, or no recipe. `attn_compiler.explain(model, ...)` lists the paths.",
        kind=ExampleKind.RAISES,
        example="""recipe = attn_compiler.Fp8Recipe(exclude=("*",))
model = torch.compile(
    lambda q: F.scaled_dot_product_attention(q, q, q), backend="attn_compiler", options={"fp8_recipe": recipe}
)
model(torch.randn(1, 2, 8, 16))""",
    ),
    Page(
        code=Code.FP8_STATE,
        title="FP8 histories can't be loaded",
        cause="`load_fp8_state_dict` was given histories with other names or shapes than those of the compiled graphs, "
        "or with values that no history can hold. Nothing was loaded.",
        remedy="Run the model once before loading, so that its histories are there. Or load nothing: delayed scales are "
        "found anew in the first steps.",
        kind=ExampleKind.RAISES,
        example='attn_compiler.load_fp8_state_dict({"layers.0/amax": torch.zeros(16, 3)})',
    ),
    Page(
        code=Code.NOT_AN_EXPORTED_PROGRAM,
        title="rewrite was given no exported program",
        cause="`attn_compiler.rewrite` takes what `torch.export.export` returns.",
        remedy="Export the model first. A model that is not exported is compiled by `torch.compile(model, "
        "backend='attn_compiler')`.",
        kind=ExampleKind.RAISES,
        example="attn_compiler.rewrite(torch.nn.Linear(2, 2))",
    ),
    Page(
        code=Code.EXPORT_UNSUPPORTED,
        title="An exported program can't have that",
        cause="`attn_compiler.rewrite` was asked for `verify`, `unpad` or an option of Inductor, or the program has its "
        "backward in it.",
        remedy="Do what the message says.",
        kind=ExampleKind.RAISES,
        example="""program = torch.export.export(torch.nn.Linear(2, 2), (torch.randn(1, 2),))
attn_compiler.rewrite(program, {"verify": True})""",
    ),
    Page(
        code=Code.PASS_FAILED,
        title="A pass failed",
        cause="An exception of ours, which `options={'strict': True}` raises. Without it this is a warning, and what "
        "the pass failed on is left as the model made it.",
        remedy=_DUMP,
        kind=ExampleKind.TOLD,
        example="It takes a fault of this package. tests/passes/graph/test_faults.py makes one in each pass.",
    ),
    Page(
        code=Code.COMPILE_FAILED,
        title="Something failed outside of the passes",
        cause="Something of ours failed around the passes, or the inner compiler failed on the graph that they made. "
        "Without `strict` the model's own graph is compiled, and this is a warning.",
        remedy=_DUMP,
        kind=ExampleKind.TOLD,
        example="It takes a fault of this package or of the inner compiler. tests/test_always_runs.py makes such faults.",
    ),
    Page(
        code=Code.VERIFY_FAILED,
        title="A pass broke the graph",
        cause="Between passes the graph is checked (`check_invariants`), and something no longer held.",
        remedy=_DUMP,
        kind=ExampleKind.TOLD,
        example="It takes a fault of this package. tests/passes/writing/test_verify.py breaks graphs in each way that is checked.",
    ),
    Page(
        code=Code.VERIFICATION_MISMATCH,
        title="What was computed is not what the model computes",
        cause="`options={'verify': True}` compared masks, outputs and gradients of the first step with the model's own, "
        "and one differs by more than rounding.",
        remedy="Do not use the result. `options={'lowering': 'untouched'}` leaves every attention as the model made it. "
        + _DUMP,
        kind=ExampleKind.TOLD,
        example="It takes a fault of this package. tests/verifying plants such faults.",
    ),
    Page(
        code=Code.CUDNN_REFUSED,
        title="cuDNN runs no plan",
        cause="cuDNN did not build a graph when it was run, or can't be used.",
        remedy="Leave cuDNN's graphs out: `options={'lowerings': [...]}` with the others. Or install another cuDNN.",
        kind=ExampleKind.TOLD,
        example="It takes a GPU and the extra `[cudnn]`, with a shape that cuDNN refuses only when it runs.",
    ),
    Page(
        code=Code.CONTEXT_PARALLEL_UNSUPPORTED,
        title="Something in the model would be wrong on a part of the sequence",
        cause="With `options={'context_parallel': ...}` each rank has a part of every sequence. Something besides attention reads more "
        "than its own position, or an attention can't be computed that way. Each rank would compute something else.",
        remedy="Do what the message says, or compile without `context_parallel`.",
        kind=ExampleKind.TOLD,
        example="It takes several processes.",
    ),
    Page(
        code=Code.CONTEXT_PARALLEL_INPUT,
        title="A tensor can't be cut over ranks, or put together again",
        cause="A method of `ContextParallel` was given a tensor, a name or a length that does not fit its layout.",
        remedy="Give what the message says: most often lengths that the layout divides evenly.",
        kind=ExampleKind.TOLD,
        example="It takes several processes. tests/context_parallel has such calls.",
    ),
    Page(
        code=Code.REPORT_NOT_SAVED,
        title="A report could not be written to a file",
        cause="`report.save(path)` was given a path that can't be written: its folder is not there, or is read-only.",
        remedy="Give another path. `report.to_html()` gives the text of the page.",
        kind=ExampleKind.RAISES,
        example='attn_compiler.reports().save("a/folder/that/is/not/there/report.html")',
    ),
    Page(
        code=Code.KERNEL_FAILED,
        title="A kernel was not compiled, or did not start",
        cause="Triton, CUDA or a library refused one of our kernels. Without `strict` this is a warning: the call is computed another way, "
        "and the graph is compiled again without the kernel.",
        remedy="Look at the cause in the message: an old driver, or a release of Triton that is newer than this package. "
        "`python -m attn_compiler doctor` tells both. Otherwise please report it.",
        kind=ExampleKind.TOLD,
        example="It takes a kernel that fails. tests/test_kernel_failures.py plants such failures.",
    ),
)
