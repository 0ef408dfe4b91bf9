"""Reading a tensor later, or further up, than the model reads it is only right while nothing is written into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.passes.graph import mutation
from tests.passes.compiling import CPU_FLASH, Compiled, compiled, mirror_of

B, H, HKV, S, D = 2, 4, 2, 6, 8
aten = torch.ops.aten
sdpa = F.scaled_dot_product_attention


def _inputs(*heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, h, S, D, generator=generator) for h in heads]


def _check(function: Callable[..., Any], *inputs: Tensor) -> Compiled:
    """Outputs and everything that was written to the inputs equal eager's."""
    eager_inputs, own_inputs = ([t.clone() for t in inputs] for _ in range(2))
    run = compiled(function)
    torch.testing.assert_close(run(*own_inputs), function(*eager_inputs))
    torch.testing.assert_close(own_inputs, eager_inputs)
    return run


# ---- what the mirror says -----------------------------------------------------------------------------------------


def test_writers_know_the_storages_that_they_write_to() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x[0].add_(1)
        torch.mul(y, 2, out=y)
        return x + y

    mirror = mirror_of(function, torch.zeros(2, 3), torch.zeros(2, 3))
    x, y = (n for n in mirror.graph.nodes if n.op == "placeholder")
    assert [writer.target for writer, _ in mirror.writers] == [aten.add_.Tensor, aten.mul.out]
    assert [written for _, written in mirror.writers] == [mutation.storages(x), mutation.storages(y)]


def test_written_between_looks_at_aliases_and_only_in_between() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        before = x.sin()
        x.t().mul_(2)
        after = x.cos()
        return before + after + y

    mirror = mirror_of(function, torch.zeros(2, 3), torch.zeros(2, 3))
    nodes = {n.target: n for n in mirror.graph.nodes}
    x, y = (n for n in mirror.graph.nodes if n.op == "placeholder")
    sin, cos, write = nodes[aten.sin.default], nodes[aten.cos.default], nodes[aten.mul_.Tensor]
    assert mutation.written_between(mirror, x, sin, cos) is write
    assert mutation.written_between(mirror, nodes[aten.t.default], sin, cos) is write
    assert mutation.written_between(mirror, y, sin, cos) is None
    assert mutation.written_between(mirror, x, x, sin) is None
    assert mutation.written_between(mirror, x, write, cos) is None


# ---- the tensors of a site ----------------------------------------------------------------------------------------


def test_repeated_before_the_write_reads_the_old_elements() -> None:
    def function(q: Tensor, kv: Tensor) -> Tensor:
        k = kv.repeat_interleave(2, dim=1)
        kv.add_(1.0)
        return sdpa(q, k, k)

    run = _check(function, *_inputs(H, HKV))
    assert run.site.spec.k.shape == (B, H, S, D)


def test_repeated_after_the_write_reads_above_the_repetition() -> None:
    def function(q: Tensor, kv: Tensor) -> Tensor:
        kv.add_(1.0)
        k = kv.repeat_interleave(2, dim=1)
        return sdpa(q, k, k)

    run = _check(function, *_inputs(H, HKV))
    assert run.site.spec.k.shape == (B, HKV, S, D)


def test_versions_are_told_apart_by_the_writes_around_them() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        a = x.sin()
        x.mT.add_(1)
        y.add_(1)
        b = x.cos()
        x.mul_(2)
        return a + b + x.exp()

    mirror = mirror_of(function, torch.ones(2, 2), torch.ones(2))
    nodes = {n.target: n for n in mirror.graph.nodes}
    x = nodes[aten.sin.default].args[0]
    add, mul = (n for n in mirror.graph.nodes if mutation.writes(n) and n.args[0].meta["val"].dim() == 2)
    found = [mutation.version(mirror, x, mirror.order(nodes[op])) for op in (aten.sin.default, aten.cos.default)]
    assert [(v.since, v.until) for v in found] == [(None, add), (add, mul)]
    assert mutation.version(mirror, x, mirror.order(add)) == found[0]
    assert mutation.version(mirror, x, len(nodes) + 9) == mutation.Version(node=x, since=mul)
    # What an in-place op gives back is its tensor after the write.
    assert mutation.version(mirror, mul, mirror.order(nodes[aten.exp.default])).since is mul


def test_written_after_the_attention_is_no_matter() -> None:
    def function(q: Tensor, kv: Tensor) -> Tensor:
        k = kv.repeat_interleave(2, dim=1)
        out = sdpa(q, k, k)
        kv.add_(1.0)
        return out

    run = _check(function, *_inputs(H, HKV))
    assert run.site.spec.k.shape == (B, HKV, S, D)


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: _then(k, (q @ k.mT * 0.25).softmax(-1), v),
        lambda q, k, v: _then(q, (q @ k.mT * 0.25).softmax(-1), v),
    ],
    ids=["k", "q"],
)
def test_written_between_the_two_products_is_not_read_after_it(function: Callable[..., Tensor]) -> None:
    run = _check(function, *_inputs(H, H, H))
    assert CPU_FLASH not in run.calls
    assert run.report.num_misses == 1


def _then(written: Tensor, weights: Tensor, v: Tensor) -> Tensor:
    written.add_(1.0)
    return weights @ v


def test_values_written_between_the_two_products_are_read_new() -> None:
    run = _check(lambda q, k, v: _then(v, (q @ k.mT * 0.25).softmax(-1), v), *_inputs(H, H, H))
    assert CPU_FLASH in run.calls


@pytest.mark.in_turns
@pytest.mark.parametrize(
    "make",
    [
        lambda k: k.clone(),
        lambda k: k.contiguous().repeat_interleave(1, 1),
        lambda k: k * 0.5,
        lambda k: k[:, :1].expand(-1, H, -1, -1).contiguous(),
    ],
    ids=["clone", "repeat", "scale", "expand"],
)
@pytest.mark.parametrize(
    "write",
    [lambda c: c.add_(1.0), lambda c: c[:, 1].zero_(), lambda c: c.transpose(1, 2).fill_(0.5), lambda c: _set(c)],
    ids=["add_", "zero_ of a part", "fill_ of a view", "setitem"],
)
def test_a_copy_that_is_written_to_is_not_read_from_above(
    make: Callable[[Tensor], Tensor], write: Callable[[Tensor], object]
) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        copied = make(k)
        write(copied)
        return F.softmax(q @ copied.mT, -1) @ v

    _check(function, *_inputs(H, H, H))


def _set(copied: Tensor) -> None:
    copied[:, :, 0] = 7.0


def test_activation_in_place_on_a_tensor_of_the_site_is_seen() -> None:
    """nn.ReLU(inplace=True) writes, whatever its name says."""

    def function(q: Tensor, kv: Tensor) -> Tensor:
        k = kv.repeat_interleave(2, dim=1)
        F.relu(kv, inplace=True)
        return sdpa(q, k, k)

    _check(function, *_inputs(H, HKV))


def test_scores_may_be_written_in_place_by_the_site_itself() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        scores.mul_(0.25)
        scores.masked_fill_(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ v

    run = _check(function, *_inputs(H, H, H))
    assert run.report.num_sites + run.report.num_misses == 1


def test_weights_written_in_place_before_the_product_are_no_attention_of_ours() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = F.softmax(q @ k.mT, -1)
        weights[:, 0] = 0.0
        return weights @ v

    run = _check(function, *_inputs(H, H, H))
    assert CPU_FLASH not in run.calls


def test_run_time_scale_written_before_the_kernel_reads_it() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        temperature = q.new_full((), 0.3) + q[0, 0, 0, 0] * 0
        scores = q @ k.mT * temperature
        temperature.add_(1.0)
        return scores.softmax(-1) @ v

    _check(function, *_inputs(H, H, H))


@pytest.mark.parametrize("make", [lambda: torch.tensor(0.25), lambda: torch.full([], 0.25)], ids=["tensor", "full"])
def test_constant_that_is_written_to_is_no_constant(make: Callable[[], Tensor]) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = make()
        scale.mul_(2)
        return F.softmax(q @ k.mT * scale, -1) @ v

    _check(function, *_inputs(H, H, H))


# ---- masks shared by several sites --------------------------------------------------------------------------------


@pytest.mark.parametrize("written_out", [False, True], ids=["sdpa", "written out"])
def test_mask_written_between_two_layers_is_read_anew(written_out: bool) -> None:
    def layer(x: Tensor, allowed: Tensor) -> Tensor:
        if written_out:
            return F.softmax((x @ x.mT * 0.25).masked_fill(~allowed, -torch.inf), -1) @ x
        return sdpa(x, x, x, allowed)

    def function(x: Tensor, allowed: Tensor) -> Tensor:
        x = layer(x, allowed)
        allowed.logical_or_(torch.eye(S, dtype=torch.bool).flip(0))
        return layer(x, allowed)

    allowed = torch.ones(S, S, dtype=torch.bool).tril()
    run = _check(function, *_inputs(H), allowed)
    assert run.calls.count(CPU_FLASH) == 2


def _layer(x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    return F.softmax(x @ x.mT * 0.25 + mask + bias, -1) @ x


def test_additive_masks_written_between_two_layers_are_combined_anew() -> None:
    def function(x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        x = _layer(x, mask, bias)
        bias.mul_(-3.0)
        return _layer(x, mask, bias)

    run = _check(function, *_inputs(H), torch.randn(B, 1, S, S), torch.randn(1, H, S, S))
    assert run.calls.count(CPU_FLASH) == 2


def test_a_mask_that_stays_is_combined_once() -> None:
    def function(x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        return _layer(_layer(_layer(x, mask, bias), mask, bias), mask, bias)

    run = _check(function, *_inputs(H), torch.randn(B, 1, S, S), torch.randn(1, H, S, S))
    assert run.calls.count(CPU_FLASH) == 3
    assert run.calls.count("add") == 1


# ---- caches -------------------------------------------------------------------------------------------------------


def _index_copy(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    return cache.index_copy_(2, position, new)


def _slice_copy(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    cache[:, :, 2:3].copy_(new)
    return cache


def _index_put(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    cache[:, :, position] = new
    return cache


@pytest.mark.parametrize("repeated", [False, True], ids=["plain", "repeated"])
@pytest.mark.parametrize("update", [_index_copy, _slice_copy, _index_put])
def test_cache_updated_in_place_before_the_attention(
    update: Callable[[Tensor, Tensor, Tensor], Tensor], repeated: bool
) -> None:
    def function(q: Tensor, new: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        k = update(cache, position, new)
        if repeated:
            k = k[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)
        return sdpa(q, k, k, enable_gqa=not repeated)

    q, new = torch.randn(B, H, 1, D), torch.randn(B, HKV, 1, D)
    run = _check(function, q, new, torch.randn(B, HKV, S, D), torch.tensor([2]))
    assert run.site.spec.k.shape == (B, HKV, S, D)
    assert CPU_FLASH in run.calls


@pytest.mark.parametrize("update", [_index_copy, _slice_copy, _index_put])
def test_cache_updated_in_place_after_the_attention(update: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    def function(q: Tensor, new: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        k = cache[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)
        out = sdpa(q, k, k)
        update(cache, position, new)
        return out

    q, new = torch.randn(B, H, 1, D), torch.randn(B, HKV, 1, D)
    run = _check(function, q, new, torch.randn(B, HKV, S, D), torch.tensor([2]))
    assert run.site.spec.k.shape == (B, HKV, S, D)


def test_decoding_step_by_step_from_one_compilation() -> None:
    def function(q: Tensor, new: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        k = cache.index_copy_(2, position, new)
        allowed = torch.arange(S) <= position[:, None]
        return sdpa(q, k.repeat_interleave(2, 1), k.repeat_interleave(2, 1), allowed)

    run = compiled(function)
    eager_cache, own_cache = torch.zeros(B, HKV, S, D), torch.zeros(B, HKV, S, D)
    for step in range(S):
        q, new, position = torch.randn(B, H, 1, D), torch.randn(B, HKV, 1, D), torch.tensor([step])
        wanted = function(q, new, eager_cache, position)
        torch.testing.assert_close(run(q, new, own_cache, position), wanted)
    torch.testing.assert_close(own_cache, eager_cache)
    assert len(run.reports) == 1


@pytest.mark.parametrize(
    ("method", "changes"),
    [("t_", True), ("unsqueeze_", True), ("add_", False), ("__eq__", False), ("__and__", False), ("none_such_", False)],
)
def test_methods_that_change_the_shape_in_place(method: str, changes: bool) -> None:
    assert mutation.views_in_place(method) == changes


def test_the_storage_of_a_tensor_that_vmap_wraps_is_that_of_the_tensor() -> None:
    x = torch.ones(3)
    seen = []

    def read(row: torch.Tensor) -> torch.Tensor:
        seen.append(mutation.storages_of(row))
        return row

    torch.vmap(read)(x)
    assert seen == [mutation.storages_of(x)]
