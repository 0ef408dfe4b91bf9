"""docs/gain.md: whether a model gains on a card. Its figures are those of website/gains.py.

python -m website.gains --page > docs/gain.md
"""

from __future__ import annotations

from website import gains

_BEGIN = """# Will I gain?

Ask your own machine. `compare` times this backend, Inductor and the uncompiled model in turns, and leaves the model as it was:

```python
import attn_compiler

print(attn_compiler.compare(model, **inputs))
print(attn_compiler.comparer(training=True)(model, **inputs))  # forward, loss and backward
```

`python -m attn_compiler compare make.py:llama` does the same for a function of a file that gives the model and its inputs.

This page is made by `python -m website.gains --page > docs/gain.md`.

## Where there is most to gain

- **Padded or packed batches.** A dense mask makes a kernel compute the whole square and read a number for each pair.
- **Eager attention**: softcaps, sinks, ALiBi, T5's buckets. Without this, its scores are written to memory.
- **Decoding with a static cache.** Without this, each token reads the empty part of the cache, too.
- **Much padding**, with [`unpad`](unpad.md).

There is little to gain where attention is a small part of the time: short sequences, large MLPs. A causal model without a mask already
has a fast kernel on some cards. Linear attention has [lowerings](linear.md) for CPUs and Hopper.

## By model: measured on an H200
"""

_DENSE = """
## What a dense mask costs

A mask that nobody reads as what it is goes into PyTorch's attention as a tensor. On an H200 causal attention with such a tensor takes
so many times as long as with `is_causal=True`, forward / backward ([rows](../benchmarks/results/select_h200.csv)):
"""

_ELSEWHERE = """
Unsloth [measured](https://github.com/unslothai/unsloth/pull/11102) 2.0 to 4.5 times on a B200 at head dim 64, 1.3 to 2.9 at 128 and
5.6 to 8.8 at 256, and says: "The trigger is the mask, not the head dim."
"""

_CHOICE = """
## By card

What was measured is an H200, and an H100 in [runs on several GPUs](../benchmarks/results/parallel_gpus.csv). For other cards the kernels
are compiled and the choice is tested, and **no time was measured**. There Triton's kernels come first where a mask was proved, since they
read fewer bytes and visit fewer tiles. The table counts what is chosen for the attentions of [81 models](models.md):
"""

_END = """
- *Our kernels*: Triton's on every card, Gluon's on H100 and H200.
- *PyTorch's*: its own flash or cuDNN kernel, which compiled code is tied to.
- *PyTorch's, dense mask*: the mask was not proved, or no kernel of ours was chosen.
- *as it was*: nothing fits, and the report says why.

On a CPU, PyTorch's flash kernel serves most attentions already. There is a gain with [`unpad`](unpad.md), and in decoding with latent
attention ([rows](../benchmarks/results/mla_cpu.csv)).
"""


def page() -> str:
    """The page, with tables from the CSVs."""
    tables = (
        f"Times against `torch.compile(model)` with the same attention. {gains.summary()}. "
        "[Rows](../benchmarks/results/h200.csv), [method](measuring.md).",
        "Attention as `sdpa`:",
        "\n".join(gains.measured("sdpa")),
        "Attention as `eager`:",
        "\n".join(gains.measured("eager")),
        f"Beside FlexAttention on an H200, this backend is {gains.beside_flex()} ([rows](../benchmarks/results/flex_h200.csv)).",
    )
    dense = (_DENSE, "\n".join(gains.dense_mask()), _ELSEWHERE.rstrip())
    return "\n".join((_BEGIN, "\n\n".join(tables), *dense, _CHOICE, "\n".join(gains.chosen()), _END))
