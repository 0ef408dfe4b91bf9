"""Tables of docs/supported.md: which lowering runs where, on what, and which one an attention gets. Asked of the lowerings themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings import LOWERINGS, by_name
from attn_compiler.options.options import Options
from attn_compiler.passes.writing.select import decide
from attn_compiler.spec import masks, scores
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.fp8_recipe import CurrentScaling, Fp8Recipe
from attn_compiler.spec.target import Target
from website import triton_table
from website.examples import attention, causal

#: what each machine is called, and its dtype in the table
_CALLED: dict[str, tuple[str, str]] = {
    "CPU": ("CPU", "float32"),
    "sm75": ("Turing: T4, RTX 20", "float16"),
    "sm80": ("Ampere: A100", "bfloat16"),
    "sm89": ("Ada: L4, L40, RTX 40", "bfloat16"),
    "sm90": ("Hopper: H100, H200", "bfloat16"),
    "sm100": ("Blackwell: B200", "bfloat16"),
    "sm120": ("Blackwell: RTX 50", "bfloat16"),
}
#: pages about a kernel
_PAGES: dict[str, str] = {
    "cudnn": "cudnn.md",
    "cudnn_fp8": "fp8_kernels.md",
    "decode": "decode.md",
    "fa4": "fa4.md",
    "hopper": "hopper.md",
    "hopper_fp8": "fp8_kernels.md",
    "rows": "choosing.md",
    "triton": "kernels.md",
}
#: the model's own computation
_STAYS = "untouched"

_PER_TENSOR = CurrentScaling(granularity="tensor")
_B, _K = Index("b"), Index("k")
_FULL = masks.Dense(shape=(2, 1, 2048, 2048), dtype="bool")
_ROWS = masks.Dense(shape=(2, 1, 1, 2048), dtype="bool")

#: with every optional library
MACHINES: dict[str, Target] = {
    "CPU": Target.fake(device="cpu"),
    "sm75": Target.fake(sm=75),
    "sm80": Target.fake(sm=80, cudnn_frontend="1.23.0"),
    "sm89": Target.fake(sm=89, cudnn_frontend="1.23.0"),
    "sm90": Target.fake(sm=90, cudnn_frontend="1.23.0", flash_attn_4="4.0.0b36"),
    "sm100": Target.fake(sm=100, cudnn_frontend="1.23.0", flash_attn_4="4.0.0b36"),
    "sm120": Target.fake(sm=120, cudnn_frontend="1.23.0"),
}
#: without any
BARE = {name: dataclasses.replace(target, cudnn_frontend="", flash_attn_4="") for name, target in MACHINES.items()}
DTYPES = ("bfloat16", "float16", "float32", "float64")
HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256, 512, 1024)


def _site(**changes: object) -> AttentionSpec:
    """2 × 16 heads × 2048 × 64, unless told otherwise."""
    return attention(**{"heads": 16, "length": 2048, **changes})  # type: ignore[arg-type]


def _masked(kind: masks.MaskKind, dense: masks.Dense = _FULL) -> masks.MaskSpec:
    return masks.MaskSpec(kinds=(kind,), dense=dense)


_WINDOW = masks.SlidingWindow(left=255, right=0)
_PADDING = masks.KeyPadding(condition=ix.as_bool(Load("attention_mask", (_B, _K), "int")))
_LENGTHS = masks.KeyBound(side="last", bound=Load("lengths", (_B,), "int"))
_DOCUMENTS = masks.Document(of_key=Load("documents", (_B, _K), "int"))

#: what an attention may have, and one that has it
FEATURES: dict[str, dict[str, object]] = {
    "training": {"needs_grad": True},
    "dropout": {"needs_grad": True, "dropout": 0.125},
    "GQA: fewer key and value heads": {"heads_kv": 4},
    "a different head dim of v": {"head_dim": 128, "head_dim_v": 64},
    "causal": {"mask": causal()},
    "causal, bottom-right": {"mask": causal(masks.Alignment.BOTTOM_RIGHT), "length": 1024, "length_kv": 2048},
    "sliding window": {"mask": _masked(_WINDOW)},
    "padding": {"mask": _masked(_PADDING, _ROWS)},
    "a length for each row": {"mask": _masked(_LENGTHS, _ROWS)},
    "documents": {"mask": _masked(_DOCUMENTS)},
    "unrecognised mask": {"mask": masks.MaskSpec(dense=_FULL, reason="it comes in from outside of this graph")},
    "learned bias, training": {
        "needs_grad": True,
        "bias": scores.DenseBias(shape=(1, 16, 2048, 2048), dtype="bfloat16"),
    },
    "softcap": {"changes": (scores.Softcap(cap=50.0),)},
    "sinks": {"changes": (scores.Sinks(requires_grad=False),)},
    "decoding: one query": {"length": 1, "length_kv": 2048},
    "dynamic shapes": {"length": "s0", "length_kv": "s0"},
    "returned attention weights": {"returns_weights": True},
}
#: on a site of the model's own spelling
_SPELLED_OUT = {"decomposed": True}


def _dtype_of(lowering: str, target: Target) -> str | None:
    """The first dtype that a lowering takes of a plain attention there; None if it takes none."""
    return next((dtype for dtype in DTYPES if _takes(lowering, target, dtype=dtype)), None)


def _takes(lowering: str, target: Target, **changes: object) -> bool:
    return not by_name(lowering).why_not(_asked(lowering, target, changes), target)


def _asked(lowering: str, target: Target, changes: Mapping[str, object]) -> AttentionSpec:
    spec = _site(**{"device": target.device, **_usual(lowering), **changes, **_always(lowering)})
    bias = spec.score.bias
    if bias is None or bias.dtype == spec.dtype:
        return spec
    same = tuple(dataclasses.replace(x, dtype=spec.dtype) if x is bias else x for x in spec.score.changes)
    return dataclasses.replace(spec, score=dataclasses.replace(spec.score, changes=same))


def _usual(lowering: str) -> dict[str, object]:
    """What a lowering needs where nothing else is said: FP8 a recipe, and `rows` a mask."""
    if lowering.endswith("_fp8"):
        return {"fp8": Fp8Recipe(scaling=_PER_TENSOR) if lowering == "cudnn_fp8" else Fp8Recipe()}
    return {"mask": causal()} if lowering == "rows" else {"length_kv": 2048} if lowering == "decode" else {}


def _always(lowering: str) -> dict[str, object]:
    """`decode` is asked about one query, whatever else."""
    return {"length": 1} if lowering == "decode" else {}


def of_lowerings() -> str:
    """Say of each kernel its machines, dtypes and head dims, and what it does not take."""
    rows = []
    for lowering in _names():
        dtypes = {name: found for name, target in MACHINES.items() if (found := _dtype_of(lowering, target))}
        if not dtypes:
            continue
        # The last machine that it is made for stands for all.
        name = "sm90" if "sm90" in dtypes else next(reversed(dtypes))
        target, dtype = MACHINES[name], dtypes[name]
        taken = [each for each in DTYPES if any(_takes(lowering, MACHINES[m], dtype=each) for m in dtypes)]
        wide = [n for n in HEAD_DIMS if _takes(lowering, target, dtype=dtype, head_dim=n)]
        lacks = [name for name, changes in FEATURES.items() if not _takes(lowering, target, dtype=dtype, **changes)]
        most = f"{wide[-1]}" if wide[-1] < HEAD_DIMS[-1] else "any"
        rows.append(
            [_linked(lowering), ", ".join(dtypes), f"{', '.join(taken)}; {most}", "; ".join(lacks) or "nothing"]
        )
    return _table(["kernel", "machines", "dtypes; head dims up to", "does not take"], rows)


def _names() -> Iterable[str]:
    # What k and v are made of decides these two, and nothing speaks against the last one.
    return (x.name for x in LOWERINGS if x.name not in ("decode_latent", "absorbed", "untouched", "reference_fp8"))


def _chosen(target: Target, dtype: str, changes: Mapping[str, object]) -> str:
    spec = _asked("", target, {"dtype": dtype, **changes})
    if changes.get("changes"):
        spec = dataclasses.replace(spec, **_SPELLED_OUT)
    return decide(spec, target, Options()).lowering


def of_machines() -> str:
    """A heading and a table for each machine, and one for all that have the same."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, (_, dtype) in _CALLED.items():
        alike.setdefault((_of_machine(name), dtype), []).append(name)
    parts = []
    for (table, dtype), names in alike.items():
        heading = "; ".join(_CALLED[name][0] for name in names)
        which = "In" if names == ["CPU"] else f"{', '.join(names)}, in"
        parts.append(f"## {heading}\n\n{which} {dtype}.\n\n{table}")
    return "\n\n".join(parts)


def _of_machine(name: str) -> str:
    """Each kind of attention with its kernel, and with another one that optional libraries bring."""
    dtype = _CALLED[name][1]
    rows, differ = [], False
    plain: dict[str, dict[str, object]] = {"no mask": {}}
    for feature, changes in (plain | FEATURES).items():
        bare, full = (_chosen(targets[name], dtype, changes) for targets in (BARE, MACHINES))
        differ = differ or bare != full
        rows.append([feature, _ticked(bare), _linked(full) if full != bare else ""])
    heads = ["attention", "kernel", "with the extras fa4 and cudnn"]
    wide = len(heads) if differ else 2
    return _table(heads[:wide], [row[:wide] for row in rows])


def _ticked(lowering: str) -> str:
    # A line does not break after the tick.
    return "–" if lowering == _STAYS else f"✓&nbsp;{_linked(lowering)}"


def _linked(lowering: str) -> str:
    return f"[`{lowering}`]({_PAGES[lowering]})" if lowering in _PAGES else f"`{lowering}`"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def releases() -> str:
    """Say of each torch and Triton which of our kernels were tried with them."""
    heads = ["torch", "Triton", "ran on a GPU", "compiled for one", "right in the interpreter"]
    return _table(heads, triton_table.by_release())


def versions() -> str:
    """What the rules of versions say, in their own words."""
    lacking = (
        ("triton", Target.fake(triton="")),
        ("sdpa_cudnn", Target.fake(cudnn=0)),
        ("cudnn", Target.fake()),
        ("fa4", Target.fake()),
        ("hopper", Target.fake(triton="3.5.0")),
    )
    rules = {name: by_name(name).unavailable(target)[0].rule for name, target in lacking}
    return "\n".join(f"- `{name}`: {rule}" for name, rule in rules.items())
