"""Embeddings of a SentenceTransformer that is compiled in place: one graph for every number and length of sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers

import attn_compiler
from attn_compiler.compiling.comparing import compare
from attn_compiler.passes.unpad.unpadding import PackedWork
from tests.integrations import launching
from tests.integrations.launching import LAYERS, SIZES, WORDS, found

SENTENCES = ["the cat sat on a mat", "dogs run", "old dogs run fast in the park the cat", "a cat"]
_SETTINGS = {"backend": "attn_compiler", "options": {"inner": "eager", "strict": True}}


@pytest.fixture
def embedders() -> Any:
    """The library. It is imported late: it brings much."""
    return pytest.importorskip("sentence_transformers", minversion="6.2")


@pytest.fixture
def path(embedders: Any, tmp_path: Path) -> str:
    """An embedder on disk."""
    from sentence_transformers.sentence_transformer import modules

    torch.manual_seed(0)
    bert = transformers.BertConfig(**{**SIZES, "vocab_size": len(WORDS), "max_position_embeddings": 64})
    inner = str(tmp_path / "bert")
    transformers.BertModel(bert).save_pretrained(inner)
    launching.tokenizer("right").save_pretrained(inner)
    parts = [modules.Transformer(inner, max_seq_length=32), modules.Pooling(bert.hidden_size)]
    outer = str(tmp_path / "embedder")
    embedders.SentenceTransformer(modules=parts, device="cpu").save(outer)
    return outer


@pytest.mark.usefixtures("quick")
def test_one_graph_for_all_sentences(embedders: Any, path: str) -> None:
    plain = embedders.SentenceTransformer(path, device="cpu")
    given = launching.run("sentence-transformers", path=path, sentences=SENTENCES)
    embedder: Any = given["embedder"]
    np.testing.assert_allclose(given["embeddings"], plain.encode(SENTENCES, batch_size=2), rtol=1e-5, atol=1e-6)
    embedder.encode(SENTENCES * 3, batch_size=5)
    (mask,) = found(sites=LAYERS)
    assert mask.endswith(": key padding attention_mask[b, k] (proved)")
    assert len(attn_compiler.reports()) == 1
    (site,) = attn_compiler.reports()[0].sites
    assert site.modules == tuple(f"0.model.encoder.layer.{i}.attention" for i in range(LAYERS))


@pytest.mark.usefixtures("quick")
def test_encode_without_padding(embedders: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The model is too small to gain from it.
    monkeypatch.setattr(PackedWork, "is_saved", lambda *_: True)
    plain, embedder = (embedders.SentenceTransformer(path, device="cpu") for _ in range(2))
    embedder.compile(dynamic=True, backend="attn_compiler", options={**_SETTINGS["options"], "unpad": True})
    for texts, size in ((SENTENCES, 2), (SENTENCES * 3, 5)):
        np.testing.assert_allclose(embedder.encode(texts, batch_size=size), plain.encode(texts), rtol=1e-5, atol=1e-6)
    (report,) = attn_compiler.reports()
    assert report.unpad is not None
    assert report.unpad.kept is None
    assert all(step.failed == () for step in report.unpad.last)


def test_what_compiles_nothing(embedders: Any, path: str) -> None:
    embedder = embedders.SentenceTransformer(path, device="cpu")
    torch.compile(embedder, **_SETTINGS).encode(SENTENCES)
    embedder[0].auto_model.compile(**_SETTINGS)
    embedder.encode(SENTENCES)
    assert len(attn_compiler.reports()) == 0


@pytest.mark.usefixtures("quick")
def test_compare_times_encode(embedders: Any, path: str) -> None:
    embedder = embedders.SentenceTransformer(path, device="cpu")
    embedder.compile(backend="eager")
    before, own = embedder.encode(SENTENCES), embedder._compiled_call_impl
    comparer = attn_compiler.comparer(seconds=0, dynamic=True, options={"inner": "eager", "unpad": True})
    found = comparer(embedder, SENTENCES, batch_size=2)
    assert [side.failure for side in found.sides] == [None] * 3
    for name in ("inductor", "attn_compiler"):
        outputs = found.side(name).outputs
        assert outputs is not None
        assert outputs.cosine is not None
        assert 0 <= outputs.cosine + 1e-9 < 1e-6
    (report,) = found.reports
    assert len(report.sites[0].modules) == LAYERS
    assert report.unpad is not None
    assert report.unpad.kept is None
    said = str(found)
    assert "SentenceTransformer: encode of 4 sentences" in said
    assert "sentences a second: eager " in said
    assert "the sentence that is farthest: inductor " in said
    assert embedder._compiled_call_impl is own, "compiled in place as before"
    np.testing.assert_array_equal(embedder.encode(SENTENCES), before)


@pytest.mark.parametrize("inputs", [(["a"], ["b"]), ([],), ("a",), (["a", 1],), ([torch.zeros(1)],)])
def test_what_is_no_list_of_sentences_is_given_to_the_model(inputs: tuple[Any, ...]) -> None:
    class Embeds(torch.nn.Linear):
        def encode(self) -> None: ...

    assert compare.encoding_of(Embeds(1, 1), inputs, {}) is None
    assert compare.encoding_of(torch.nn.Linear(1, 1), (["a"],), {}) is None
    assert compare.encoding_of(Embeds(1, 1), (["a"],), {}) is not None


@pytest.mark.usefixtures("quick")
def test_padding_is_left_out_after_a_first_sentence_alone(embedders: Any, path: str) -> None:
    """The mask's rows are a symbol of their own then. A sentence alone has no padding, and its graph leaves it out."""
    plain, embedder = (embedders.SentenceTransformer(path, device="cpu") for _ in range(2))
    embedder.compile(backend="attn_compiler", dynamic=True, options={"inner": "eager", "unpad": True})
    embedder.encode(SENTENCES[:1])
    np.testing.assert_allclose(embedder.encode(SENTENCES), plain.encode(SENTENCES), rtol=1e-5, atol=1e-6)
    alone, several = (report.unpad for report in attn_compiler.reports())
    assert alone is not None
    assert several is not None
    assert (alone.kept, several.kept) == (None, None)
    assert [call.failed for call in several.last] == [()]
