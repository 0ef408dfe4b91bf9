"""Elements read off a graph as expressions, and masks proved from them: evaluated at every index against the tensor itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index
from attn_compiler.masks import MaskSpec
from attn_compiler.passes import axes
from attn_compiler.passes import reading as reading_rules
from attn_compiler.passes.mirror import Mirror
from tests.passes.compiling import compiled, mark, mirror_of
from tests.passes.mirror_values import MirrorValues

Tensor = torch.Tensor
B, S, KEYS, D = 2, 5, 7, 8
LOWEST = torch.finfo(torch.float32).min
NAMES = ("b", "h", "q", "k")


# ---- evaluating ---------------------------------------------------------------------------------------------------


@dataclass
class _Reading:
    """text: of the expression read for the output. equal: whether it is the output, at every index."""

    text: str
    loads: set[str]
    equal: bool


def _read(function: Callable[..., Tensor], *inputs: Tensor, dynamic_sizes: tuple[int, ...] = ()) -> _Reading:
    mirror = mirror_of(function, *(mark(t, dynamic_sizes) for t in inputs))
    output = next(n for n in mirror.graph.nodes if n.op == "output").args[0]
    node = output[0] if isinstance(output, (list, tuple)) else output
    reader = reading_rules.of(mirror)
    rank = node.meta["val"].dim()
    expression = reader.read(node, tuple(map(Index, NAMES[4 - rank :])))
    run, sizes = _run(mirror, inputs)
    wanted = run.of_node[node]

    def load(name: str, at: tuple[int, ...]) -> Any:
        return run.held(reader.tensors[name])[at].item()

    equal = True
    for at in itertools.product(*map(range, wanted.shape)):
        numbers = dict(zip(NAMES[4 - rank :], at, strict=True)) | sizes
        found = ix.evaluate(expression, numbers, load)
        equal = equal and found == pytest.approx(wanted[at].item())
    return _Reading(text=ix.text(expression), loads=set(reader.tensors), equal=equal)


def _run(mirror: Mirror, inputs: tuple[Tensor, ...]) -> tuple[MirrorValues, dict[str, int]]:
    """Every node's value, and every symbol's."""
    placeholders = [n for n in mirror.graph.nodes if n.op == "placeholder"]
    tensors = [n for n in placeholders if isinstance(n.meta.get("val"), Tensor)]
    of_shape = {tuple(map(str, n.meta["val"].shape)): n for n in tensors}
    assert len(of_shape) == len(inputs), "inputs of these tests differ in shape"
    sizes: dict[str, int] = {}
    given: dict[fx.Node, Any] = {}
    for node, tensor in zip(_in_order(tensors, inputs), inputs, strict=True):
        given[node] = tensor.clone()
        sizes |= {str(axes.size_expr(s)): n for s, n in zip(node.meta["val"].shape, tensor.shape, strict=True)}
    arguments = [given.get(n, sizes.get(str(n.meta.get("val")))) for n in placeholders]
    interpreter = MirrorValues(mirror)
    interpreter.run(*arguments)
    return interpreter, {name: n for name, n in sizes.items() if not name.isdigit()}


def _in_order(nodes: list[fx.Node], inputs: tuple[Tensor, ...]) -> list[fx.Node]:
    """The placeholder of each input: Dynamo orders them by first use. Told apart by their known sizes and dtype."""

    def fits(node: fx.Node, tensor: Tensor) -> bool:
        value = node.meta["val"]
        hints = [s.node.hint if isinstance(s, torch.SymInt) else s for s in value.shape]
        return hints == list(tensor.shape) and value.dtype == tensor.dtype

    return [next(n for n in nodes if fits(n, tensor)) for tensor in inputs]


# ---- programs -----------------------------------------------------------------------------------------------------

q_rows, k_columns = (lambda n=S: torch.arange(n)[:, None]), (lambda n=KEYS: torch.arange(n)[None, :])

#: masks and biases that need nothing but positions
POSITIONS: dict[str, Callable[[], Tensor]] = {
    "tril": lambda: torch.ones(S, KEYS, dtype=torch.bool).tril(),
    "tril of a diagonal": lambda: torch.ones(S, KEYS, dtype=torch.bool).tril(diagonal=2),
    "triu inverted": lambda: ~torch.ones(S, KEYS, dtype=torch.bool).triu(1),
    "triu of numbers": lambda: torch.full((S, S), LOWEST).triu(diagonal=1),
    "tril of numbers": lambda: torch.tril(torch.ones(S, KEYS)) * 3,
    "compared positions": lambda: k_columns() <= q_rows() + 2,
    "strictly compared": lambda: k_columns() < q_rows(),
    "a window": lambda: (k_columns() > q_rows() - 3) & (k_columns() <= q_rows()),
    "a band": lambda: (q_rows() - k_columns()).abs() <= 2,
    "chunks": lambda: q_rows() // 2 == torch.div(k_columns(), 2, rounding_mode="floor"),
    "every other key": lambda: (k_columns() + q_rows()) % 2 == 0,
    "an or": lambda: (k_columns() <= q_rows()) | (k_columns() < 3),
    "exclusive or": lambda: torch.logical_xor(k_columns() <= q_rows(), k_columns() < 3),
    "nested not": lambda: ~(~(k_columns() <= q_rows()) & (k_columns() != 4)),
    "where of numbers": lambda: torch.where(k_columns() <= q_rows(), 0.0, LOWEST),
    "masked_fill": lambda: torch.zeros(S, KEYS).masked_fill(k_columns() > q_rows(), -torch.inf),
    "inverted floats": lambda: (1.0 - (k_columns() <= q_rows()).float()) * LOWEST,
    "arange of a step": lambda: torch.arange(0, 2 * KEYS, 2)[None, :] <= torch.arange(3, S + 3)[:, None],
    "unsqueezed and expanded": lambda: (k_columns() <= q_rows())[None, None].expand(B, 3, S, KEYS),
    "sliced": lambda: (torch.arange(12)[None, :] <= torch.arange(12)[:, None])[3 : 3 + S, :KEYS],
    "repeated": lambda: (torch.arange(S)[:, None] * torch.ones(1, 1, dtype=torch.int64)).repeat(1, KEYS) >= k_columns(),
    "repeated along a new axis": lambda: torch.arange(KEYS).repeat(S, 1) <= q_rows(),
    "repeated in whole": lambda: torch.arange(3).repeat(3)[:KEYS].expand(S, -1) <= q_rows(),
    "tiled": lambda: torch.tile(torch.arange(S)[:, None], (KEYS,)) > k_columns(),
    "repeated number": lambda: torch.full((), 2).repeat(KEYS).expand(S, -1) > k_columns(),
    "tiled in part": lambda: torch.arange(4).tile(2, 3, 2)[1, 0, :KEYS] <= q_rows(),
    "interleaved": lambda: torch.arange(4).repeat_interleave(2, 0)[:KEYS].expand(S, -1),
    "interleaved from one": lambda: torch.arange(S)[:, None].repeat_interleave(KEYS, dim=-1) >= k_columns(),
    "selected": lambda: torch.ones(3, S, KEYS, dtype=torch.bool).tril(1)[1],
    "transposed": lambda: (torch.arange(S)[None, :] >= torch.arange(KEYS)[:, None]).transpose(0, 1),
    "permuted": lambda: (k_columns() <= q_rows()).view(S, KEYS, 1).permute(2, 0, 1),
    "cast around": lambda: (k_columns() <= q_rows()).float().to(torch.int64).bool(),
    "minimum": lambda: torch.minimum(q_rows(), k_columns()) < 3,
    "maximum": lambda: torch.maximum(q_rows(), torch.tensor(2)) >= k_columns(),
    "negative positions": lambda: -q_rows() + 4 >= k_columns() - 1,
    "multiplied positions": lambda: 2 * k_columns() - 3 <= q_rows() * 3,
    "distances": lambda: (k_columns() - q_rows()).float() * 0.5,
    "gathered rows": lambda: (torch.arange(9)[:, None] >= torch.arange(KEYS))[torch.arange(S) + 2],
    "a constant": lambda: torch.full((S, KEYS), 3.5),
    "false everywhere": lambda: torch.zeros(S, KEYS, dtype=torch.bool) & (k_columns() < 3),
    "integers of a condition": lambda: (k_columns() <= q_rows()).int() + 1 == 2,
    "rsub": lambda: 1 - torch.ones(S, KEYS).tril(),
    "not equal": lambda: k_columns() - 1 != q_rows(),
    "like another": lambda: torch.zeros_like(torch.ones(S, KEYS)).masked_fill(k_columns() >= 3, LOWEST),
    "cumulative": lambda: torch.ones(KEYS, dtype=torch.int64).cumsum(0)[None, :] <= q_rows(),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_what_only_positions_say_is_read_in_full(name: str) -> None:
    reading = _read(lambda x: POSITIONS[name]() if x is None else _joined(POSITIONS[name](), x), torch.zeros(()))
    assert reading.equal, reading.text
    assert reading.loads <= {"x"}, reading.text


def _joined(mask: Tensor, x: Tensor) -> Tensor:
    """The mask, in a graph that Dynamo has a reason to capture."""
    return mask & (x == 0) if mask.dtype == torch.bool else mask + x.to(mask.dtype)


#: masks that load from a tensor given at run time: (function, inputs)
LOADS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "padding": (lambda m: m[:, None, None, :] != 0, (torch.tensor([[1, 1, 0], [1, 0, 0]]),)),
    "padding as numbers": (
        lambda m: (1.0 - m[:, None, None, :].float()) * LOWEST,
        (torch.tensor([[1, 1, 0], [1, 0, 0]]),),
    ),
    "padding and causal": (
        lambda m: m[:, None, None, :].bool() & torch.ones(3, 3, dtype=torch.bool).tril(),
        (torch.tensor([[1, 1, 0], [1, 0, 0]]),),
    ),
    "lengths": (lambda n: torch.arange(KEYS)[None, :] < n[:, None], (torch.tensor([3, 5]),)),
    "a cache position": (lambda p: torch.arange(KEYS)[None, :] <= p[:, None], (torch.tensor([2, 3, 4]),)),
    "documents": (lambda d: d[:, None, :, None] == d[:, None, None, :], (torch.tensor([[0, 0, 1], [0, 1, 1]]),)),
    "negative ids": (lambda d: (d[:, :, None] == d[:, None, :]) & (d[:, None, :] >= 0), (torch.tensor([[0, -1, 1]]),)),
    "a bias looked up": (lambda t: t[(q_rows() - k_columns()).abs()], (torch.randn(9),)),
    "an embedding": (lambda t: F.embedding((q_rows() - k_columns()).clamp(0, 3).abs(), t), (torch.randn(4, 3),)),
    "slopes": (lambda s: s[:, None, None] * (k_columns() - q_rows()), (torch.tensor([0.5, 0.25]),)),
    "an element": (lambda t: k_columns() <= q_rows() + t[1], (torch.tensor([1, 2]),)),
    "a comparison of floats": (lambda t: t[:, None] > t[None, :], (torch.tensor([0.5, float("nan"), 1.5]),)),
    "bools of floats": (lambda t: t.bool()[None, :], (torch.tensor([0.0, -0.5, 2.0]),)),
    "opaque": (lambda t: t.sin().cos()[None, :] > 0, (torch.randn(4),)),
    "running count": (lambda t: (t != 0).cumsum(-1), (torch.tensor([[1, 0, 1], [1, 1, 0]]),)),
    "starts of documents": (
        lambda t: torch.diff(t, prepend=t[:, :1], dim=-1) != 0,
        (torch.tensor([[0, 0, 1, 2], [0, 1, 1, 1]]),),
    ),
}


@pytest.mark.parametrize("name", LOADS)
def test_what_a_tensor_says_is_a_load(name: str) -> None:
    function, inputs = LOADS[name]
    reading = _read(function, *inputs)
    assert reading.equal, reading.text
    assert reading.loads


@pytest.mark.parametrize("length", [4, 6])
def test_symbolic_sizes_are_read_as_sizes(length: int) -> None:
    def function(x: Tensor) -> Tensor:
        n = x.size(1)
        return (torch.arange(n)[None, :] <= torch.arange(n)[:, None]) & (torch.arange(n) < n - 1) & (x[0] == 0)

    reading = _read(function, torch.zeros(B, length), dynamic_sizes=(length,))
    assert reading.equal, reading.text


@pytest.mark.parametrize("length", [3, 6])
def test_the_larger_of_two_sizes_is_read(length: int) -> None:
    """The first position that a cache of a sliding window still holds."""

    def function(x: Tensor) -> Tensor:
        first = torch.sym_max(x.size(1) - 4, 0)
        return (torch.arange(5) + first)[None, :] <= torch.arange(S)[:, None]

    reading = _read(lambda x: _joined(function(x), x[0, 0]), torch.zeros(B, length), dynamic_sizes=(length,))
    assert reading.equal, reading.text
    assert "max(0, " in reading.text


def test_a_tensor_that_is_written_in_part_is_read_as_it_then_is() -> None:
    def function(x: Tensor) -> Tensor:
        mask = torch.zeros(S, S)
        mask[1:] = x
        now = mask + 0.0
        mask[2:] = x + 1
        return torch.where(mask > now, mask, now - 3.0)

    reading = _read(function, torch.ones(()))
    assert reading.equal, reading.text
    assert reading.loads == {"x"}, reading.text


def test_a_tensor_that_is_written_in_an_unknown_way_is_loaded_as_it_then_is() -> None:
    def function(x: Tensor) -> Tensor:
        mask = torch.zeros(S, S)
        mask[torch.tensor([1, 2])] = x
        now = mask + 0.0
        mask.diagonal().fill_(3.0)
        return torch.where(mask > now, mask, now - 3.0)

    reading = _read(function, torch.ones(()))
    assert reading.equal, reading.text
    assert len(reading.loads) == 2, reading.text


@pytest.mark.parametrize(
    "make",
    [
        lambda: (torch.arange(300)[:S, None] * 100).to(torch.uint8) <= torch.arange(S),
        lambda: torch.full((S, S), LOWEST) * 2 > torch.arange(S),
    ],
    ids=["out of uint8's range", "out of float32's range"],
)
def test_numbers_that_a_dtype_does_not_hold_are_never_misread(make: Callable[[], Tensor]) -> None:
    """Wrapping and overflow: either read right, or not looked into."""
    reading = _read(lambda x: _joined(make(), x), torch.zeros(()))
    assert reading.equal, reading.text


# ---- what it is proved to be --------------------------------------------------------------------------------------


def _proved(make: Callable[..., Tensor], *inputs: Tensor, keys: int = S) -> MaskSpec:
    """The mask of an attention with make(*inputs) for its mask; numbers are compared with eager's."""

    def function(q: Tensor, k: Tensor, *inputs: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, attn_mask=make(*inputs))

    q, k = torch.randn(B, 1, S, D), torch.randn(B, 1, keys, D)
    run = compiled(function)
    torch.testing.assert_close(run(q, k, *inputs), function(q, k, *inputs))
    return run.site.spec.mask


def _square(f: Callable[[Tensor, Tensor], Tensor], n: int = S) -> Callable[..., Tensor]:
    return lambda *_: f(torch.arange(n)[:, None], torch.arange(n)[None, :])


PADDING = torch.tensor([[1] * S, [1] * (S - 2) + [0] * 2])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_square(lambda q, k: k <= q), "causal"),
        (_square(lambda q, k: ~(q < k)), "causal"),
        (_square(lambda q, k: torch.ones(S, S).tril() > 0), "causal"),
        (_square(lambda q, k: torch.ones(S, S).tril() != 0), "causal"),
        (_square(lambda q, k: ~(torch.tril(torch.ones(S, S)) == 0)), "causal"),
        (_square(lambda q, k: torch.ones(S, S).tril() >= 0.5), "causal"),
        (_square(lambda q, k: torch.full((S, S), LOWEST).triu(1)), "causal"),
        (_square(lambda q, k: torch.where(k <= q, 0.0, LOWEST)), "causal"),
        (_square(lambda q, k: (k <= q) & (q - k < 3)), "causal ∧ window (2 back)"),
        (_square(lambda q, k: (q - k).abs() <= 2), "window (2 back, 2 ahead)"),
        (_square(lambda q, k: (k >= q - 1) & (k <= q + 2)), "window (1 back, 2 ahead)"),
        (_square(lambda q, k: q // 2 == k // 2), "chunks of 2"),
        (_square(lambda q, k: (k <= q) & (q // 2 == k // 2)), "causal ∧ chunks of 2"),
    ],
)
def test_kinds_of_positions(make: Callable[..., Tensor], words: str) -> None:
    found = _proved(make)
    assert " ∧ ".join(kind.words for kind in found.proved) == words


def test_key_padding() -> None:
    found = _proved(lambda m: m[:, None, None, :] != 0, PADDING)
    (kind,) = found.proved
    assert kind.words.startswith("key padding ")
    assert found.dense is not None


def test_documents() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
    found = _proved(lambda d: d[:, None, :, None] == d[:, None, None, :], ids)
    (kind,) = found.proved
    assert kind.words.startswith("document ")


def test_keys_up_to_a_cache_position() -> None:
    found = _proved(lambda p: (torch.arange(8) <= p)[None, None, None, :], torch.tensor([3]), keys=8)
    (kind,) = found.proved
    assert kind.words.startswith("keys up to ")


def test_everything_is_no_mask() -> None:
    found = _proved(_square(lambda q, k: (k <= q) | (k > q)))
    assert found.words == "none"


def test_nothing_is_guessed_from_what_a_tensor_happens_to_hold() -> None:
    causal = torch.ones(S, S, dtype=torch.bool).tril()
    found = _proved(lambda m: m & True, causal)
    assert not found.is_causal
    assert found.dense is not None


def test_a_mask_that_is_causal_but_for_one_pair_is_not_causal() -> None:
    found = _proved(_square(lambda q, k: (k <= q) | ((q == 1) & (k == 3))))
    assert not found.is_causal
    assert found.dense is not None


def test_a_bias_is_no_mask() -> None:
    found = _proved(_square(lambda q, k: (k - q) * 0.25))
    assert found.proved == ()
    assert found.reason is None
    assert found.dense is not None
