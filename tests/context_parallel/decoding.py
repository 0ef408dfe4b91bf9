"""`generate` of transformers with a cache that several ranks share, against one process with a cache of transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

import attn_compiler
from attn_compiler import ContextParallel
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.torch_private import inductor as torch_inductor

VOCABULARY, NEW = 99, 4


@dataclass(frozen=True, kw_only=True)
class Run:
    """kind: "Llama", "Qwen3". prompt: its length. padded: how much of the second row is padding, on the left.
    compiled: each step, but not the prompt."""

    kind: str = "Llama"
    attention: str = "sdpa"
    prompt: int = 7
    padded: int = 0
    compiled: bool = False
    inner: str = "aot_eager"
    verify: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        how = f"{self.inner}{', verified' * self.verify}" if self.compiled else "as it is"
        given = "".join(f" · {name} {value}" for name, value in self.given.items())
        return f"{self.kind} · {self.attention} · {self.prompt} · {self.padded} padded · {how}{given}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """error: the largest difference of a logit. tokens: what was generated. expected: by one process. slots: that the rank keeps.
    calls: names of ops in the graphs, each with how often it is called. notes: of all sites."""

    error: float
    tokens: list[list[int]]
    expected: list[list[int]]
    slots: int
    calls: Mapping[str, int]
    notes: tuple[str, ...]


RUNS = [
    Run(),
    Run(attention="eager", prompt=5),
    Run(kind="Qwen3", prompt=8, padded=3),
    Run(compiled=True),
    Run(attention="eager", prompt=5, compiled=True),
    Run(kind="Qwen3", prompt=8, padded=3, compiled=True, verify=True),
    Run(kind="Qwen3", prompt=1, compiled=True, given={"num_key_value_heads": 1}),
]


def measured(runs: list[Run]) -> list[Found]:
    """To be called on every rank of a group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [_measured(ContextParallel(mesh), run) for run in runs]


def build(run: Run) -> Any:
    import transformers

    config = getattr(transformers, f"{run.kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
        max_position_embeddings=96,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
        **{"num_key_value_heads": 2, **run.given},
    )
    config._attn_implementation = run.attention
    torch.manual_seed(0)
    return getattr(transformers, f"{run.kind}ForCausalLM")(config).double().eval()


def inputs(run: Run) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (2, run.prompt), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, : run.padded] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def _measured(cp: ContextParallel, run: Run) -> Found:
    torch._dynamo.reset()
    attn_compiler.reset()
    model, given = build(run), inputs(run)
    with _wide_softmax(), _noted() as graphs:
        return _generated(cp, run, model, given, graphs)


@contextmanager
def _wide_softmax() -> Iterator[None]:
    """Eager attention of transformers rounds weights to float32, which comes out otherwise where they are summed in another order."""
    before = torch.nn.functional.softmax

    def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return before(x, dim, dtype=None if x.dtype == torch.float64 else dtype)

    torch.nn.functional.softmax = softmax  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.functional.softmax = before


@contextmanager
def _noted() -> Iterator[list[fx.GraphModule]]:
    """The graphs that an inner compiler is given."""
    before, graphs = torch_inductor.compile_with_backend, []

    def kept(name: str, gm: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return before(name, gm, inputs)

    torch_inductor.compile_with_backend = kept
    try:
        yield graphs
    finally:
        torch_inductor.compile_with_backend = before


def _generated(cp: ContextParallel, run: Run, model: Any, given: Any, graphs: list[fx.GraphModule]) -> Found:
    from transformers import CompileConfig

    from attn_compiler.integrations.transformers_cache import ShardedCache

    told = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(**given, **told)
    how: dict[str, Any] = {"disable_compile": True}
    if run.compiled:
        options = {"context_parallel": cp, "inner": run.inner, "verify": run.verify}
        config = CompileConfig(fullgraph=True, backend="attn_compiler", mode=None, options=options)
        config._compile_all_devices = True
        how = {"compile_config": config}
    cache = ShardedCache(model.config, cp, max_cache_len=run.prompt + NEW)
    found = model.generate(**given, **told, **how, past_key_values=cache)
    reports = attn_compiler.reports()
    return Found(
        error=max(
            float((a - b).abs().nan_to_num(torch.inf).max()) for a, b in zip(found.logits, expected.logits, strict=True)
        ),
        tokens=found.sequences.tolist(),
        expected=expected.sequences.tolist(),
        slots=cache.layers[0].keys.shape[2],
        calls=Counter(target_name(node) for gm in graphs for node in gm.graph.nodes if node.op == "call_function"),
        notes=tuple(note for report in reports for site in report.sites for note in site.notes),
    )


def prompted(is_early: bool) -> Found:
    """To be called on every rank: a model that is compiled whole gets a prompt, then one more token; its masks are made in the graph.

    is_early: the cache has its tensors before the first call.
    """
    from transformers import StaticCache

    from attn_compiler.integrations.transformers_cache import ShardedCache

    torch._dynamo.reset()
    attn_compiler.reset()
    cp, run = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),))), Run(prompt=7, padded=2)
    model, given = build(run), inputs(run)
    longer = torch.cat((given["attention_mask"], torch.ones(2, 1, dtype=torch.int64)), 1)
    step = {"input_ids": given["input_ids"][:, -1:], "attention_mask": longer, "position_ids": torch.full((2, 1), 7)}
    cache, own = ShardedCache(model.config, cp, max_cache_len=12), StaticCache(model.config, max_cache_len=12)
    if is_early:
        cache.early_initialization(2, 2, 8, torch.float64, torch.device("cpu"))
    with torch.no_grad(), _noted() as graphs:
        compiled = torch.compile(model, backend="attn_compiler", options={"context_parallel": cp, "inner": "aot_eager"})
        wanted = [model(**one, past_key_values=own).logits for one in (given, step)]
        found = [compiled(**one, past_key_values=cache).logits for one in (given, step)]
    # What padding gives is not told to anyone.
    pairs = [(a[:, run.padded :], b[:, run.padded :]) for a, b in zip(found[:1], wanted[:1], strict=True)]
    pairs.append((found[1], wanted[1]))
    sites = [site for report in attn_compiler.reports() for site in report.sites]
    return Found(
        error=max(float((a - b).abs().nan_to_num(torch.inf).max()) for a, b in pairs),
        tokens=[x.argmax(-1)[:, -1].tolist() for x in found],
        expected=[x.argmax(-1)[:, -1].tolist() for x in wanted],
        slots=cache.layers[0].keys.shape[2],
        calls=Counter(target_name(node) for gm in graphs for node in gm.graph.nodes if node.op == "call_function"),
        notes=tuple(note for site in sites for note in site.notes),
    )
