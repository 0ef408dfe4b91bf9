"""AC1xx: the machine and its libraries."""

from __future__ import annotations

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.pages.page import ExampleKind, Page

PAGES = (
    Page(
        code=Code.SWITCHED_OFF,
        title="PyTorch's switch for this kernel is off",
        cause="`torch.backends.cuda.enable_flash_sdp(False)`, one of its relatives, or a `sdpa_kernel` context was in "
        "force when the graph was compiled. The backend asks the same switches as `scaled_dot_product_attention` "
        "does.",
        remedy="Switch the kernel on again, or compile outside of the context. If you switched it off on purpose, there "
        "is nothing to do.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(), Target.fake(disabled=frozenset({"flash"})))',
    ),
    Page(
        code=Code.DEVICE,
        title="The kernel runs on another device",
        cause="Some kernels need an NVIDIA GPU, others run on a CPU alone. On a CPU this is the usual reason for most "
        "lowerings, and nothing is wrong.",
        remedy="`model.to('cuda')`, and its inputs too, if there is a GPU. `python -m attn_compiler doctor` says what "
        "each device can run.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_flash", attention(device="cpu"), Target.fake(device="cpu"))',
    ),
    Page(
        code=Code.ARCHITECTURE,
        title="The GPU is of another architecture",
        cause="A kernel is made of the instructions of some architectures, or was tried on no other. `sm90` is Hopper "
        "(H100, H200), `sm80` Ampere's A100, `sm100` Blackwell of data centers.",
        remedy="There is nothing to do: the next kernel in the order serves. The page *Supported* says which kernel runs "
        "where.",
        kind=ExampleKind.DECISION,
        example='why_not("hopper", attention(), Target.fake(sm=80))',
    ),
    Page(
        code=Code.SEVERAL_ARCHITECTURES,
        title="The process sees GPUs of several architectures",
        cause="FlashAttention-4 asks the current device once, and takes the answer for all of them.",
        remedy="Show the process GPUs of one kind: `CUDA_VISIBLE_DEVICES=0,1`.",
        kind=ExampleKind.DECISION,
        example='why_not("fa4", attention(), Target.fake(mixed_gpus=True, flash_attn_4="4.0.0b36"))',
    ),
    Page(
        code=Code.LIBRARY_MISSING,
        title="A library is not installed",
        cause="The kernel comes from a package that is not there. Optional ones are flash-attn-4 and cuDNN's frontend. "
        "Triton comes with torch's CUDA builds.",
        remedy="Install it if you want that kernel: `pip install 'attn_compiler[fa4]'`, `pip install "
        "'attn_compiler[cudnn]'` or `pip install triton`. Without it the next kernel serves.",
        kind=ExampleKind.DECISION,
        example='why_not("fa4", attention(), Target.fake())',
    ),
    Page(
        code=Code.LIBRARY_VERSION,
        title="A library is of a version that is not taken",
        cause="The kernel was written for some versions of its library. Of an older one functions are missing. A newer "
        "beta may have changed them.",
        remedy="Install a version that the rule names.",
        kind=ExampleKind.DECISION,
        example='why_not("triton", attention(), Target.fake(triton="3.1.0"))',
    ),
    Page(
        code=Code.KNOWN_BUG,
        title="The kernel is known to be wrong here",
        cause="This version of the library computes such an attention wrong, crashes or hangs on this GPU. The rule has "
        "the link to where that is told. The list is `attn_compiler/lowerings/shared/known_bad.py`.",
        remedy="Update the library, as the remedy in the report says. Until then another kernel serves, and its numbers "
        "are right.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_cudnn", attention(), Target.fake(cudnn=91000))',
    ),
    Page(
        code=Code.DETERMINISTIC,
        title="Deterministic algorithms are asked for",
        cause="`torch.use_deterministic_algorithms(True)` was in force, and cuDNN's kernels add up gradients in no "
        "fixed order.",
        remedy="`torch.use_deterministic_algorithms(False)` if speed matters more. Else there is nothing to do.",
        kind=ExampleKind.DECISION,
        example='why_not("sdpa_cudnn", attention(), Target.fake(deterministic=True))',
    ),
    Page(
        code=Code.PACKAGED,
        title="The kernel can't go into an exported program",
        cause="`attn_compiler.rewrite` makes a program that runs where this package is not installed. This kernel is "
        "launched from Python by this package.",
        remedy="There is nothing to do: PyTorch's own kernels go into the program. `torch.compile(model, "
        "backend='attn_compiler')` takes all.",
        kind=ExampleKind.DECISION,
        example='why_not("hopper", attention(length=4096), Target.fake(packaged=True), chosen=True)',
    ),
    Page(
        code=Code.INTERPRETER,
        title="Triton's interpreter is wrong in bfloat16",
        cause="With `TRITON_INTERPRET=1` kernels run in Triton's interpreter, for debugging. It multiplies the bits of "
        "bfloat16 as integers.",
        remedy="Unset `TRITON_INTERPRET`, or call `model.float()`.",
        kind=ExampleKind.DECISION,
        example='why_not("triton", attention(), Target.fake(triton_interpreted=True))',
    ),
    Page(
        code=Code.NO_PLAN,
        title="cuDNN builds no plan",
        cause="Nothing spoke against cuDNN until it was asked to build this graph, and then it refused. What it said "
        "stands in the report.",
        remedy="A newer cuDNN may build it. Until then another kernel serves.",
        kind=ExampleKind.TOLD,
        example="It takes a GPU and the extra `[cudnn]`. cuDNN then refuses a shape that its documentation does not speak of.",
    ),
    Page(
        code=Code.NOT_COMPILED,
        title="The kernel does not compile",
        cause="Every check allowed the kernel for this attention, but it could not be compiled, or did not start. "
        "The report has the message.",
        remedy="Another kernel serves. If the installed Triton, or FlashAttention-4, is newer than what this package was tried with, "
        "install one that it names in `doctor`. Otherwise please report it.",
        kind=ExampleKind.TOLD,
        example="It takes a kernel that fails. tests/test_kernel_failures.py plants such failures.",
    ),
    Page(
        code=Code.MEMORY,
        title="The kernel wants too much memory beside the tensors",
        cause="The backward of a cuDNN graph with a bias holds a number for each score.",
        remedy="Use a smaller batch or shorter sequences. Else another kernel serves.",
        kind=ExampleKind.DECISION,
        example="""why_not(
    "cudnn",
    attention(
        batch=64, heads=32, length=4096, needs_grad=True, bias=scores.DenseBias(shape=(1, 32, 4096, 4096), dtype="bfloat16")
    ),
    Target.fake(cudnn_frontend="1.23.0"),
)""",
    ),
)
