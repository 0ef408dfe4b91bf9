"""Kernels take turns, and a clock reads the device."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.base import Lowering
from attn_compiler.lowerings.choice.timed import clock, timing, values, which
from attn_compiler.lowerings.choice.timed.eager import EagerEmitter
from attn_compiler.lowerings.choice.timed.values import NoValues, SiteTensors
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.scores import DenseBias, ScoreSpec
from attn_compiler.spec.target import Target

# A site runs with each lowering as in a model's graph.
CPU = torch.device("cpu")
TARGET = Target.current("cpu")


def spec_of(strides: tuple[int, int, int, int] = (256, 128, 16, 1), *, with_bias: bool = False) -> AttentionSpec:
    tensor = TensorSpec(shape=(2, 2, 8, 16), strides=strides, dtype="float32", requires_grad=True)
    changes = (DenseBias(shape=(1, 2, 8, 8), dtype="float32"),) if with_bias else ()
    return AttentionSpec(
        q=tensor,
        k=tensor,
        v=tensor,
        mask=MaskSpec(),
        score=ScoreSpec(scale=0.25, changes=changes),
        device="cpu",
        out_dtype="float32",
        needs_grad=True,
    )


def test_gradients_of_all_that_wants_one_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    grad = torch.autograd.grad

    def seen(out: Any, leaves: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        found = grad(out, leaves, *args, **kwargs)
        asked.append(sum(x is not None for x in found))
        return found

    monkeypatch.setattr(torch.autograd, "grad", seen)
    spec = spec_of(with_bias=True)
    tensors = values.real(spec, SiteTensors(mask=torch.empty(1, 2, 8, 8, device="meta")), CPU)
    run = timing._computation(spec, TARGET, by_name("math"), tensors, EagerEmitter(TARGET))
    assert run is not None
    assert asked == [4, 4]
    with torch.no_grad():
        run()
    assert asked == [4, 4, 4]


def test_a_lowering_that_needs_other_strides_reads_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    # The elements of a head are not side by side.
    spec = spec_of((256, 128, 1, 8))
    tensors = values.real(spec, SiteTensors(), CPU)
    copies: list[torch.Tensor] = []
    contiguous = torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: copies.append(x) or contiguous(x))
    lowering = by_name("sdpa_cpu_flash")
    assert lowering.demand(spec).broken_by(spec.q)
    assert timing._computation(spec, TARGET, lowering, tensors, EagerEmitter(TARGET)) is not None
    assert len([x for x in copies if x.shape == (2, 2, 8, 16)]) >= 6


def test_a_lowering_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("no kernel image")

    lowering = by_name("math")
    monkeypatch.setattr(type(lowering), "emit", broken)
    spec = spec_of()
    tensors = values.real(spec, SiteTensors(), CPU)
    assert timing._computation(spec, TARGET, lowering, tensors, EagerEmitter(TARGET)) is None


def test_no_call_leaves_a_tensor_behind() -> None:
    """Until Python looks for what holds itself: calls are many before it does."""
    spec, emitter = spec_of(), EagerEmitter(TARGET)
    run = timing._computation(spec, TARGET, by_name("math"), values.real(spec, SiteTensors(), CPU), emitter)
    assert run is not None
    made: list[weakref.ref[torch.Tensor]] = []
    call = emitter.call

    def noted(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        node = call(function, *args, **kwargs)
        made.append(weakref.ref(emitter.value(node)))
        return node

    emitter.call = noted  # type: ignore[method-assign]
    gc.disable()
    try:
        for _ in range(3):
            run()
        emitter.forget()
        assert made
        assert [x for x in made if x() is not None] == []
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.alone
def test_a_short_site_is_timed_with_each_lowering() -> None:
    device, target = torch.device("cuda:0"), Target.current("cuda:0")
    tensor = TensorSpec(shape=(4, 8, 256, 80), strides=(163840, 80, 640, 1), dtype="bfloat16", requires_grad=True)
    spec = AttentionSpec(
        q=tensor,
        k=tensor,
        v=tensor,
        mask=MaskSpec(),
        score=ScoreSpec(scale=80**-0.5),
        device="cuda",
        out_dtype="bfloat16",
        needs_grad=True,
    )
    names = which.lowerings_for(spec, target, "sdpa_flash")
    lowerings: list[Lowering] = [by_name(name) for name in names if not by_name(name).why_not(spec, target)]
    before = torch.cuda.memory_allocated()
    found = timing.microseconds(spec, target, lowerings, SiteTensors(), device)
    assert set(found) == {lowering.name for lowering in lowerings} >= {"sdpa_flash", "triton"}
    assert all(0 < took < 10_000 for took in found.values())
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


@pytest.mark.gpu
@pytest.mark.alone
def test_little_memory_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(ready: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
        raise AssertionError("it was timed")

    monkeypatch.setattr(clock, "microseconds", never)
    monkeypatch.setattr(timing, "_free", lambda device: which.bytes_of(spec_of()))
    with pytest.raises(NoValues, match="memory"):
        timing.microseconds(
            spec_of(), Target.current("cuda:0"), [by_name("math")], SiteTensors(), torch.device("cuda:0")
        )


# Long is told from short without the host's time, and what waits for the GPU has none.
def test_processes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits in vain has no times, and one that is through lets the next go on."""
    monkeypatch.setattr(clock, "_PATIENCE", 0.1)
    gpu = f"test {os.getpid()}"
    with clock.alone_on(gpu):
        with pytest.raises(NoValues, match="other processes"), clock.alone_on(gpu):
            pytest.fail("two at once")
        with clock.alone_on(gpu + " another"):
            pass
    with pytest.raises(KeyError), clock.alone_on(gpu):
        raise KeyError
    with clock.alone_on(gpu):
        pass


def test_one_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has many sites."""
    waited: list[float] = []

    def acquire(lock: FileLock, timeout: float) -> None:
        waited.append(timeout)
        if len(waited) <= 3:
            raise Timeout(lock.lock_file)

    monkeypatch.setattr(FileLock, "acquire", acquire)
    gpu = f"test {os.getpid()} hangs"
    for _ in range(3):
        with pytest.raises(NoValues), clock.alone_on(gpu):
            pytest.fail("not alone")
    for _ in range(2):
        with clock.alone_on(gpu):
            pass
    assert waited == [clock._PATIENCE, 0, 0, 0, clock._PATIENCE]


@pytest.mark.gpu
@pytest.mark.alone
def test_more_work_takes_longer_and_what_waits_for_the_host_has_no_time() -> None:
    device = torch.device("cuda:0")
    small, large = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for n in (256, 4096))
    computations: dict[str, Callable[[], object]] = {
        "small": lambda: small @ small,
        "large": lambda: large @ large,
        "waits": lambda: float(small.sum()),
    }
    for computation in computations.values():
        # The first call of a library takes longer than the clock waits.
        computation()
    found = clock.microseconds(computations, device)
    assert set(found) == {"small", "large"}
    assert 0 < found["small"] < found["large"] / 4
    torch.cuda.synchronize()
