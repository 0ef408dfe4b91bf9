"""How long the Triton kernels take with given tiles, on stand-ins for a site's tensors. Imports triton, so it comes late."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from triton.errors import TritonError
from triton.testing import do_bench

from attn_compiler.lowerings.base import Tiles
from attn_compiler.lowerings.shared.kernel_plan import Call
from attn_compiler.lowerings.shared.on_device import on
from attn_compiler.lowerings.triton import launch
from attn_compiler.lowerings.triton.autotune import Unfit
from attn_compiler.lowerings.triton.stand_ins import StandIn
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.torch_private import compat as torch_compat

Clock = Callable[[Callable[[], object]], float]

#: milliseconds of runs before, and during the measurement of one kernel
_WARMUP, _MEASURED = 10, 40


def gpu_clock(run: Callable[[], object]) -> float:
    """Microseconds on the current device from CUDA events: the median of runs that each find an empty L2."""
    return 1e3 * float(do_bench(run, warmup=_WARMUP, rep=_MEASURED, return_mode="median"))


class Measurer:
    """Measures the kernels of one spec on a device; an `autotune.Measure`. The tensors live as long as it does."""

    def __init__(self, spec: AttentionSpec, device: torch.device, clock: Clock = gpu_clock) -> None:
        self._spec = spec
        self._device = device
        self._clock = clock

    def __call__(self, kernel: str, tiles: Tiles) -> float:
        """Microseconds of "forward", "grad_q" or "grad_kv". Raises Unfit if it does not compile or does not fit into the GPU."""
        try:
            with torch_compat.real_tensors(), on(self._device):
                return self._clock(self._run(kernel, tiles))
        except (TritonError, RuntimeError) as error:
            raise Unfit(
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            ) from error

    def _run(self, kernel: str, tiles: Tiles) -> Callable[[], object]:
        given, text = self._given, Call(spec=self._spec, tiles=tiles).to_text()
        operands = given.operands(tiles)
        if kernel == "forward":
            return functools.partial(launch.forward, given.q, given.k, given.v, operands, text)
        out, lse = launch.forward(given.q, given.k, given.v, operands, text)
        upstream = given.gradients(out, lse)
        shared = launch.begin_backward(*upstream, given.q, given.k, given.v, operands, out, lse, text)
        return launch.single_gradients(shared)[kernel]

    @functools.cached_property
    def _given(self) -> StandIn:
        return StandIn(self._spec, self._device)
