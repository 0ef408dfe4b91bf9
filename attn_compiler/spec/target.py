"""Facts about a machine that a decision may read: `Target.current(device)` is this one, `Target.fake()` a made-up one."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
from dataclasses import dataclass
from typing import Any

from attn_compiler.spec.assemblers import hopper_assembler

#: Triton reads this when a kernel is defined: kernels are then interpreted, on the CPU too
TRITON_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

TRITON_DISTRIBUTIONS = ("triton", "pytorch-triton", "triton-windows")
FLASH_ATTN_4_DISTRIBUTION = "flash-attn-4"
CUDNN_FRONTEND_DISTRIBUTION = "nvidia-cudnn-frontend"
ASSEMBLER_DISTRIBUTION = "nvidia-cuda-nvcc"
#: commands that install the releases that were tried, by package: these packages are on the index, and extras of this one are not
INSTALL = {
    FLASH_ATTN_4_DISTRIBUTION: "pip install 'flash-attn-4==4.0.0b36'",
    CUDNN_FRONTEND_DISTRIBUTION: "pip install 'nvidia-cudnn-frontend>=1.27,<1.33'",
    ASSEMBLER_DISTRIBUTION: "pip install 'nvidia-cuda-nvcc>=13.1,<13.2'",
    "transformers": "pip install 'transformers>=5.17,<6'",
}
#: the major number of Hopper's compute capability
_HOPPER = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A machine.

    device: "cpu" or "cuda". sm: compute capability, major*10+minor; 0 on CPU. cudnn: 91900 for 9.19.0, 0 if absent.
    torch, triton: version strings, "" if absent.
    disabled: SDPA kernels that the user switched off ("flash", "efficient", "cudnn", "math"), read once when a graph is compiled.
    deterministic: torch.use_deterministic_algorithms is on.
    triton_interpreted: Triton's kernels run in its interpreter, on any device.
    flash_attn_4, cudnn_frontend: their versions, "" if absent or without a GPU.
    mixed_gpus: the process sees GPUs of several architectures.
    processors: multiprocessors of the GPU, 0 on CPU.
    ptxas: the version of the assembler for our Triton kernels with wgmma (spec/assemblers.py), "13.1"; "" if unknown, or not on Hopper.
    without_wgmma: Triton is told not to use wgmma (DISABLE_MMA_V3).
    packaged: the decision goes into an exported program, which runs without this package.
    avx512: PyTorch's kernels use AVX-512 here; no on a GPU.
    """

    device: str
    sm: int = 0
    cudnn: int = 0
    torch: str = ""
    triton: str = ""
    cudnn_frontend: str = ""
    disabled: frozenset[str] = frozenset()
    deterministic: bool = False
    triton_interpreted: bool = False
    flash_attn_4: str = ""
    mixed_gpus: bool = False
    processors: int = 0
    ptxas: str = ""
    without_wgmma: bool = False
    packaged: bool = False
    avx512: bool = False

    @staticmethod
    def current(device: str) -> Target:
        """Return this machine, seen from `device` ("cpu", "cuda", "cuda:1"), with the current flags. Never initialises CUDA for another
        device. "cuda" without a usable GPU (fake tensors may name it) has sm 0."""
        import torch as torch_module

        parsed = torch_module.device(device)
        has_gpu = parsed.type == "cuda" and torch_module.cuda.is_available()
        major, minor = torch_module.cuda.get_device_capability(parsed) if has_gpu else (0, 0)
        triton = _triton_version()
        return Target(
            device=parsed.type,
            sm=major * 10 + minor,
            cudnn=cudnn_version() if has_gpu else 0,
            torch=str(torch_module.__version__),
            triton=triton,
            cudnn_frontend=version_of(CUDNN_FRONTEND_DISTRIBUTION) if has_gpu else "",
            disabled=_disabled_kernels(),
            deterministic=torch_module.are_deterministic_algorithms_enabled(),
            triton_interpreted=TRITON_INTERPRETED,
            flash_attn_4=version_of(FLASH_ATTN_4_DISTRIBUTION) if has_gpu else "",
            mixed_gpus=has_gpu and _has_mixed_gpus(),
            processors=torch_module.cuda.get_device_properties(parsed).multi_processor_count if has_gpu else 0,
            ptxas=hopper_assembler(triton).version if major == _HOPPER else "",
            without_wgmma=has_gpu and os.environ.get("DISABLE_MMA_V3", "").lower() in ("1", "on", "true"),
            avx512=parsed.type == "cpu" and _has_avx512(),
        )

    @staticmethod
    def fake(
        *,
        device: str = "cuda",
        sm: int | None = None,
        cudnn: int | None = None,
        torch: str = "2.13.0",
        triton: str = "3.7.0",
        cudnn_frontend: str = "",
        disabled: frozenset[str] = frozenset(),
        deterministic: bool = False,
        triton_interpreted: bool = False,
        flash_attn_4: str = "",
        mixed_gpus: bool = False,
        processors: int | None = None,
        ptxas: str | None = None,
        without_wgmma: bool = False,
        packaged: bool = False,
        avx512: bool = False,
    ) -> Target:
        """Return a made-up machine: an H200 with cuDNN 9.19.0 unless told otherwise; on "cpu", sm, cudnn and processors default to 0.
        ptxas: by default, on Hopper, that of our kernels with Triton 3.7 and a CUDA 13 driver."""
        on_gpu = device == "cuda"
        is_hopper = on_gpu and sm in (None, 90)
        return Target(
            device=device,
            sm=(90 if on_gpu else 0) if sm is None else sm,
            cudnn=(91900 if on_gpu else 0) if cudnn is None else cudnn,
            torch=torch,
            triton=triton,
            cudnn_frontend=cudnn_frontend,
            disabled=disabled,
            deterministic=deterministic,
            triton_interpreted=triton_interpreted,
            flash_attn_4=flash_attn_4,
            mixed_gpus=mixed_gpus,
            processors=(132 if on_gpu else 0) if processors is None else processors,
            ptxas=("13.1" if is_hopper else "") if ptxas is None else ptxas,
            without_wgmma=without_wgmma,
            packaged=packaged,
            avx512=avx512,
        )

    @property
    def words(self) -> str:
        """For people: "cuda sm90, cuDNN 9.19.0, torch 2.13.0, triton 3.7.0; flash off"."""
        parts = [f"{self.device} sm{self.sm}" if self.sm else self.device]
        parts += [f"cuDNN {cudnn_words(self.cudnn)}"] if self.cudnn else []
        versions = (
            ("torch", self.torch),
            ("triton", self.triton),
            (FLASH_ATTN_4_DISTRIBUTION, self.flash_attn_4),
            (CUDNN_FRONTEND_DISTRIBUTION, self.cudnn_frontend),
        )
        parts += [f"{name} {version}" for name, version in versions if version]
        notes = [f"{kernel} off" for kernel in sorted(self.disabled)] + ["deterministic"] * self.deterministic
        notes += ["triton interpreted"] * self.triton_interpreted
        notes += ["GPUs of several architectures"] * self.mixed_gpus
        notes += ["no wgmma"] * self.without_wgmma
        notes += ["for an exported program"] * self.packaged
        notes += ["AVX-512"] * self.avx512
        return ", ".join(parts) + "".join(f"; {note}" for note in notes)

    def digest(self) -> str:
        """Return a short hash of every field, the same in every process."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        text = json.dumps(fields, sort_keys=True, default=sorted)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def cudnn_version() -> int:
    """Return torch's cuDNN, e.g. 91900 for 9.19.0; 0 if this build of torch has none. Needs no GPU."""
    import torch

    cudnn: Any = torch.backends.cudnn
    return cudnn.version() or 0


def cudnn_words(version: int) -> str:
    """Format a version: 9.19.0 for 91900, 8.9.2 for 8902 (cuDNN moved to five digits with 9)."""
    major, rest = divmod(version, 10_000 if version >= 10_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _disabled_kernels() -> frozenset[str]:
    import torch

    cuda: Any = torch.backends.cuda
    enabled = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    return frozenset(kernel for kernel, on in enabled.items() if not on)


@functools.cache
def _has_avx512() -> bool:
    import torch

    return torch.backends.cpu.get_cpu_capability() == "AVX512"


@functools.cache
def _has_mixed_gpus() -> bool:
    import torch

    return len({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}) > 1


def _triton_version() -> str:
    return next(filter(None, map(version_of, TRITON_DISTRIBUTIONS)), "")


@functools.cache
def version_of(distribution: str) -> str:
    """Return the version of an installed distribution; "" if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
