"""What `python -m attn_compiler doctor` finds out: versions, GPUs, and for every lowering whether it can run here."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.table import Table

from attn_compiler.decisions import Reason
from attn_compiler.errors import UnsupportedTorch
from attn_compiler.target import (
    CUDNN_FRONTEND_DISTRIBUTION,
    FLASH_ATTN_4_DISTRIBUTION,
    Target,
    cudnn_version,
    cudnn_words,
)

if TYPE_CHECKING:
    from attn_compiler.lowerings import Lowering


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One line about the machine. advice: what to do, if something is missing that would help."""

    name: str
    value: str
    advice: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Availability:
    """One lowering on one of the machine's targets ("cpu", "cuda"); available there when nothing speaks against it."""

    lowering: str
    device: str
    reasons: tuple[Reason, ...]

    @property
    def available(self) -> bool:
        return not self.reasons


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkup:
    """Everything that the doctor found. lowerings: one entry per lowering and target, in the order of LOWERINGS."""

    facts: tuple[Fact, ...]
    lowerings: tuple[Availability, ...]

    def to_json(self) -> dict[str, Any]:
        """The same, in plain dicts and lists."""
        return {
            "facts": [dataclasses.asdict(fact) for fact in self.facts],
            "lowerings": [{**dataclasses.asdict(row), "available": row.available} for row in self.lowerings],
        }


def examine() -> Checkup:
    """Look at this machine. Initialises CUDA if there is a GPU. An unsupported torch is a fact, not an error."""
    try:
        from attn_compiler import torch_compat
    except UnsupportedTorch as error:
        return Checkup(facts=machine_facts(torch_advice=str(error)), lowerings=())
    del torch_compat  # imported for its check alone
    from attn_compiler.lowerings import LOWERINGS

    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    targets = [Target.current(device) for device in devices]
    facts = machine_facts(gains=gains(targets[0]))
    return Checkup(facts=facts, lowerings=availabilities(LOWERINGS, targets))


def gains(target: Target) -> dict[str, str]:
    """Of packages that are not needed and were measured on such a machine: by distribution, what they gain."""
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
    """Versions and GPUs. torch_advice: what is wrong with the installed torch, if anything. gains: of packages, what they gain here."""
    found = {CUDNN_FRONTEND_DISTRIBUTION: "", FLASH_ATTN_4_DISTRIBUTION: ""} | dict(gains or {})
    own_graphs = "optional: pip install 'attn_compiler[cudnn]' for cuDNN's own graphs"
    flash = "optional, on Hopper and Blackwell: pip install 'attn_compiler[fa4]'"
    return (
        Fact(name="attn_compiler", value=_version("attn_compiler")),
        Fact(name="Python", value=platform.python_version()),
        Fact(name="torch", value=str(torch.__version__), advice=torch_advice),
        _package("triton", "comes with the CUDA builds of torch; needed by Triton kernels"),
        _cudnn(),
        _package(CUDNN_FRONTEND_DISTRIBUTION, own_graphs + found[CUDNN_FRONTEND_DISTRIBUTION]),
        _package(FLASH_ATTN_4_DISTRIBUTION, flash + found[FLASH_ATTN_4_DISTRIBUTION]),
        *_gpus(),
        _package("transformers", "optional: pip install 'attn_compiler[models]' to compile Hugging Face models"),
    )


def to_tables(checkup: Checkup) -> tuple[Table, ...]:
    """For people: the machine, then one row per lowering with what stands in its way on this machine's best target."""
    machine = Table("", "found", "what to do", title="machine", title_justify="left")
    for fact in checkup.facts:
        machine.add_row(fact.name, fact.value, escape(fact.advice or ""))
    if not checkup.lowerings:
        return (machine,)
    lowerings = Table("lowering", "available on", "why not, and what to do", title="lowerings", title_justify="left")
    for name in dict.fromkeys(row.lowering for row in checkup.lowerings):
        rows = [row for row in checkup.lowerings if row.lowering == name]
        usable = [row.device for row in rows if row.available]
        # A lowering that runs on some device here is fine; that it does not run on the other is by design.
        against = () if usable else rows[0].reasons
        lowerings.add_row(name, ", ".join(usable) or "nothing here", escape("\n".join(map(str, against))))
    return machine, lowerings


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _package(distribution: str, advice: str) -> Fact:
    version = _version(distribution)
    return Fact(name=distribution, value=version, advice=advice if version == "not installed" else None)


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
