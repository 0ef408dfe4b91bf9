"""Programs that say nothing, by the kinds that are known: `Left`. Whatever else keeps a program from being compared is a finding.

Eager can't run it or gives no finite numbers, or a row has no allowed key where the text fills with a finite number (a kernel gives 0
there, eager the mean of v: docs, "Masked rows"). Or torch.compile without us goes wrong, too, in a way that is known of it: an error that
is not listed here may as well be of the machine (a process that can't use its GPU), and would hide every program behind it.
"""

from __future__ import annotations

import re


class Left(Exception):
    """A program that says nothing; the text is the kind, which the tally counts. is_last: this process can run no other program."""

    def __init__(self, text: str, *, is_last: bool = False) -> None:
        super().__init__(text)
        self.is_last = is_last


KEYLESS = "rows without keys beside a finite number"
NOT_FINITE = "eager gives NaN or Inf"
OTHER_SHAPES = "eager gives other shapes in float64"
WRONG_TOO = "torch.compile without us is wrong, too"

#: what eager raises for programs that make no sense
_EAGER = (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError, OverflowError, NotImplementedError)
#: what such an error never speaks of: it is the machine's, or the fuzzer's
_MACHINE = re.compile(
    r"CUDA|cuDNN|cuBLAS|device-side|fork|out of memory|allocat|driver|Triton|No such file|not a tensor", re.IGNORECASE
)
#: the name of a tensor's type, which speaks of no error of the machine
_TENSOR_TYPE = re.compile(r"CUDA\w+Type|torch\.cuda\.\w+Tensor|\w*Cudnn\w*Backward\d*")
#: errors of a GPU's kernels that eager has: an index beyond its tensor, a mask that PyTorch hands to cuDNN unaligned
#: (https://github.com/pytorch/pytorch/issues/134001)
_KERNELS = ("device-side assert triggered", "misaligned address")
#: errors of cuDNN's SDPA in torch 2.11, which eager calls of itself: of queries expanded along the batch, and of an empty batch
_CUDNN = {
    "The stride for the last dimension corresponding to the embedding size per head should be 1 for output": (
        "the strides of an expanded query"
    ),
    "'NoneType' object has no attribute 'stride'": "no output for an empty batch",
}
#: what torch.compile says, without us, of programs that it can't compile
_TORCH = (
    # A comparison of symbolic sizes as an argument.
    "argument 'is_causal' must be bool, not SymBool",
    # A `.data` write to what a checkpoint saved.
    "variables needed for gradient computation has been modified by an inplace operation",
    # Symbolic strides of what is reshaped.
    "view size is not compatible with input tensor's size and stride",
    # A write through `.data` to what was a view of a view (torch 2.11).
    "Cannot view a tensor with shape",
)


#: `torch.compile(backend="aot_eager")` says it of a reshape of what `roll` gave: the fake tensor is contiguous, the real one has the
#: strides of what was rolled
_ROLLED = "view size is not compatible with input tensor's size and stride"


def of_roll(text: str, *, source: str, inner: str) -> Left | None:
    """The discard of a program that reads a rolled tensor in place, in the place where without us it is copied first."""
    if _ROLLED not in text or ".roll(" not in source or inner != "aot_eager":
        return None
    return Left("torch.compile without us: the strides of a roll")


def of_eager(error: BaseException) -> Left | None:
    """The discard that an error of eager is; None for one that is not known."""
    kernel = next((words for words in _KERNELS if words in str(error)), None)
    if kernel is not None:
        return Left(f"eager: {kernel}", is_last=True)
    cudnn = next((what for words, what in _CUDNN.items() if words in str(error)), None)
    if cudnn is not None:
        return Left(f"eager: cuDNN gives {cudnn}")
    # What follows names the functions that C++ was in, an allocator among them.
    text = _TENSOR_TYPE.sub("", str(error).split("Exception raised from")[0].strip())
    if not isinstance(error, _EAGER) or _MACHINE.search(text):
        return None
    words = re.sub(r"\[[^]]*\]|-?\d+(\.\d+)?", "", text.splitlines()[0] if text else "")
    return Left(f"eager raises {type(error).__name__}: {' '.join(words.split())[:70]}")


def of_torch(text: str) -> Left | None:
    """The discard that an error of torch.compile without us is (type and first lines); None for one that is not known."""
    found = next((pattern for pattern in _TORCH if pattern in text), None)
    return None if found is None else Left(f"torch.compile without us: {found}")
