"""Private PyTorch API for a disk cache of ours: the user's cache settings, state that a result may depend on, and artifacts.

Our files join `torch.compiler.save_cache_artifacts`.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.compiler._cache import CacheArtifactManager

from attn_compiler.spec.target import version_of

#: libraries that decide if a kernel can be built, beside those that `Target` names
_BUILDERS = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "quack-kernels")


def are_wanted(patches: Mapping[str, Any]) -> bool:
    """Return True if Inductor would keep graphs on disk. patches: the user's settings of Inductor."""
    from torch._inductor import config

    def setting(name: str) -> bool:
        return bool(patches.get(name, getattr(config, name)))

    return setting("fx_graph_cache") and not setting("force_disable_caches")


def state(devices: Iterable[torch.device]) -> dict[str, Any]:
    """Return state of PyTorch and the machine that tracing and decisions may depend on, beside the graph and `Target`: plain data."""
    gpus = [device for device in devices if device.type == "cuda" and torch.cuda.is_available()]
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    return {
        # The stack limits the chain of ops through which a mask is read.
        "python": [sys.version, sys.getrecursionlimit()],
        "machine": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
        "torch": [str(torch.__version__), torch.version.git_version, torch.version.cuda, torch.version.hip],
        "builders": [version_of(name) for name in _BUILDERS],
        "gpus": sorted({torch.cuda.get_device_name(device) for device in gpus}),
        "grad": [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        "autocast": [
            [kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))]
            for kind in torch._C._autocast_supported_devices()
        ]
        + [torch.is_autocast_cache_enabled()],
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        ],
        "default": [str(torch.get_default_dtype()), str(torch.get_default_device())],
        "precision": [
            # Not by torch.get_float32_matmul_precision and allow_tf32: they raise if a user set precisions one by one.
            *(part.fp32_precision for part in (torch.backends, cuda.matmul, cudnn, cudnn.conv, cudnn.rnn)),
            *(part.fp32_precision for part in (mkldnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)),
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
        ],
        "sdpa": [
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            cuda.fp16_bf16_reduction_math_sdp_allowed(),
            list(torch._C._get_sdp_priority_order()),
            torch.backends.mha.get_fastpath_enabled(),
        ],
        "backends": [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch._C._get_mkldnn_enabled()],
        "modes": [
            *(
                type(torch._C._get_function_stack_at(i)).__qualname__
                for i in range(torch._C._len_torch_function_stack())
            ),
            "dispatch",
            *(
                type(torch._C._get_dispatch_stack_at(i)).__qualname__
                for i in range(torch._C._len_torch_dispatch_stack())
            ),
        ],
    }


def carry(path: str, data: Any) -> None:
    """Add a JSON file to `torch.compiler.save_cache_artifacts`. path: below `torch_inductor.cache_folder()`.

    It is stored as one of Inductor's own measurements, which are JSON files, too. An artifact of a kind of our own could be loaded only if
    this package was imported before; otherwise all other artifacts would be lost with it.
    """
    from torch._inductor.runtime.autotune_cache import AutotuneCacheArtifact

    CacheArtifactManager.record_artifact(AutotuneCacheArtifact.type(), path, data)


def content(data: Any) -> bytes:
    """Return the bytes of a loaded artifact's file: equal data has equal bytes."""
    return json.dumps(data).encode("ascii")
