"""Findings of `python -m attn_compiler doctor`: versions, GPUs, compilers, and the availability of every lowering."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.table import Column, Table

from attn_compiler.reasons.decisions import Reason
from attn_compiler.reasons.errors import UnsupportedTorch
from attn_compiler.reporting import wording
from attn_compiler.spec.target import (
    CUDNN_FRONTEND_DISTRIBUTION,
    FLASH_ATTN_4_DISTRIBUTION,
    INSTALL,
    Target,
    cudnn_version,
    cudnn_words,
    version_of,
)
from attn_compiler.spec.tried import not_tried

if TYPE_CHECKING:
    from attn_compiler.lowerings import Lowering

_OTHER_FOLDER = "name a folder that can be written to in the variable TORCHINDUCTOR_CACHE_DIR"
#: the most seconds that a command may take to print its version
_SECONDS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One line about the machine. advice: a remedy, if something helpful is missing."""

    name: str
    value: str
    advice: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Availability:
    """One lowering on one of the machine's targets ("cpu", "cuda"); available there without reasons against it."""

    lowering: str
    device: str
    reasons: tuple[Reason, ...]

    @property
    def available(self) -> bool:
        return not self.reasons


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkup:
    """All findings of the doctor. lowerings: one entry per lowering and target, in the order of LOWERINGS."""

    facts: tuple[Fact, ...]
    lowerings: tuple[Availability, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts and lists."""
        return {
            "facts": [dataclasses.asdict(fact) for fact in self.facts],
            "lowerings": [{**dataclasses.asdict(row), "available": row.available} for row in self.lowerings],
        }


def examine() -> Checkup:
    """Examine this machine. Initialises CUDA if there is a GPU. An unsupported torch is a fact, not an error."""
    try:
        from attn_compiler.torch_private import inductor as torch_inductor
    except UnsupportedTorch as error:
        return Checkup(facts=machine_facts(torch_advice=str(error)), lowerings=())
    from attn_compiler.lowerings import LOWERINGS

    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    targets = [Target.current(device) for device in devices]
    compiling = (compiler(torch_inductor.cpp_compiler()), *caches(torch_inductor))
    facts = (*machine_facts(not_tried("torch", targets[0].torch), gains(targets[0])), *compiling)
    return Checkup(facts=facts, lowerings=availabilities(LOWERINGS, targets))


def gains(target: Target) -> dict[str, str]:
    """Return the gain of each optional package that was measured on such a machine, by distribution."""
    from attn_compiler.lowerings import PACKAGES, standing

    known = {package.distribution: standing(package, target.sm) for package in PACKAGES}
    return {
        name: f". Its kernels were the fastest for {found.first} of {found.classes} measured sorts of attention, {found.speed:.2f} times "
        "what needs no package there; a report says it of your sites"
        for name, found in known.items()
        if found is not None
    }


def availabilities(lowerings: Iterable[Lowering], targets: Iterable[Target]) -> tuple[Availability, ...]:
    """Ask every lowering about every target."""
    targets = tuple(targets)
    return tuple(
        Availability(lowering=lowering.name, device=target.device, reasons=tuple(lowering.unavailable(target)))
        for lowering in lowerings
        for target in targets
    )


def machine_facts(torch_advice: str | None = None, gains: Mapping[str, str] | None = None) -> tuple[Fact, ...]:
    """Return versions and GPUs. torch_advice: the problem of the installed torch, if any. gains: of packages on this machine."""
    found = {CUDNN_FRONTEND_DISTRIBUTION: "", FLASH_ATTN_4_DISTRIBUTION: ""} | dict(gains or {})
    own_graphs = f"optional: {INSTALL[CUDNN_FRONTEND_DISTRIBUTION]} for cuDNN's own graphs"
    flash = f"optional, on Hopper and Blackwell: {INSTALL[FLASH_ATTN_4_DISTRIBUTION]}"
    return (
        Fact(name="attn_compiler", value=version_of("attn_compiler") or "not installed"),
        Fact(name="Python", value=platform.python_version()),
        Fact(name="CPU", value=f"{cpu_name()}, torch uses {wording.counted(torch.get_num_threads(), 'thread')}"),
        Fact(name="torch", value=str(torch.__version__), advice=torch_advice),
        _triton(),
        _cudnn(),
        _package(CUDNN_FRONTEND_DISTRIBUTION, own_graphs + found[CUDNN_FRONTEND_DISTRIBUTION]),
        _package(FLASH_ATTN_4_DISTRIBUTION, flash + found[FLASH_ATTN_4_DISTRIBUTION]),
        *_gpus(),
        driver(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        _package("transformers", f"optional: {INSTALL['transformers']} to compile Hugging Face models"),
    )


def cpu_name() -> str:
    """Return the CPU's name by Linux, else by Python."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def compiler(command: str | None) -> Fact:
    """Return the fact of the C++ compiler. command: found by Inductor; None: it found none, and then its first graph fails."""
    if command is None:
        advice = "Inductor needs one: install g++ (Debian, Ubuntu: apt install g++), or name one in the variable CXX"
        return Fact(name="C++ compiler", value="none that runs", advice=advice)
    return Fact(name="C++ compiler", value=_first_line([command, "--version"]) or command)


def caches(places: Any) -> tuple[Fact, ...]:
    """Return the cache folders of compiled code. places: `torch_inductor`."""
    try:
        folder = str(places.cache_folder())
    except OSError as error:
        return (Fact(name="Inductor's cache", value=f"none: {error}", advice=_OTHER_FOLDER),)
    inductor = Fact(name="Inductor's cache", value=folder, advice=None if os.access(folder, os.W_OK) else _OTHER_FOLDER)
    return (inductor, Fact(name="Triton's cache", value=places.kernel_cache_folder(0)))


def driver(query: Sequence[str]) -> Fact:
    """Return the fact of the driver. query: a command that prints the driver's version."""
    version = _first_line(query)
    if version is None:
        return Fact(name="NVIDIA driver", value="none that nvidia-smi finds")
    advice = "to use the GPU, install a CUDA build of torch" if torch.version.cuda is None else None
    return Fact(name="NVIDIA driver", value=version, advice=advice)


def to_tables(checkup: Checkup) -> tuple[Table, ...]:
    """Return tables for people: the machine, then lowerings with the reasons against them on this machine's best target. Lowerings with
    equal words share a row."""
    machine = Table("", Column("found", overflow="fold"), "what to do", title="machine", title_justify="left")
    for fact in checkup.facts:
        machine.add_row(fact.name, fact.value, escape(fact.advice or ""))
    if not checkup.lowerings:
        return (machine,)
    lowerings = Table("lowering", "available on", "why not, and what to do", title="lowerings", title_justify="left")
    for (usable, against), names in _alike(checkup.lowerings).items():
        lowerings.add_row(", ".join(names), ", ".join(usable) or "nothing here", escape("\n".join(map(str, against))))
    return machine, lowerings


def _alike(found: Sequence[Availability]) -> dict[tuple[tuple[str, ...], tuple[Reason, ...]], list[str]]:
    """Group lowerings by the devices they run on, and the reasons against them."""
    alike: dict[tuple[tuple[str, ...], tuple[Reason, ...]], list[str]] = {}
    for name in dict.fromkeys(row.lowering for row in found):
        rows = [row for row in found if row.lowering == name]
        usable = tuple(row.device for row in rows if row.available)
        # A lowering that runs on some device here is fine; not running on the other one is by design.
        alike.setdefault((usable, () if usable else rows[0].reasons), []).append(name)
    return alike


def _package(distribution: str, advice: str) -> Fact:
    version = version_of(distribution)
    return Fact(name=distribution, value=version or "not installed", advice=None if version else advice)


def _triton() -> Fact:
    fact = _package("triton", "comes with the CUDA builds of torch; needed by Triton kernels")
    if fact.advice is not None:
        return fact
    return dataclasses.replace(fact, advice=not_tried("triton", fact.value))


def _first_line(command: Sequence[str]) -> str | None:
    """Return the first line that a command prints; None if it can't be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


def _cudnn() -> Fact:
    version = cudnn_version()
    if version:
        return Fact(name="cuDNN", value=cudnn_words(version))
    return Fact(name="cuDNN", value="not in this build of torch", advice="to use a GPU, install a CUDA build of torch")


def _gpus() -> tuple[Fact, ...]:
    if torch.cuda.is_available():
        return tuple(_gpu(index) for index in range(torch.cuda.device_count()))
    if torch.version.cuda is None:
        return (Fact(name="GPU", value="none: this torch is built without CUDA"),)
    return (Fact(name="GPU", value="none that CUDA can use", advice="`nvidia-smi` says whether a driver is installed"),)


def _gpu(index: int) -> Fact:
    properties = torch.cuda.get_device_properties(index)
    memory = properties.total_memory / 2**30
    sm = f"sm{properties.major}{properties.minor}"
    return Fact(name=f"GPU {index}", value=f"{properties.name}, {sm}, {memory:.0f} GiB")
