"""One side of a comparison: its first step, its memory, and steps in turn with the others. A failed side keeps the reason."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_compiler.compiling.comparing import results, timing
from attn_compiler.compiling.comparing.kept import HeldState, Inputs
from attn_compiler.compiling.comparing.results import Distance, Results
from attn_compiler.reasons.errors import CannotCompare
from attn_compiler.verifying.interpreting import leaving_no_trace

EAGER, INDUCTOR, OURS = "eager", "inductor", "attn_compiler"


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Measurements of one side.

    first_seconds: of the first step, which compiles and finds nothing on disk.
    milliseconds: p20, p50 and p80 of a later step. ratio: the speed-up over Inductor, the median of the rounds' own.
    held_bytes, peak_bytes: on GPUs, allocated memory before a step, and its peak during the step; None without CUDA.
    outputs, gradients: distance from the uncompiled model's; None if unknown or not asked for.
    failure: why this side failed. Its other fields then hold what was measured before.
    """

    name: str
    first_seconds: float | None = None
    rounds: int = 0
    milliseconds: tuple[float, float, float] | None = None
    ratio: float | None = None
    held_bytes: int | None = None
    peak_bytes: int | None = None
    outputs: Distance | None = None
    gradients: Distance | None = None
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of every side. names: of the tensors of `kept`. noise: of the loss, by output."""

    inputs: Inputs
    kept: HeldState
    names: Mapping[int, str]
    training: bool
    devices: Sequence[torch.device]
    noise: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def gpus(self) -> list[torch.device]:
        return [device for device in self.devices if device.type == "cuda"]

    @property
    def timed_on(self) -> str:
        return str(self.gpus[0]) if self.gpus else "cpu"

    def prepare(self) -> None:
        """Clear gradients before a step, outside of its time."""
        self.inputs.clear_gradients()
        self.kept.clear_gradients()

    def step(self, model: Callable[..., Any], given: tuple[Sequence[Any], Mapping[str, Any]]) -> Any:
        """Run a forward without gradients, or forward, loss and backward."""
        args, kwargs = given
        if not self.training:
            return model(*args, **kwargs)
        found = model(*args, **kwargs)
        loss = results.loss_of(results.outputs_of(found), self.noise, self.inputs.padding)
        if loss is None:
            raise CannotCompare(
                call="compare",
                rule="training=True goes back from a loss",
                observed="outputs of which none needs a gradient",
                remedy="Unfreeze a parameter, or compare without training=True",
            )
        loss.backward()  # type: ignore[no-untyped-call]
        return found

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradients of parameters and inputs after a step."""
        inputs = {f"gradient of {name}": x.grad for name, x in self.inputs.trained.items()}
        return {f"gradient of {self.names[id(x)]}": x.grad for x in self.kept.trained} | inputs

    def synchronize(self) -> None:
        for device in self.gpus:
            torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """A side after its first step. found: its results; None if it failed. error: the failure. drew: it drew random numbers. writes: the
    model writes to its own state."""

    side: Side
    found: Results | None = None
    error: Exception | None = None
    drew: bool = False
    writes: bool = False


def first_step(name: str, model: Callable[..., Any], task: Task) -> FirstStep:
    """Compile by a first step, and keep its results. Afterwards the model, its inputs and generators are as they were."""
    side = Side(name=name)
    try:
        with leaving_no_trace(task.inputs.generators, task.devices, gradients=task.training) as drawn:
            given = task.inputs.for_call()
            task.prepare()
            task.synchronize()
            begin = time.perf_counter()
            value = task.step(model, given)
            task.synchronize()
            seconds = time.perf_counter() - begin
            drew = drawn()
            found = Results(
                outputs=results.on_host(results.outputs_of(value)),
                gradients=_held(task.gradients()) if task.training else None,
            )
            del value
        task.inputs.check_writes()
        return FirstStep(
            side=dataclasses.replace(side, first_seconds=seconds), found=found, drew=drew, writes=task.kept.written
        )
    except CannotCompare:
        # No side can do what was asked for.
        raise
    except Exception as error:  # noqa: BLE001 (whatever a side fails of is its row)
        return FirstStep(side=dataclasses.replace(side, failure=_error_text(error)), error=error)
    finally:
        task.prepare()
        task.kept.give_back()
        _give_memory_back(task)


def with_memory(first: FirstStep, model: Callable[..., Any], task: Task) -> FirstStep:
    """Run one more step, and on GPUs measure its memory."""
    if first.side.failure is not None:
        return first
    try:
        with leaving_no_trace(task.inputs.generators, task.devices, gradients=task.training):
            given = task.inputs.for_call()
            task.prepare()
            task.synchronize()
            held = sum(torch.cuda.memory_allocated(device) for device in task.gpus)
            for device in task.gpus:
                torch.cuda.reset_peak_memory_stats(device)
            task.step(model, given)
            task.synchronize()
            peak = sum(torch.cuda.max_memory_allocated(device) for device in task.gpus)
    except Exception as error:  # noqa: BLE001 (whatever a side fails of is its row)
        return dataclasses.replace(first, side=dataclasses.replace(first.side, failure=_error_text(error)), error=error)
    finally:
        task.prepare()
        task.kept.give_back()
        _give_memory_back(task)
    if not task.gpus:
        return first
    return dataclasses.replace(first, side=dataclasses.replace(first.side, held_bytes=held, peak_bytes=peak))


class _SideFailed(Exception):
    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name)
        self.name, self.error = name, error


def in_turns(
    firsts: Sequence[FirstStep], models: Mapping[str, Callable[..., Any]], task: Task, *, seconds: float
) -> list[FirstStep]:
    """Time every side that has not failed, step by step in turn."""
    known = {first.side.name: first for first in firsts}
    writes = any(first.writes for first in firsts)
    given: list[tuple[Sequence[Any], Mapping[str, Any]]] = []

    def before() -> None:
        given[:] = [task.inputs.for_call()]
        task.prepare()
        if writes:
            task.kept.give_back()

    def step_of(name: str) -> Callable[[], None]:
        def step() -> None:
            try:
                task.step(models[name], given[0])
            except Exception as error:
                raise _SideFailed(name, error) from error

        return step

    while True:
        steps = {name: step_of(name) for name, first in known.items() if first.side.failure is None}
        if not steps:
            return list(known.values())
        try:
            with leaving_no_trace(task.inputs.generators, task.devices, gradients=task.training):
                times = timing.interleave(steps, task.timed_on, seconds=seconds, warmup=1, before=before)
        except _SideFailed as failed:
            side = dataclasses.replace(known[failed.name].side, failure=_error_text(failed.error))
            known[failed.name] = dataclasses.replace(known[failed.name], side=side, error=failed.error)
            continue
        finally:
            task.prepare()
            task.kept.give_back()
        return [_timed(first, times) for first in known.values()]


def _timed(first: FirstStep, times: Mapping[str, Sequence[float]]) -> FirstStep:
    own = times.get(first.side.name)
    if own is None:
        return first
    ratio = timing.ratio(times[INDUCTOR], own) if INDUCTOR in times else None
    side = dataclasses.replace(first.side, rounds=len(own), milliseconds=timing.percentiles(own), ratio=ratio)
    return dataclasses.replace(first, side=side)


def compared(firsts: Sequence[FirstStep], padding: torch.Tensor | None = None) -> list[Side]:
    """Return every side with its distance from the uncompiled model if that ran. padding: `Inputs.padding`."""
    eager = next((first.found for first in firsts if first.side.name == EAGER), None)
    sides = []
    for first in firsts:
        side = first.side
        if eager is not None and first.found is not None and side.name != EAGER:
            side = dataclasses.replace(side, outputs=results.distance(first.found.outputs, eager.outputs, padding))
            if eager.gradients is not None and first.found.gradients is not None:
                side = dataclasses.replace(side, gradients=results.distance(first.found.gradients, eager.gradients))
        sides.append(side)
    return sides


def _held(gradients: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    known = results.on_host({name: x for name, x in gradients.items() if x is not None})
    return {name: known.get(name) for name, x in gradients.items() if x is None or name in known}


def _error_text(error: Exception) -> str:
    """Return the class and the first lines of an error's message: PyTorch's advice and traces come after."""
    first = str(error).strip().split("\n\n")[0]
    return " ".join(f"{type(error).__name__}: {first}".split())


def _give_memory_back(task: Task) -> None:
    if task.gpus:
        torch.cuda.empty_cache()
