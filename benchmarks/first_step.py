"""One fresh process of `bench_first_step`: build a model, call it compiled, and print what its first steps took, as JSON.

    python -m benchmarks.first_step '{"model": "llama", "call": "prefill", "length": 128, "batch": 2, "size": "small",
                                      "device": "cpu", "side": "attn_compiler"}'

first_seconds: to the end of the first forward (or forward and backward), with the import of what compiles. cpu_seconds: CPU time of the
process meanwhile, in all of its threads. import_seconds: of first_seconds, the import of our package. second_seconds: of the second step.
further_seconds: of a step at each further length. passes_seconds: in our passes. kernels_ahead, kernels_late: of our own Triton kernels,
those that threads compiled while the graph was, and those that their first launch had to; none of those were on disk. from_cache: graphs
whose rewrite was on disk, of all graphs. sites: by lowering.

Models are tables of first_step_models.toml: the heads, head dims and kinds of layers of the real ones, with 8 layers and as few weights as
that leaves, for any length.
"""

from __future__ import annotations

import contextlib
import copy
import cProfile
import importlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from benchmarks import harness, models
from benchmarks.models import Size, padding_mask

Kind = Literal["decoder", "encoder", "text2text", "audio", "image"]
Mask = Literal["ones", "right", "left"]

LAYERS: Mapping[Size, int] = {"full": 8, "small": 2}
#: tokens of a prompt beside an image, and of Whisper's text
_TEXT = 448
#: "small", divides the widths of a model, not its heads' dims
_SMALLER = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """How a model is called. mask: as a tokenizer makes it (int64, 1 for a token): all of it, or padded on that side; None: no mask is
    given. checkpointing: gradient checkpointing of every layer, not reentrant."""

    name: str
    training: bool = False
    mask: Mask | None = None
    use_cache: bool = False
    checkpointing: bool = False


CALLS: Mapping[str, Call] = {
    call.name: call
    for call in (
        Call(name="prefill"),
        Call(name="prefill_cache", use_cache=True),
        Call(name="prefill_ones", mask="ones"),
        Call(name="prefill_left", mask="left"),
        Call(name="prefill_right", mask="right"),
        Call(name="train", training=True),
        Call(name="train_ones", training=True, mask="ones"),
        Call(name="train_right", training=True, mask="right"),
        Call(name="train_left", training=True, mask="left"),
        Call(name="train_checkpoint", training=True, checkpointing=True),
        Call(name="train_right_checkpoint", training=True, mask="right", checkpointing=True),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """classes: of the configuration and of the model. config: arguments of the configuration. wide: those of them that "small" has an
    eighth of. per_layer: those that say how many layers. positions: those that are the length, and by how much more: RoBERTa's kind counts
    from two. call: arguments of every call. on_cpu: it is measured there, too."""

    name: str
    kind: Kind
    classes: tuple[str, str]
    config: Mapping[str, Any]
    wide: tuple[str, ...]
    per_layer: tuple[str, ...] = ("num_hidden_layers",)
    positions: Mapping[str, int] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    on_cpu: bool = False


MODELS: Mapping[str, Model] = {
    name: Model(name=name, **given) for name, given in models.read("first_step_models.toml").items()
}


def applies(model: Model, call: Call) -> bool:
    """Only text has padding here, only a decoder a cache of its own."""
    return not (call.mask and model.kind in ("audio", "image")) and not (call.use_cache and model.kind != "decoder")


def arguments(model: Model, size: Size, length: int) -> dict[str, Any]:
    """Of the configuration."""
    found = {**copy.deepcopy(dict(model.config)), **{name: length + more for name, more in model.positions.items()}}
    if size == "small":
        found |= {name: max(1, found[name] // _SMALLER) for name in model.wide}
    return found | dict.fromkeys(model.per_layer, LAYERS[size])


def build(name: str, call: Call, size: Size, length: int, *, dtype: torch.dtype, device: str) -> nn.Module:
    """The model with random weights, as the call wants it. Raises KeyError for an unknown one."""
    model, given = MODELS[name], arguments(MODELS[name], size, length)
    with torch.device(device):
        torch.manual_seed(0)
        config, of_model = model.classes
        if model.kind == "image":
            import diffusers

            made: nn.Module = getattr(diffusers, of_model)(sample_size=max(_sides_of(length)), **given)
        else:
            import transformers

            # The implementation of attention is transformers' choice, as for users.
            made = getattr(transformers, of_model)(getattr(transformers, config)(**given))
    made = made.to(dtype=dtype).train(call.training)
    if call.checkpointing and model.kind == "image":
        made.enable_gradient_checkpointing()
    elif call.checkpointing:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return made


def inputs_of(
    name: str, call: Call, size: Size, length: int, batch: int, *, dtype: torch.dtype, device: str
) -> dict[str, Any]:
    """Keyword arguments for `build(name, …)`."""
    model, given = MODELS[name], arguments(MODELS[name], size, length)
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(5, 1000, (batch, count), generator=generator).to(device)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=generator).to(device, dtype)

    found: dict[str, Any] = dict(model.call)
    if model.kind == "image":
        height, width = _sides_of(length)
        found["hidden_states"] = random(given["in_channels"], height, width)
        found["encoder_hidden_states"] = random(min(_TEXT, length), given["joint_attention_dim"])
        found["pooled_projections"] = random(given["pooled_projection_dim"])
        found["timestep"] = torch.full((batch,), 500, device=device)
    elif model.kind == "audio":
        found |= {"input_features": random(80, 2 * length), "decoder_input_ids": tokens(min(_TEXT, length))}
    else:
        found["input_ids"] = tokens(length)
        if model.kind == "text2text":
            found["decoder_input_ids"] = tokens(length)
        if model.kind == "decoder":
            found["use_cache"] = call.use_cache
    if call.mask is not None:
        ones = torch.ones(batch, length, dtype=torch.int64)
        mask = ones if call.mask == "ones" else padding_mask(batch, length, left=call.mask == "left")
        found["attention_mask"] = mask.to(device)
    return found


def _sides_of(length: int) -> tuple[int, int]:
    """Height and width of a latent image whose patches of 2 x 2 are so many, nearly as high as it is wide."""
    side = int(length**0.5)
    while length % side:
        side -= 1
    return 2 * side, 2 * (length // side)


#: what our backend imports at its first graph, whether or not its passes run
_OURS = ("attn_compiler.compiling.backend", "attn_compiler.lowerings", "attn_compiler.passes")


@dataclass(frozen=True, kw_only=True)
class Job:
    """side: the backend's name. further: lengths after the first. profile: the file to write a profile of the first step to, if any."""

    model: str
    call: str
    length: int
    batch: int
    size: Size
    device: str
    side: str
    further: str = ""
    profile: str = ""


@dataclass(frozen=True, kw_only=True)
class Measured:
    first_seconds: float
    second_seconds: float
    cpu_seconds: float
    import_seconds: float
    passes_seconds: float
    further_seconds: str
    kernels_ahead: int
    kernels_late: int
    from_cache: str
    sites: str


class Kernels:
    """Counts what Triton compiles of ours in this process, by thread. What it finds on disk does not count."""

    def __init__(self) -> None:
        self.ahead = self.late = 0

    def watch(self) -> None:
        import triton

        triton.knobs.compilation.listener = self

    def __call__(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit or not str(getattr(getattr(src, "fn", None), "__module__", "")).startswith("attn_compiler"):
            return
        if threading.current_thread().name == "attn_compiler":
            self.ahead += 1
        else:
            self.late += 1


def measure(job: Job) -> Measured:
    call = CALLS[job.call]
    case: dict[str, Any] = {"dtype": torch.float32 if job.device == "cpu" else torch.bfloat16, "device": job.device}
    further = [int(length) for length in job.further.split()]
    model = build(job.model, call, job.size, max(job.length, *further, 0), **case)

    def step_at(length: int) -> harness.Step:
        given = inputs_of(job.model, call, job.size, length, job.batch, **case)
        return harness.make_step(model, given, training=call.training)

    kernels = Kernels()
    if job.device != "cpu":
        kernels.watch()
    step, profile = step_at(job.length), cProfile.Profile()
    harness.synchronize(job.device)
    with profile if job.profile else contextlib.nullcontext():
        begin, began = time.perf_counter(), time.process_time()
        if job.side == harness.BACKEND:
            # As the backend does at its first graph.
            importlib.import_module(_OURS[0])
            from attn_compiler.torch_private import collector

            with collector.paused():
                for name in _OURS:
                    importlib.import_module(name)
        imported = time.perf_counter()
        model.compile(backend=job.side)
        step()
        harness.synchronize(job.device)
        first, done = time.perf_counter(), time.process_time()
    if job.profile:
        profile.dump_stats(job.profile)
    # Writing a profile is no part of the second step.
    second, *seconds = (_seconds(each, job.device) for each in (step, *map(step_at, further)))
    return Measured(
        first_seconds=first - begin, second_seconds=second, cpu_seconds=done - began, import_seconds=imported - begin,
        further_seconds=" ".join(f"{one:.3f}" for one in seconds), kernels_ahead=kernels.ahead,
        kernels_late=kernels.late, **_reported(job),
    )  # fmt: skip


def _seconds(step: harness.Step, device: str) -> float:
    harness.synchronize(device)
    began = time.perf_counter()
    step()
    harness.synchronize(device)
    return time.perf_counter() - began


def _reported(job: Job) -> dict[str, Any]:
    if job.side != harness.BACKEND:
        return {"passes_seconds": 0.0, "from_cache": "", "sites": ""}
    import attn_compiler

    reports, sites = attn_compiler.reports(), Counter[str]()
    for report in reports:
        for site in report.sites:
            sites[site.decision.lowering] += len(site.modules)
    return {
        "passes_seconds": sum(report.total_seconds for report in reports),
        "from_cache": f"{sum(report.from_cache for report in reports)}/{len(reports)}",
        "sites": ", ".join(f"{name} x{count}" for name, count in sorted(sites.items())),
    }


def main() -> None:
    print(json.dumps(asdict(measure(Job(**json.loads(sys.argv[1]))))))


if __name__ == "__main__":
    main()
