"""Planted faults: changes of our own code that make some result wrong. The fuzzer has to find them (python -m tests.fuzz.recall)."""

from tests.fuzz.planted import (
    algebra,
    borders,
    expressions,
    keyless,
    linear,
    lowering,
    padding,
    prompts,
    reading,
    sites,
    views,
)
from tests.fuzz.planted.fault import KERNELS, DoesNotApply, Fault, plant, swap

FAULTS: tuple[Fault, ...] = (
    *views.ALL,
    *sites.ALL,
    *reading.ALL,
    *expressions.ALL,
    *lowering.ALL,
    *borders.ALL,
    *keyless.ALL,
    *padding.ALL,
    *prompts.ALL,
    *linear.ALL,
    *algebra.ALL,
)

__all__ = ["FAULTS", "KERNELS", "DoesNotApply", "Fault", "plant", "swap"]
