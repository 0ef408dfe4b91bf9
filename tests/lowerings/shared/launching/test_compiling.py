"""Kernels are compiled in threads, each variant once; launches wait for theirs; what fails costs nothing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attn_compiler.lowerings.shared.kernels import tuples
from attn_compiler.lowerings.shared.launching import any_size, compiling
from attn_compiler.lowerings.shared.launching.any_size import shown
from attn_compiler.lowerings.shared.launching.compiling import Asked, Workers
from tests.lowerings.shared import asked_variants, compiled_ahead
from tests.lowerings.shared.kernels.compilers import printed_by

pytest.importorskip("triton")

# Kernels are compiled in threads, each variant once.
KERNEL: Any = SimpleNamespace(fn=SimpleNamespace(__name__="kernel"))
OTHER: Any = SimpleNamespace(fn=SimpleNamespace(__name__="other"))
SECONDS = 30


class Triton:
    """Asks for what it is told to. compiled: keys, in order."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.finished: list[str] = []
        self.before: Callable[[], None] = lambda: None

    def variants(self, kernel: Any, positional: Any, named: dict[str, Any]) -> list[Asked]:
        key = named["key"]
        if key in self.finished:
            return []

        def compile() -> str:
            self.before()
            self.compiled.append(key)
            return str(key)

        return [Asked(key=key, compile=compile, finish=self.finished.append)]


@pytest.fixture
def triton_of_test(monkeypatch: pytest.MonkeyPatch) -> Triton:
    made = Triton()
    monkeypatch.setattr(compiling, "variants", made.variants)
    return made


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    monkeypatch.setattr(compiling, "_workers", None)
    made = compiling.workers(2)
    yield made
    made.threads.end()


def begin(workers: Workers, key: str, kernel: Any = KERNEL) -> list[Any]:
    return list(workers.begin(kernel, (), {"key": key}))


def test_what_is_begun_is_compiled_and_finished(triton_of_test: Triton, workers: Workers) -> None:
    (future,) = begin(workers, "a")
    found = future.result(SECONDS)
    assert found.kernel == "kernel"
    assert found.seconds >= 0
    assert triton_of_test.compiled == triton_of_test.finished == ["a"]


def test_one_at_a_time_is_done_when_it_is_begun(triton_of_test: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a thread: who begins it may be in the middle of tracing. One that fails stands in nobody's way."""
    monkeypatch.setattr(compiling, "_workers", None)
    seen: list[str] = []
    triton_of_test.before = lambda: seen.append(threading.current_thread().name)
    workers = compiling.workers(1)
    assert begin(workers, "a")[0].done()
    assert triton_of_test.finished == ["a"]
    assert seen == ["attn_compiler"]

    def fail() -> None:
        raise RuntimeError("out of registers")

    triton_of_test.before = fail
    assert isinstance(begin(workers, "b")[0].exception(0), RuntimeError)
    assert (workers.started, workers.waited[id(KERNEL)]) == ({}, [])
    workers.threads.end()
    assert begin(workers, "c")[0].cancelled()


def test_what_is_compiled_has_lines_in_the_log(
    triton_of_test: Triton, workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "attn_compiler"):
        begin(workers, "a")[0].result(SECONDS)
    assert caplog.text.index("compiling kernel") < caplog.text.index("compiled kernel in 0.0")


def test_identical_variants_are_compiled_once(triton_of_test: Triton, workers: Workers) -> None:
    go_on = threading.Event()
    triton_of_test.before = lambda: go_on.wait(SECONDS)  # type: ignore[assignment,return-value]
    first, again, other = begin(workers, "a"), begin(workers, "a"), begin(workers, "b")
    go_on.set()
    for future in (*first, *again, *other):
        future.result(SECONDS)
    assert (len(first), len(again), len(other)) == (1, 0, 1)
    assert begin(workers, "a") == []
    assert sorted(triton_of_test.compiled) == ["a", "b"]


def test_a_launch_waits_for_its_own_kernel_alone(triton_of_test: Triton, workers: Workers) -> None:
    go_on, waited = threading.Event(), threading.Event()
    triton_of_test.before = lambda: go_on.wait(SECONDS)  # type: ignore[assignment,return-value]
    begin(workers, "a")
    compiling.wait_for(OTHER)

    def launch() -> None:
        compiling.wait_for(KERNEL)
        waited.set()

    thread = threading.Thread(target=launch)
    thread.start()
    assert not waited.wait(0.2)
    go_on.set()
    assert waited.wait(SECONDS)
    thread.join()
    assert triton_of_test.finished == ["a"]


def test_what_fails_is_left_to_the_launch(triton_of_test: Triton, workers: Workers) -> None:
    def fail() -> None:
        raise RuntimeError("out of registers")

    triton_of_test.before = fail
    (future,) = begin(workers, "a")
    with pytest.raises(RuntimeError, match="out of registers"):
        future.result(SECONDS)
    compiling.wait_for(KERNEL)
    assert (workers.started, workers.waited[id(KERNEL)]) == ({}, [])
    triton_of_test.before = lambda: None
    assert begin(workers, "a")[0].result(SECONDS).kernel == "kernel"


def test_nothing_is_waited_for_where_nothing_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_workers", None)
    compiling.wait_for(KERNEL)
    assert compiling._workers is None


def test_a_forked_process_has_threads_of_its_own(triton_of_test: Triton, workers: Workers) -> None:
    begin(workers, "a")[0].result(SECONDS)
    child = os.fork()
    if child == 0:
        compiling.wait_for(KERNEL)
        made = compiling.workers(1)
        os._exit(0 if made is not workers and begin(made, "b")[0].result(SECONDS) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


_ENDS = """
import time
from types import SimpleNamespace
from attn_compiler.lowerings.shared.launching import compiling
asked = [compiling.Asked(key=str(i), compile=lambda: time.sleep(0.5), finish=lambda _: None) for i in range(400)]
compiling.variants = lambda kernel, positional, named: asked
compiling.workers(2).begin(SimpleNamespace(fn=SimpleNamespace(__name__="kernel")), (), {})
"""


@pytest.mark.further
def test_a_process_that_ends_does_not_wait_for_what_was_not_begun() -> None:
    subprocess.run([sys.executable, "-c", _ENDS], check=True, timeout=60)


# ---- Triton's own variants ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked() -> Any:
    return printed_by(asked_variants)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("case", asked_variants.CASES)
def test_what_is_noted_is_what_launches_ask_for(case: str, asked: Any) -> None:
    assert asked[case]
    for call in asked[case]:
        assert call["noted"], call["body"]
        assert call["noted"] == call["launched"]
        assert call["noted_on_gpu"] == call["launched"]


def test_sizes_that_triton_tells_apart_are_other_variants(asked: Any) -> None:
    aligned, odd = (set(asked[case][0]["noted"]) for case in ("triton plain_64", "triton odd_lengths_64"))
    assert aligned.isdisjoint(odd)
    noted = {key for call in asked["lists"] for key in call["noted"]}
    assert len(asked["lists"]) == 8
    # The same parts and tiles share a kernel, whatever the lengths. Sums are the same for lists of either side.
    assert len([key for key in noted if key.startswith("tile_lists ")]) == 4
    assert len([key for key in noted if key.startswith("tile_bounds ")]) == 2


def test_sizes_that_differ_from_call_to_call_share_their_kernels(asked: Any) -> None:
    calls = asked["any size"]
    assert len(calls) == 8
    assert all(call["launched"] for call in calls)
    launched = [call["launched"] for call in calls]
    assert launched[:2] == launched[2:4], "of 143 and of 396 positions"
    assert launched[4:6] == launched[6:], "of multiples of 16"
    assert launched[:2] != launched[4:6]


@pytest.mark.further
def test_a_launch_finds_what_a_thread_compiled(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (found,) = printed_by(compiled_ahead, TORCH_LOGS="attn_compiler", TORCH_LOGS_OUT=str(log))
    assert "compiled tile_lists in" in log.read_text()
    assert found["begun"] == ["tile_bounds", "tile_lists", "tile_order"]
    assert found["begun_again"] == []
    assert found["left"] == []
    assert found["loaded_on_a_device"] is False
    assert found["launchers"] == [[name, "attn_compiler"] for name in sorted(found["begun"])], "in a thread, too"
    assert 0 < found["seconds"] < 600


@pytest.mark.usefixtures("triton_of_test")
def test_what_is_begun_after_the_end_is_not_waited_for(workers: Workers) -> None:
    """A function that runs when the process exits may compile a graph."""
    for early in (begin(workers, "a"), begin(workers, "b")):
        early[0].result(SECONDS)
    workers.threads.end()
    (future,) = begin(workers, "late")
    assert not wait([future], timeout=5).not_done
    assert future.cancelled()
    assert not workers.started
    assert not any(workers.waited.values())


def test_threads_that_begin_at_once_begin_a_variant_once(workers: Workers, caplog: pytest.LogCaptureFixture) -> None:
    go, met = threading.Event(), threading.Barrier(4)
    begun: list[Any] = []

    def asked(*_: Any) -> list[Asked]:
        met.wait(SECONDS)
        return [Asked(key="a", compile=lambda: go.wait(SECONDS), finish=lambda _: None)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "variants", asked)
        threads = [threading.Thread(target=lambda: begun.extend(begin(workers, "a"))) for _ in range(4)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SECONDS)
        finally:
            sys.setswitchinterval(interval)
    assert len(begun) == 1
    go.set()
    begun[0].result(SECONDS)
    assert "exception calling callback" not in caplog.text


# What Triton is shown of the numbers of calls that differ in their sizes.
@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"seqlen_q": 32, "seqlen_kv": 48, "heads": 3}, True),
        ({"seqlen_q": 32, "seqlen_kv": 40}, False),
        ({"seqlen_q": 32}, True),
        ({"heads": 32}, False),
    ],
)
def test_which_sort_a_call_is_of(numbers: dict[str, int], expected: bool) -> None:
    assert any_size.are_multiples(numbers) is expected


def test_numbers_say_nothing_but_their_width_and_whether_they_are_one() -> None:
    strides = tuples.DescaleStrides(*[2**31, 48, 1, 0, -(2**31) - 1, -16])
    found = shown((strides, 17, 0, -16, True, 0.5, None), multiples=False)
    assert found == (tuples.DescaleStrides(2**32 + 3, 3, 1, 3, 2**32 + 3, 3), 3, 3, 3, True, 0.5, None)
    assert type(found[0]) is tuples.DescaleStrides


def test_numbers_of_lengths_that_are_multiples_stay_multiples() -> None:
    strides = tuples.GradStrides(grad_b=2**31, grad_h=48, grad_q=17, grad_k=1)
    assert shown((strides, 0), multiples=True) == (tuples.GradStrides(2**32 + 16, 16, 3, 1), 16)


@pytest.mark.parametrize("multiples", [False, True])
def test_strides_of_heads_are_multiples_whatever_the_lengths_are(multiples: bool) -> None:
    assert shown(tuples.Strides(b=48 * 17, h=16, s=48), multiples=multiples) == tuples.Strides(16, 16, 16)
    assert shown(tuples.Strides(b=48 * 17, h=8, s=1), multiples=multiples) == tuples.Strides(3, 3, 1)


@pytest.mark.parametrize("multiples", [False, True])
def test_strides_of_lists_are_anything(multiples: bool) -> None:
    assert shown(tuples.ListStrides(48, 16, 17), multiples=multiples) == tuples.ListStrides(3, 3, 3)
