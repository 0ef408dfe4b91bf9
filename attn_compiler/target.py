"""The facts about a machine that a decision may read: `Target.current(device)` asks PyTorch, `Target.fake(...)` makes one up for tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """device: "cpu" or "cuda". sm: compute capability as major*10+minor, 0 on CPU. cudnn: e.g. 91900 for 9.19.0, 0 if absent.

    torch, triton: version strings, "" if absent. disabled: SDPA kernels that the user switched off ("flash", "efficient",
    "cudnn"), read once when a graph is compiled. deterministic: torch.use_deterministic_algorithms is on.
    """

    device: str
    sm: int = 0
    cudnn: int = 0
    torch: str = ""
    triton: str = ""
    disabled: frozenset[str] = frozenset()
    deterministic: bool = False
