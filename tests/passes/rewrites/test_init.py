"""A graph that was rewritten before is rewritten without the passes, and a graph that differs in anything is not that graph."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler.options import cache
from attn_compiler.options.options import Options
from attn_compiler.passes import rewrites
from attn_compiler.passes.rewrites import targets
from attn_compiler.torch_private import inductor as torch_inductor
from tests.passes.rewrites.compiling import attention, compiled, is_again, masked, qkv, why_not
from tests.passes.rewrites.watching import without_times


def _same(function: Callable[..., Any], *inputs: Any, **options: Any) -> None:
    """What is done again is what the passes did, in every node, and gives the same."""
    first, before = compiled(function, *inputs, **options)
    second, after = compiled(function, *inputs, **options)
    assert [seen.report.from_cache for seen in before] == [False] * len(before)
    assert [(seen.report.from_cache, seen.ran) for seen in after] == [(True, ())] * len(before)
    assert [seen.code for seen in after] == [seen.code for seen in before]
    assert [seen.nodes for seen in after] == [seen.nodes for seen in before]
    assert [seen.known for seen in after] == [seen.known for seen in before]
    assert [without_times(seen.report) for seen in after] == [without_times(seen.report) for seen in before]
    assert any(seen.report.num_sites for seen in before)
    torch.testing.assert_close(second, first, rtol=0, atol=0)


@pytest.mark.parametrize("lowering", ["math", "reference", "sdpa_cpu_flash", "triton"])
def test_the_rewritten_graph_is_the_one_that_the_passes_made(lowering: str) -> None:
    _same(masked, *qkv(), lowering=lowering)


@pytest.mark.parametrize("lowering", ["absorbed", "decode_latent", "math"])
def test_a_latent_in_place_of_k_and_v(lowering: str) -> None:
    """What made k and v is erased, writes in place and all."""

    def model(q: Tensor, latent: Tensor, rope: Tensor, w: Tensor, new: Tensor) -> Tensor:
        latent[:, :, 3:4] = new
        kv = F.linear(latent, w).view(2, 9, 2, 14).transpose(1, 2)
        k = kv.new_empty(2, 2, 9, 12)
        k[..., :8].copy_(kv[..., :8])
        k[..., 8:].copy_(rope.expand(-1, 2, -1, -1))
        return F.scaled_dot_product_attention(q, k, kv[..., 8:])

    shapes = ((2, 2, 1, 12), (2, 1, 9, 16), (2, 1, 9, 4), (28, 16), (2, 1, 1, 16))
    _same(model, *(torch.randn(shape) for shape in shapes), lowering=lowering)


def test_two_sites_share_a_mask_and_a_third_is_a_miss() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2])
        bias = torch.where(at[:, None] >= at, 0.0, -torch.inf)
        for _ in range(2):
            q = torch.softmax(q @ k.transpose(-2, -1) + bias, -1) @ v
        return q + torch.softmax(q @ k.transpose(-2, -1), -1).sum()

    _same(model, *qkv())


def test_a_softmax_over_another_axis_is_moved_again() -> None:
    for lowering in ("math", "untouched"):
        _same(
            lambda q, k, v: torch.softmax(k @ q.transpose(-2, -1), dim=-2).transpose(-2, -1) @ v,
            *qkv(),
            lowering=lowering,
        )


def test_what_is_written_in_place_is_copied_again() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kept = k * 1
        out = attention(q, kept, v)
        kept.add_(1)
        return out, kept

    _same(model, *(x.requires_grad_() for x in qkv()), lowering="reference")


def test_autocast_regions_are_left_and_entered_again() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(q, k, v)

    _same(model, *qkv())


def test_calls_that_hide_an_attention_are_spelled_out_again() -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 8, 32)
    _same(lambda x: layer(x, x, x, need_weights=False)[0], x)
    with torch.no_grad():
        _same(nn.TransformerEncoderLayer(32, 4, batch_first=True).eval(), x)


def test_bodies_of_checkpoints_and_what_they_are_given_come_again() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            at = torch.arange(x.shape[1])
            mask = (at[:, None] >= at) & padding[:, None, None, :]
            for layer in self.layers:
                x = x + checkpoint(self.attend, layer, x, mask, use_reentrant=False)
            return x

        def attend(self, layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
            q = layer(x).view(2, 8, 2, 8).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).flatten(2)

    padding = torch.ones(2, 8, dtype=torch.bool)
    _same(Model(), torch.randn(2, 8, 16), padding, lowering="triton")
    assert attn_compiler.reports()[0].num_sites == 2


def test_gradients_are_those_of_the_passes() -> None:
    grads = []
    for _ in range(2):
        inputs = [x.requires_grad_() for x in qkv()]
        out, (seen,) = compiled(masked, *inputs, inner="aot_eager")
        out.square().sum().backward()
        grads.append([x.grad for x in inputs])
    assert seen.report.from_cache
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


def test_a_compiler_that_fails_on_it_gets_the_models_own_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_again(attention, *qkv())
    inputs, compile_with = qkv(), torch_inductor.compile_with_backend
    given: list[str] = []

    def failing(name: str, gm: Any, example_inputs: Any) -> Any:
        given.append(gm.code)
        if len(given) == 1:
            raise ZeroDivisionError
        return compile_with(name, gm, example_inputs)

    monkeypatch.setattr(torch_inductor, "compile_with_backend", failing)
    with pytest.warns(attn_compiler.AttnCompilerWarning, match="ZeroDivisionError"):
        out, (seen,) = compiled(attention, *inputs)
    assert seen.report.from_cache
    assert "softmax" in given[1]
    assert "softmax" not in given[0]
    torch.testing.assert_close(out, attention(*inputs))
    assert attn_compiler.reports()[0].failure is not None


# ---- a graph that differs ---------------------------------------------------------------------------------------------


_OTHERS: dict[str, Callable[[], list[Any]]] = {
    "shape": lambda: qkv(2, 3, 9, 16),
    "dtype": lambda: qkv(dtype=torch.bfloat16),
    "strides": lambda: [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv()],
    # At another place of a larger memory.
    "offset": lambda: [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in qkv()],
    "gradient": lambda: [x.requires_grad_() for x in qkv()],
    "one tensor twice": lambda: [(x := qkv())[0], x[1], x[1]],
    "one memory": lambda: list(torch.randn(3, 2, 3, 8, 16).unbind()),
    "a parameter": lambda: [nn.Parameter(x) for x in qkv()],
}


@pytest.mark.parametrize("other", _OTHERS)
def test_other_inputs_are_another_graph(other: str) -> None:
    assert not is_again(attention, *qkv())
    assert is_again(attention, *qkv())
    given = _OTHERS[other]()
    assert not is_again(attention, *given)
    assert is_again(attention, *given)


@contextlib.contextmanager
def _set(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


_STATES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "flash off": lambda: _set(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    "deterministic": lambda: _set(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "precision": lambda: _set(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "precision of one part": lambda: _set(
        lambda: torch.backends.cuda.matmul.fp32_precision,
        lambda value: setattr(torch.backends.cuda.matmul, "fp32_precision", value),
        "tf32",
    ),
    "default dtype": lambda: _set(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "recursion limit": lambda: _set(sys.getrecursionlimit, sys.setrecursionlimit, 3000),
    "mkldnn off": lambda: torch.backends.mkldnn.flags(enabled=False),
}


@pytest.mark.parametrize("state", _STATES)
def test_other_states_of_pytorch_are_another_graph(state: str) -> None:
    inputs = qkv()
    # A precision that was set is another state than the same one that was not.
    torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())
    assert not is_again(attention, *inputs)
    with _STATES[state]():
        assert not is_again(attention, *inputs)
        assert is_again(attention, *inputs)
    assert is_again(attention, *inputs)


def test_a_graph_is_the_same_after_inductor_generated_code() -> None:
    """It lets Python make more calls in a row from then on; a process that finds the code on disk does not come there."""
    with _set(sys.getrecursionlimit, sys.setrecursionlimit, 1000):
        assert not is_again(attention, *qkv())
        sys.setrecursionlimit(2000)
        assert is_again(attention, *qkv())


def test_another_number_in_the_model_is_another_graph() -> None:
    def scaled(scale: Any) -> Callable[..., Tensor]:
        return lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) * scale, -1) @ v

    inputs = qkv()
    for scale in (0.5, 0.25, 2.0, 2):
        assert not is_again(scaled(scale), *inputs), scale
    assert is_again(scaled(0.5), *inputs)


@pytest.mark.parametrize(
    "options",
    [{"lowering": "math"}, {"lowerings": ["math"]}, {"strict": True}, {"fp8_recipe": attn_compiler.Fp8Recipe()}],
    ids=lambda options: next(iter(options)),
)
def test_other_options_are_another_graph(options: dict[str, Any]) -> None:
    assert not is_again(attention, *qkv())
    assert not is_again(attention, *qkv(), **options)
    assert is_again(attention, *qkv(), **options)


def test_checks_cost_no_passes() -> None:
    assert not is_again(attention, *qkv(), check_invariants=False)
    assert is_again(attention, *qkv(), check_invariants=True)


def test_other_sources_or_another_version_are_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_again(attention, *qkv())
    monkeypatch.setattr(cache, "sources_digest", lambda: "edited")
    assert not is_again(attention, *qkv())
    monkeypatch.setattr(cache, "package_version", lambda: "999.0")
    assert not is_again(attention, *qkv())


def test_another_line_of_the_model_is_another_graph_since_reports_name_it() -> None:
    source = "import torch\ndef model(q, k, v):\n    return torch.softmax(q @ k.transpose(-2, -1), -1) @ v\n"
    found = []
    for text in (source, "\n" + source, source):
        scope: dict[str, Any] = {}
        exec(compile(text, "model.py", "exec"), scope)
        _, (seen,) = compiled(scope["model"], *qkv())
        found.append((seen.report.from_cache, seen.report.sites[0].source))
    assert found == [(False, "model.py:3"), (False, "model.py:4"), (True, "model.py:3")]


# ---- what is not looked up or not kept --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["CompositeExplicitAutograd", "CompositeImplicitAutograd"])
def test_ops_of_other_libraries_are_kept_unless_tracing_looks_into_them(kind: str) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(torch.ops.test_rewrites.twice(q), k, v)

    with torch.library._scoped_library("test_rewrites", "FRAGMENT") as library:
        library.define(f"twice(Tensor x, int {kind[:12].lower()}=2) -> Tensor")
        library.impl("twice", lambda x, times=2: x * times, kind)
        why = why_not(model, *qkv())
        if kind == "CompositeExplicitAutograd":
            assert why is None
            assert is_again(model, *qkv())
        else:
            assert why == "test_rewrites.twice is made of other ops, which may change while its name stays"


def test_another_schema_is_another_graph() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(torch.ops.test_schemas.twice(q), k, v)

    found = []
    for schema in ("Tensor x", "Tensor x, int times=2", "Tensor x"):
        with torch.library._scoped_library("test_schemas", "FRAGMENT") as library:
            library.define(f"twice({schema}) -> Tensor")
            library.impl("twice", lambda x, times=2: x * 2, "CompositeExplicitAutograd")
            targets._known_name.cache_clear()
            found.append(is_again(model, *qkv()))
    assert found == [False, False, True]


@pytest.mark.parametrize("place", ["F.softmax", "torch.softmax", "torch.Tensor.softmax"])
def test_functions_that_took_the_place_of_pytorchs_are_not_those(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Dynamo writes them into the graph under the names of what was there."""
    owner: Any = {"F": F, "torch": torch, "torch.Tensor": torch.Tensor}[place.rpartition(".")[0]]
    real = owner.softmax

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1)
        return (scores.softmax(-1) if owner is torch.Tensor else owner.softmax(scores, dim=-1)) @ v

    def softmax(x: Tensor, dim: int, **_: Any) -> Tensor:
        found: Tensor = real(x * 2.0, dim=dim)
        return found

    inputs = qkv()
    assert not is_again(model, *inputs, lowering="reference")
    softmax.__module__ = "torch"
    monkeypatch.setattr(owner, "softmax", torch.compiler.allow_in_graph(softmax))
    _, (seen,) = compiled(model, *inputs, lowering="reference")
    assert not seen.report.from_cache
    assert seen.report.not_kept is not None
    assert "not PyTorch's own function any more" in seen.report.not_kept


def test_functions_that_pytorchs_own_call_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nn.MultiheadAttention there is one call in the graph, and PyTorch's own function calls what is in the place of another."""
    layer, x, real = (
        nn.MultiheadAttention(32, 4, batch_first=True),
        torch.randn(2, 8, 32),
        F.scaled_dot_product_attention,
    )

    def model(x: Tensor) -> Tensor:
        out: Tensor = layer(x, x, x, need_weights=False)[0]
        return out

    assert not is_again(model, x, lowering="reference")
    assert is_again(model, x, lowering="reference")
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *others: real(q * 2.0, *others))
    out, (seen,) = compiled(model, x, lowering="reference")
    assert not seen.report.from_cache
    torch.testing.assert_close(out, model(x))


@pytest.mark.parametrize("setting", ["fx_graph_cache", "force_disable_caches"])
def test_pytorchs_own_switches_hold(setting: str, folder: Path) -> None:
    off = setting == "force_disable_caches"
    with torch._inductor.config.patch({setting: off}):
        assert not is_again(attention, *qkv())
        assert rewrites.here(Options(), {}) is None
        assert rewrites.here(Options(), {setting: not off}) is not None
    assert rewrites.here(Options(), {setting: off}) is None
    assert not folder.exists()


def test_the_option_switches_it_off(folder: Path) -> None:
    assert not is_again(attention, *qkv(), cache_rewrites=False)
    assert not folder.exists()
    assert rewrites.here(Options(cache_rewrites=False), {}) is None


# ---- files ------------------------------------------------------------------------------------------------------------


def _edited(held: dict[str, Any]) -> dict[str, Any]:
    return {**held, "rewrite": {**held["rewrite"], "edits": []}}


_DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut off": lambda held: held[: len(held) // 2],
    "no JSON": lambda _: b"\x80\x04pickle",
    "a list": lambda _: b"[1]",
    "another key": lambda held: held.replace(b'"key": "', b'"key": "0', 1),
    "edited": lambda held: json.dumps(_edited(json.loads(held))).encode(),
    "nested without end": lambda _: b"[" * 100_000,
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_damaged_file_is_missing(damage: str, folder: Path) -> None:
    assert not is_again(attention, *qkv())
    (path,) = folder.iterdir()
    path.write_bytes(_DAMAGES[damage](path.read_bytes()))
    assert not is_again(attention, *qkv())
    assert is_again(attention, *qkv())


def test_a_folder_that_can_not_be_written_costs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "attn_compiler").write_text("a file in the way")
    for _ in range(2):
        assert not is_again(attention, *qkv())
