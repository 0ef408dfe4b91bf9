"""On a GPU, a small Llama learns documentation, its attention in bfloat16 and in FP8, several times each: how far apart rounding takes
runs, beside how far apart they are without.

    python -m benchmarks.fp8_learning benchmarks/results/fp8_training_h200.csv --budget-seconds 75
    python -m benchmarks.fp8_learning benchmarks/results/fp8_training_h200.csv --draw docs/fp8_training_h200.png
    python -m benchmarks.fp8_learning benchmarks/results/fp8_learning.csv --emulated --jobs 1

The last is emulated on a CPU, as in fp8_accuracy.py, by a smaller model. A seed is one beginning and one order of the text, the same for
every way to compute attention, so that differences are taken seed by seed. A run sees each part of the text at most once
(benchmarks/documentation.py). `held_out` is the loss on text that no run learns from, computed in bfloat16 for all. Each way is a
process, and all run at a time: what is compared is not time. Writes a row a run. Wants transformers, and matplotlib for the picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import multiprocessing
import queue
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import attn_compiler
from attn_compiler import CurrentScaling, DelayedScaling, Fp8Recipe
from benchmarks import documentation, fp8_learning_rows, harness
from benchmarks.documentation import Text
from benchmarks.fp8_learning_rows import BASELINE
from benchmarks.fp8_training import LEARNING_RATE, STEPS, WINDOW, Setup

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Way:
    """To compute attention: a lowering by name, and the recipe of one in FP8."""

    name: str
    lowering: str
    recipe: Fp8Recipe | None = None


_PER_TENSOR = CurrentScaling(granularity="tensor")
WAYS = (
    Way(name=BASELINE, lowering="sdpa_cudnn"),
    Way(name="bfloat16, flash", lowering="sdpa_flash"),
    Way(name="bfloat16, triton", lowering="triton"),
    Way(name="per block", lowering="hopper_fp8", recipe=Fp8Recipe()),
    Way(name="per tensor", lowering="hopper_fp8", recipe=Fp8Recipe(scaling=_PER_TENSOR)),
    Way(name="delayed", lowering="hopper_fp8", recipe=Fp8Recipe(scaling=DelayedScaling())),
    Way(name="accurate", lowering="hopper_fp8", recipe=Fp8Recipe(smooth_k=True, hadamard=True, qk_format="int8")),
    Way(name="backward too", lowering="cudnn_fp8", recipe=Fp8Recipe(scaling=_PER_TENSOR, backward=True)),
)
#: by the names of what they emulate
EMULATED_WAYS = (
    Way(name=BASELINE, lowering="untouched"),
    Way(name="bfloat16, flash", lowering="sdpa_cpu_flash"),
    *(dataclasses.replace(way, lowering="reference_fp8") for way in WAYS if way.lowering == "hopper_fp8"),
)
EMULATED = Setup(batch=4, length=256)
ON_GPU = Setup(
    device="cuda",
    lowering="",
    inner="inductor",
    hidden=512,
    layers=4,
    heads=4,
    heads_kv=2,
    batch=4,
    length=2048,
)
#: steps in which the learning rate rises to LEARNING_RATE; from there it falls to 0
WARMUP = 40
#: steps before one is captured: the first compiles, and makes the optimizer's state
_UNCAPTURED = 3
#: texts that a held-out loss is computed for, and so many of them at a time
_HELD_OUT, _AT_A_TIME = 256, 16


@dataclass(frozen=True, kw_only=True)
class Run:
    """losses: of each step. lowerings, note: what the report says of the attentions. captured: why the step was not made a CUDA graph, or
    "yes"."""

    way: str
    seed: int
    losses: list[float]
    held_out: float
    lowerings: str
    note: str
    captured: str
    seconds: float

    @property
    def means(self) -> dict[str, str]:
        """Of each WINDOW steps, by the one after the last of them."""
        ends = range(WINDOW, len(self.losses) + 1, WINDOW)
        return {f"step_{end}": f"{statistics.fmean(self.losses[end - WINDOW : end]):.5f}" for end in ends}

    @property
    def columns(self) -> dict[str, str]:
        end = statistics.fmean(self.losses[-WINDOW:])
        named = {"way": self.way, "seed": str(self.seed), "loss": f"{end:.5f}", "held_out": f"{self.held_out:.5f}"}
        about = {"lowerings": self.lowerings, "note": self.note, "captured": self.captured}
        return {**named, **about, "seconds": f"{self.seconds:.1f}", "steps": str(len(self.losses)), **self.means}


class Learner:
    """A model that is compiled once and learns again and again: the same tensors, with the numbers of another beginning."""

    def __init__(self, way: Way, setup: Setup) -> None:
        torch._dynamo.reset()
        self._way, self._setup = way, setup
        self._model = setup.model()
        options = {"lowering": way.lowering, "fp8_recipe": way.recipe, "inner": setup.inner, "strict": True}
        self._function = torch.compile(self._model, backend="attn_compiler", options=options, fullgraph=True)
        self._rate = torch.zeros((), device=setup.device)
        self._optimiser = torch.optim.AdamW(
            self._model.parameters(), lr=self._rate, fused=True, capturable=setup.device != "cpu"
        )
        self._tokens = torch.zeros((setup.batch, setup.length), dtype=torch.int64, device=setup.device)
        self._loss = torch.zeros((), device=setup.device)
        self._step: Callable[[], None] = self._plain_step
        self.captured = "no GPU"
        for _ in range(_UNCAPTURED):
            self._plain_step()
        (self._lowerings, self._note) = _decided()
        if setup.device != "cpu":
            self._capture()

    def learn(self, text: Text, seed: int, steps: int) -> Run:
        """From a new beginning."""
        start = time.perf_counter()
        self._begin(seed)
        found = torch.zeros(steps, device=self._setup.device)
        learnt = _in_rows(text.learnt, self._setup)
        order = torch.randperm(len(learnt), generator=torch.Generator().manual_seed(seed)).to(learnt.device)
        for step in range(steps):
            self._tokens.copy_(learnt[_rows(order, step, self._setup.batch)])
            self._rate.fill_(rate(step, steps))
            self._step()
            found[step] = self._loss
        return Run(
            way=self._way.name,
            seed=seed,
            losses=found.tolist(),
            held_out=self._held_out(text),
            lowerings=self._lowerings,
            note=self._note,
            captured=self.captured,
            seconds=time.perf_counter() - start,
        )

    def _begin(self, seed: int) -> None:
        with torch.no_grad():
            pairs = zip(self._model.parameters(), self._setup.model(seed).parameters(), strict=True)
            for parameter, fresh in pairs:
                parameter.copy_(fresh)
            for state in self._optimiser.state.values():
                for value in state.values():
                    value.zero_()
        histories = attn_compiler.fp8_state_dict()
        attn_compiler.load_fp8_state_dict({name: torch.zeros_like(x) for name, x in histories.items()})

    def _plain_step(self) -> None:
        with torch.autocast(self._setup.device, torch.bfloat16):
            loss = self._function(input_ids=self._tokens, labels=self._tokens, use_cache=False).loss
        loss.backward()
        self._optimiser.step()
        self._optimiser.zero_grad()
        self._loss.copy_(loss.detach())

    def _capture(self) -> None:
        """A step as one CUDA graph: it is small, and launching its kernels one by one takes longer than they do."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_UNCAPTURED):
                self._plain_step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._plain_step()
        except RuntimeError as failure:
            self.captured = str(failure).splitlines()[0][:120]
            return
        self._step, self.captured = graph.replay, "yes"

    @torch.no_grad()
    def _held_out(self, text: Text) -> float:
        rows = _in_rows(text.held_out, self._setup)[:_HELD_OUT]
        losses = []
        for tokens in rows.split(_AT_A_TIME):
            with torch.autocast(self._setup.device, torch.bfloat16):
                loss = self._model(input_ids=tokens.long(), labels=tokens.long(), use_cache=False).loss
            losses.append(loss.float() * len(tokens))
        return float(torch.stack(losses).sum()) / len(rows)


def rate(step: int, steps: int) -> float:
    """The learning rate: up in a line, and down to 0."""
    warmup = min(WARMUP, steps // 2)
    return LEARNING_RATE * min((step + 1) / max(warmup, 1), (steps - step) / (steps - warmup))


def _in_rows(text: bytes, setup: Setup) -> Tensor:
    """uint8 (n, length), of which each byte of the text is in one row at most."""
    count = len(text) // setup.length
    whole = torch.frombuffer(bytearray(text[: count * setup.length]), dtype=torch.uint8)
    return whole.view(count, setup.length).to(setup.device)


def _rows(order: Tensor, step: int, batch: int) -> Tensor:
    """Of a step; from the beginning again where there are no more."""
    return order[torch.arange(step * batch, (step + 1) * batch, device=order.device) % len(order)]


def _decided() -> tuple[str, str]:
    """What the report of the compiled graph says of its attentions: lowerings and notes."""
    sites = attn_compiler.reports()[-1].sites
    return (
        " ".join(sorted({site.decision.lowering for site in sites})),
        "; ".join(sorted({note for site in sites for note in site.notes})),
    )


# ---- all of them at a time ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process does: runs of a way, as many as there is time for until `deadline` (time.time())."""

    way: Way
    setup: Setup
    seeds: tuple[int, ...]
    steps: int
    deadline: float


def _work(job: Job, texts: Any, results: Any) -> None:
    """In a process of its own. Puts each Run, or the words of a failure."""
    _show_progress()
    _log.info("%s: begins", job.way.name)
    try:
        learner = Learner(job.way, job.setup)
        _log.info("%s: compiled; captured: %s", job.way.name, learner.captured)
        text = texts.get()
        longest = 0.0
        for seed in job.seeds:
            if time.time() + longest > job.deadline:
                break
            run = learner.learn(text, seed, job.steps)
            longest = max(longest, run.seconds)
            _log.info("%s: seed %d took %.1f s", job.way.name, seed, run.seconds)
            results.put(run)
    except Exception as failure:  # noqa: BLE001 - the other ways go on
        results.put(f"{job.way.name}: {type(failure).__name__}: {failure}".splitlines()[0][:300])


def _show_progress() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    _log.setLevel(logging.INFO)


def learnt(
    jobs: Sequence[Job], read: Callable[[], Text], *, at_a_time: int | None = None
) -> Iterator[Run | str | Text]:
    """First the text, then each run as it ends, or the words of a way that failed. The text is read while models are compiled.
    at_a_time: so many jobs; None: all."""
    context = multiprocessing.get_context("spawn")
    texts, results = context.Queue(), context.Queue()
    processes = [context.Process(target=_work, args=(job, texts, results)) for job in jobs]
    started = processes[:at_a_time]
    for process in started:
        process.start()
    text = read()
    _log.info("text of %d bytes", len(text.learnt))
    for _ in processes:
        texts.put(text)
    yield text
    while True:
        if len(started) < len(processes) and not all(process.is_alive() for process in started[-(at_a_time or 1) :]):
            started.append(processes[len(started)])
            started[-1].start()
        alive = any(process.is_alive() for process in started)
        try:
            yield results.get(timeout=0.5)
        except queue.Empty:
            if not alive:
                break
    for job, process in zip(jobs, processes, strict=True):
        if process.exitcode:
            yield f"{job.way.name}: its process ended with {process.exitcode}"
    # What nobody took would be waited for.
    texts.cancel_join_thread()


def main(arguments: Sequence[str] | None = None) -> int:
    """Learn and write rows as runs end, or draw what is written. 1 if a way failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--draw", type=Path, help="a picture of the results that there are; nothing is run")
    parser.add_argument("--ways", nargs="*", default=[way.name for way in WAYS])
    parser.add_argument("--emulated", action="store_true", help="on a CPU")
    parser.add_argument("--jobs", type=int, help="ways at a time; else all")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(6)))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--budget-seconds", type=float, default=600.0, help="no run begins that would end later")
    parser.add_argument("--text", type=Path, help="that documentation.py wrote; else it is read here")
    parser.add_argument("--readers", type=int, default=4, help="processes that read it (%(default)s)")
    parser.add_argument("--append", action="store_true", help="keep the rows that are there")
    parser.add_argument("--commit")
    given = parser.parse_args(arguments)
    if given.draw is not None:
        rows = harness.read(given.results)
        fp8_learning_rows.draw(rows, given.draw)
        fp8_learning_rows.print_table(rows)
        return 0
    _show_progress()
    deadline = time.time() + given.budget_seconds
    ways, setup = (EMULATED_WAYS, EMULATED) if given.emulated else (WAYS, ON_GPU)
    jobs = [
        Job(way=way, setup=setup, seeds=tuple(given.seeds), steps=given.steps, deadline=deadline)
        for way in ways
        if way.name in given.ways
    ]
    return _write(jobs, given)


def _text(given: argparse.Namespace) -> Text:
    return documentation.read(processes=given.readers) if given.text is None else documentation.load(given.text)


def _write(jobs: Sequence[Job], given: argparse.Namespace) -> int:
    text_columns: dict[str, str] = {}
    file: harness.CsvFile | None = None
    failures = []
    for found in learnt(jobs, lambda: _text(given), at_a_time=given.jobs):
        if isinstance(found, Text):
            sizes = {"learnt_bytes": str(len(found.learnt)), "held_out_bytes": str(len(found.held_out))}
            model = {
                name: str(getattr(jobs[0].setup, name)) for name in ("hidden", "layers", "heads", "batch", "length")
            }
            text_columns = {**model, **sizes, "text": found.digest, "packages": " ".join(found.packages)}
            text_columns |= harness.environment(jobs[0].setup.device, given.commit)
        elif isinstance(found, Run):
            row = {**found.columns, **text_columns}
            file = file or harness.CsvFile(given.results, tuple(row), append=given.append)
            file.add(row)
        else:
            failures.append(found)
    if file is not None:
        fp8_learning_rows.print_table(file.rows)
    for failure in failures:
        Console().print(failure, markup=False)
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
