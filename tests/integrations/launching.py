"""Recipes of docs/recipes.md, tiny models to run them on, and what the reports say afterwards."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import attn_compiler
from attn_compiler.compiling import backend

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat dogs run fast in old park".split()
LAYERS = 2
#: what a tiny model of text is made of, by the names that most configs of transformers use
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 96,
    "vocab_size": 99,
}
DECODER = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def recipes() -> dict[str, str]:
    """The page's blocks of Python, by the headings that they stand below."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = {}
    for section in sections:
        blocks = re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
        if blocks:
            (found[section.splitlines()[0]],) = blocks
    return found


def run(heading: str, **names: Any) -> dict[str, Any]:
    """Run a recipe word for word. names: what its reader has already. Gives what is there afterwards. No warning of ours may be given."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", attn_compiler.AttnCompilerWarning)
        exec(compile(recipes()[heading], f"{PAGE.name}: {heading}", "exec"), names)
    return names


def graphs_without_us(launch: Callable[[], object]) -> int:
    """How many graphs Dynamo makes of it for a backend that does nothing."""
    given: list[torch.fx.GraphModule] = []

    def nothing(gm: torch.fx.GraphModule, example_inputs: object, **settings: object) -> Any:
        given.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with mock.patch.object(backend, "_compile", nothing):
        launch()
    torch._dynamo.reset()
    return len(given)


def found(*, sites: int) -> list[str]:
    """The masks of all graphs, one for each sort of site, as the reports name them. sites: how many each graph with attention has."""
    reports = attn_compiler.reports()
    assert [r.faults for r in reports if r.faults] == []
    assert [r.failure for r in reports if r.failure] == []
    assert reports.num_misses == 0
    assert {r.num_sites for r in reports if r.num_sites} == {sites}
    return [f"{site.spec.seqlen_q}: {_short(site.spec.mask.words)}" for report in reports for site in report.sites]


def _short(words: str) -> str:
    """A mask without its tensor's shape, and without the numbers in Dynamo's names."""
    words = re.sub(r"(, as)? dense \w+\[.*\]", lambda m: "" if m.group(1) else "not proved", f" {words}").strip()
    return re.sub(r"\bs\d+\b", "s", re.sub(r"attention_mask_\d+\[", "attention_mask[", words))


def llama(**config: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**DECODER, **config})).eval()


def prompts() -> dict[str, Tensor]:
    """Two prompts, the first of which is padded on the left."""
    ids = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def tokenizer(padding_side: str) -> Any:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    special = dict(zip(names, WORDS, strict=False))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, padding_side=padding_side, **special)
