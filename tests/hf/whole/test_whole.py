"""The survey of a whole package: what it reads of a file, what it makes of a config, and the rows of one file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.hf.today.running import PROVED, Row
from tests.hf.today.table import read_csv
from tests.hf.whole import __main__ as whole, packages
from tests.hf.whole.feeding import FIRST, choices
from tests.hf.whole.files import attending
from tests.hf.whole.packages import rows_of
from tests.hf.whole.shrinking import shrink
from tests.hf.whole.totals import differing, is_failed, lines, not_yet

BERT = "bert/modeling_bert.py"


def test_classes_that_attend_are_read_from_the_text() -> None:
    source = '''
def attend(q, k):
    return softmax(matmul(q, k))
def other(q):
    return softmax(q)
class ByFunction:
    def forward(self, q, k):
        return attend(q, k)
class ByItself:
    def forward(self, q, k):
        return (q @ k).softmax(-1)
class Fused:
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)
class Router:
    def forward(self, x):
        return other(self.gate(x))
class Told:
    """Such as softmax(matmul(q, k))."""
'''
    assert list(attending(source)) == ["ByFunction", "ByItself", "Fused"]


def test_a_config_keeps_a_layer_of_each_kind_and_its_widths() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3NextConfig()
    width, kinds = config.hidden_size, set(config.layer_types)
    shrink(config, few_words=True)
    assert set(config.layer_types) == kinds
    assert config.num_hidden_layers == len(kinds) == len(config.layer_types)
    assert (config.hidden_size, config.num_experts, config.vocab_size) == (width, 8, 512)
    assert config.num_experts_per_tok <= config.num_experts


def test_arguments_have_the_sizes_that_a_config_says() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(num_layers=1)
    with torch.device("meta"):
        model = transformers.T5Model(config)
    tried = [{name for name, one in given.items() if isinstance(one, torch.Tensor)} for given in choices(model, FIRST)]
    assert tried == [{"input_ids"}, {"input_ids", "decoder_input_ids"}]
    given = list(choices(model, FIRST, padded=True))[1]
    assert given["decoder_input_ids"].shape == given["attention_mask"].shape == (FIRST.batch, FIRST.length)


def test_a_file_has_rows_of_both_sizes_and_what_was_run_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(whole, "units", lambda package: [BERT])
    command = ["--jobs", "1", "--out", str(tmp_path / "found")]
    assert whole.main(command) == 0
    rows = read_csv(tmp_path / "found.csv")
    calls = [f"{impl}, {size}" for impl in ("sdpa", "eager") for size in ("first", "second")]
    self_attention, both = rows[:4], rows[4:]
    assert [row.call for row in self_attention] == [row.call for row in both] == calls
    assert [(row.found, row.total, row.masks) for row in self_attention] == [(1, 1, {PROVED: 1})] * 4
    assert all(row.found == row.total == 2 and row.model.startswith(f"{BERT} BertModel is_decoder") for row in both)
    assert list(differing(rows)) == []
    assert "1 run as a whole, 0 in part, 0 not" in lines(rows)[0]
    monkeypatch.setattr(whole, "rows_of", None)
    assert whole.main(command) == 0
    assert "0 in part, 0 not, 1 not yet." in lines([*rows, not_yet("a/b.py")])[0]


def test_what_takes_too_long_or_does_not_import_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")

    def busy(name: str) -> Iterator[Row]:
        while name:
            pass
        yield Row(model=name, call="", device="meta")

    monkeypatch.setitem(packages.PACKAGES, "transformers", packages.Package(units=list, rows=busy))  # type: ignore[arg-type]
    *_, row = rows_of("transformers", "slow", 1)
    assert (row.status, row.call, row.detail) == ("unavailable", "not built", "longer than 1 seconds")
    (row,) = rows_of("no_such_package", "slow", 1)
    assert (row.status, row.detail) == (
        "unavailable",
        "no_such_package does not import: No module named 'no_such_package'",
    )


def test_a_second_size_with_less_is_told() -> None:
    first = Row(model="a/b.py A", call="sdpa, first", device="meta", found=2, total=2, masks={PROVED: 2})
    second = dataclasses.replace(first, call="sdpa, second")
    dense = dataclasses.replace(second, masks={PROVED: 1, "data": 1})
    lost = dataclasses.replace(second, found=1)
    assert list(differing([first, second])) == []
    assert list(differing([first, dense])) == [(first, dense)]
    assert list(differing([first, lost])) == [(first, lost)]
    assert [is_failed(row) for row in (second, lost)] == [False, True]


@pytest.mark.parametrize(
    ("package", "name", "rows"),
    [("timm", "levit", 8), ("x_transformers", "plain", 8), ("diffusers", "DiTTransformer2DModel", 2)],
)
@pytest.mark.slow
def test_each_package_has_rows_of_both_sizes(package: str, name: str, rows: int) -> None:
    pytest.importorskip(package)
    found = [row for row in rows_of(package, name, 600) if row.status == "ok"]
    assert len(found) >= rows
    assert all(row.found == row.total > 0 for row in found)
    assert {row.call.rpartition(", ")[2] for row in found} == {"first", "second"}
