"""Which part of the package may import which. No import breaks a rule."""

from __future__ import annotations

import ast
import dataclasses
from collections import Counter
from collections.abc import Iterator

import pytest

from attn_compiler.lowerings import LOWERINGS, linear_table
from attn_compiler.passes.graph.site import Match
from attn_compiler.passes.graph.unit import Unit
from tests import imports

PACKAGE = "attn_compiler.lowerings"
FAMILIES = frozenset({"plain", "sdpa", "rows", "triton", "decode", "cudnn", "fa4", "hopper"})
#: the lowerings of linear attention, whose specs are others
LINEAR = frozenset({"linear"})
#: what families stand on, beside `base`
FLOORS = frozenset({"shared", "fp8", "choice", "graph_ops"})

#: the only modules that import PyTorch's private modules, at the top or in a function: a room, and the entry in PyTorch's registry
PRIVATE = ("torch_private.", "compiling.registration")
#: private by their names, but PyTorch has no others for fake tensors, trees of values and modes, and its own documentation uses these
AS_GOOD_AS_PUBLIC = ("torch._subclasses", "torch.utils._pytree", "torch.utils._python_dispatch")


#: Lines of each room. They may only shrink: who needs more takes it from another room in the same commit.
LINES = {
    ".": 383,  # a list of sentences is one input; details of a report, and a program of a site, are printed
    "compiling": 2124,  # sentences for `encode`; small batches run padded; freezing in vain; names of models; late imports
    "context_parallel": 1430,  # with rank_sync, which stood in torch_private/
    "export": 296,
    "index_expr": 2227,  # an equation is solved for an index here, where two rooms did so
    "integrations": 334,
    "lowerings": 474,  # what a kept rewrite asks is data; families are a list; whether one reads a tensor over pairs; what runs anywhere
    "lowerings/choice": 1869,  # rows for AVX-512
    "lowerings/cudnn": 1893,
    "lowerings/decode": 3342,  # schedules of 17 to 64 rows; rows that begin alike; full machines
    "lowerings/fa4": 852,
    "lowerings/fp8": 1756,
    "lowerings/graph_ops": 553,
    "lowerings/hopper": 5438,
    "lowerings/linear": 4312,  # passes and gradients of chunks for Hopper, in Gluon, of the state space, too
    "lowerings/plain": 670,
    "lowerings/rows": 615,  # runs whose ends go on by one key a query, as in rows that share a prompt
    "lowerings/sdpa": 344,
    "lowerings/shared": 10123,  # documents of 64 bits; Hopper needs one class of lengths
    "lowerings/triton": 893,  # kernels of a backward are imported where one runs
    "options": 322,  # precision of linear attention; prompts that rows share; reads sources without pathlib
    "passes": 21,
    "passes/context_parallel": 3361,  # with the record of a shared graph, which stood in graph/
    "passes/graph": 6004,  # copies of caches have a remedy; constants of one number are equal; which nodes are told of; who shares a cache
    # Sinks and logsumexps are read as quotients here, where spelling/ had a table of two forms.
    # Exponentials may be divided by their sum after the product, too; the search of modules is apart from what it finds.
    "passes/matching": 5769,  # a column of sinks; a nearer reason than how a softmax is written; graphs without sites; a quick look
    "passes/pipeline": 675,  # a step says what it needs to have anything to do; workers start where no rewrite was kept
    "passes/recovering": 5978,  # Transformer-XL's shift; squares over borders; computed places, alternatives, learned biases, symbols
    "passes/rewrites": 1221,  # the name of a model; an op is defined when a record names it
    "passes/spelling": 2740,  # spells out quantised weights; checkpoints ask for themselves whether they are inlined
    "passes/unpad": 3286,  # prompts that rows share; int8; the work that packing saves
    "passes/writing": 2126,  # precision of linear attention; remedies of sites; with the state of delayed FP8 scaling
    "reasons": 816,  # names that begin so; a copy has a remedy, an estimate has words; a reason without a remedy has that of its page
    "reporting": 2945,  # prompts that rows share; checks, sites and misses print; names of models; a short report
    "spec": 2108,  # precision of linear attention; whether kernels use AVX-512
    # Says what is compiled for another process; the kernels folder is set for graphs with CUDA; a switch of Dynamo is set for each call.
    "torch_private": 3415,  # a module called as compiled; other names of ops; opens tensors that wrap others; ranges in profiles
    "verifying": 2672,
}


#: Lines of tests by folder, and of benchmarks. They may only shrink, too: a new test takes its lines from others of its folder.
TEST_LINES = {
    ".": 7207,  # a notebook, an image, a release; a program of a site is printed; costs are counted; a list of families is imported
    "/benchmarks": 12317,  # a CPU by lengths and instructions; embedding beside peers; shared prompts; two precisions on a GPU
    "benchmarks": 2804,  # prompts that rows share
    # Modules that graphs without attention leave out; files of another process; modules that graphs without attention leave out.
    "compiling": 2223,  # small batches; freezing in vain; files of another process, training too
    "context_parallel": 4311,  # with tests that stood in torch_private/
    "distributed": 940,
    "export": 886,
    "fuzz": 9140,  # masks as algebra, computed sizes, faults in them; linear attention's resets and NaN; functions that change
    "gate": 697,
    "graphs": 144,
    "hf": 8938,  # shared prompts, and experts; a limit that is told again; a hundred sizes and borders of each family; a survey of packages
    "index_expr": 1729,
    "integrations": 1287,  # small models are packed in tests; a SentenceTransformer is compared, and begins with one sentence
    "lowerings": 35408,  # tables of schedules and of intervals that begin alike, also as decisions
    "near_miss": 6714,
    "options": 324,  # prompts that rows share; names that begin so
    # The spellings of sinks are a table of their own.
    "passes": 34526,  # prompts that rows share, on ranks too; int8 without padding; symbolic head dims; masks read in full
    "reasons": 431,  # each remedy is held to one short sentence
    "reporting": 2671,  # prompts that rows share; records print; names of models; the short report; each reason has a remedy
    "spec": 1467,
    "torch_private": 2393,  # ranges in profiles; a CUDA in use is planted; the folder of kernels is asked for here, no longer in lowerings
    "verifying": 3121,
    "website": 712,  # README on embedding; pages leave Inductor as it was; sharing; ratios; variables; made tables are held row by row
}


@pytest.fixture(scope="module")
def graph() -> imports.Graph:
    return imports.graph()


def _part(module: str) -> str | None:
    """The family, floor or file of lowerings that a module belongs to; None outside of them and for the package itself."""
    inside = module.removeprefix(f"{PACKAGE}.")
    return None if inside in (module, "families", "homes") else inside.split(".")[0]


def _allowed(module: str) -> frozenset[str]:
    """What parts of lowerings a module may import, besides the package itself."""
    part = _part(module)
    if module in (f"{PACKAGE}.families", f"{PACKAGE}.homes"):
        return FAMILIES | LINEAR | FLOORS | {"base"}
    if part in FAMILIES | LINEAR:
        # A family may ask for what is measured, never the other way round.
        return FLOORS | {part, "base"}
    if part in ("choice", "fp8"):
        return frozenset({part, "base", "shared"})
    if part in ("shared", "graph_ops"):
        return frozenset({part, "base", "shared"})
    return frozenset({"base", "graph_ops"})


def _breaking(graph: imports.Graph) -> Iterator[tuple[str, str]]:
    for module, imported in graph.items():
        parts = {part for name in imported if (part := _part(name)) is not None}
        yield from ((module, part) for part in parts - _allowed(module))


def test_every_room_imports_only_what_it_may(graph: imports.Graph) -> None:
    assert sorted(_breaking(graph)) == []


def test_no_modules_import_each_other(graph: imports.Graph) -> None:
    assert imports.circles(graph) == []


def test_no_rooms_of_lowerings_import_each_other(graph: imports.Graph) -> None:
    lists = ("__init__", "families", "homes")
    rooms = {room: others for room, others in imports.rooms(graph, PACKAGE).items() if room not in lists}
    assert imports.circles(rooms) == []
    assert len(rooms) <= 14
    assert sum(map(len, rooms.values())) <= 45


@pytest.mark.parametrize(
    ("folder", "most_rooms", "most_arrows"),
    [("attn_compiler", 16, 70), ("attn_compiler.passes", 10, 45), ("attn_compiler.lowerings.shared", 7, 15)],
)
def test_folders_have_few_rooms_and_arrows(folder: str, most_rooms: int, most_arrows: int) -> None:
    """Late and type-only imports count."""
    rooms = imports.rooms(imports.reading_graph(), folder)
    assert len(rooms) <= most_rooms
    assert sum(map(len, rooms.values())) <= most_arrows


_FOLDERS = sorted({name.rpartition(".")[0] for name in imports.reading_graph() if "." in name})


@pytest.mark.parametrize("folder", _FOLDERS)
def test_no_rooms_import_each_other(folder: str) -> None:
    """Late and type-only imports count."""
    assert imports.circles(imports.rooms(imports.reading_graph(), folder)) == []


@pytest.mark.parametrize(("kind", "most"), [(Unit, 10), (Match, 20)])
def test_what_steps_work_on_has_few_fields(kind: type, most: int) -> None:
    """Fields are grouped by the step that makes them."""
    assert len(dataclasses.fields(kind)) <= most


def test_the_door_of_the_passes_does_no_work() -> None:
    body = ast.parse((imports.ROOT / "attn_compiler/passes/__init__.py").read_text()).body
    assert {type(statement) for statement in body} == {ast.Expr, ast.ImportFrom, ast.Assign}


def test_every_family_has_a_lowering_and_tests(graph: imports.Graph) -> None:
    folders = {path.name for path in (imports.ROOT / "attn_compiler/lowerings").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == FAMILIES | LINEAR | FLOORS
    assert {_part(type(lowering).__module__) for lowering in linear_table.LINEAR_LOWERINGS} == LINEAR
    assert {_part(type(lowering).__module__) for lowering in LOWERINGS} == FAMILIES
    for family in FAMILIES | LINEAR:
        assert any((imports.ROOT / "tests/lowerings" / family).glob("test_*.py")), family


def _lines() -> Counter[str]:
    """Of each room: a folder, and in passes/ and lowerings/ a folder of those."""
    package, found = imports.ROOT / "attn_compiler", Counter[str]()
    for path in package.rglob("*.py"):
        folder, *others = path.relative_to(package).parts
        room = f"{folder}/{others[0]}" if folder in ("passes", "lowerings") and len(others) > 1 else folder
        found[room if others else "."] += len(path.read_text().splitlines())
    return found


def _test_lines() -> Counter[str]:
    """Count by folder of tests/; its own files are ".", and all benchmarks are one folder."""
    tests = imports.ROOT / "tests"
    paths = [(path.relative_to(tests).parts, path) for path in tests.rglob("*.py")]
    paths += [(("/benchmarks", ""), path) for path in (imports.ROOT / "benchmarks").rglob("*.py")]
    found = Counter[str]()
    for (folder, *inside), path in paths:
        found[folder if inside else "."] += len(path.read_text().splitlines())
    return found


def test_rooms_keep_to_their_lines() -> None:
    found = _lines()
    assert found.keys() == LINES.keys()
    assert sum(found.values()) <= sum(LINES.values())
    assert {room: lines for room, lines in found.items() if lines > LINES[room]} == {}


def test_tests_and_benchmarks_keep_to_their_lines() -> None:
    found = _test_lines()
    assert found.keys() == TEST_LINES.keys()
    assert {folder: lines for folder, lines in found.items() if lines > TEST_LINES[folder]} == {}


def test_an_import_that_breaks_a_rule_is_seen() -> None:
    graph = {
        f"{PACKAGE}.hopper.launch": frozenset({f"{PACKAGE}.triton.launch", f"{PACKAGE}.shared.ops"}),
        f"{PACKAGE}.fp8.rounding": frozenset({f"{PACKAGE}.choice.rows"}),
        "attn_compiler.passes.writing.lower": frozenset({PACKAGE, f"{PACKAGE}.base", f"{PACKAGE}.shared.ops"}),
    }
    found = {(f"{PACKAGE}.hopper.launch", "triton"), (f"{PACKAGE}.fp8.rounding", "choice")}
    assert set(_breaking(graph)) == found | {("attn_compiler.passes.writing.lower", "shared")}


def _private_modules(module: str, source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            hidden = "._" in name or name.startswith("torch.fx.experimental")
            if name.startswith("torch.") and hidden and not name.startswith(AS_GOOD_AS_PUBLIC):
                yield module, name


def test_pytorchs_private_modules_are_used_in_few_rooms() -> None:
    package = imports.ROOT / "attn_compiler"
    sources = {
        ".".join(path.relative_to(package).with_suffix("").parts): path.read_text() for path in package.rglob("*.py")
    }
    found = [use for module, source in sources.items() for use in _private_modules(module, source)]
    assert sorted((module, name) for module, name in found if not module.startswith(PRIVATE)) == []


def test_private_modules_are_seen() -> None:
    source = "def f():\n    from torch import _dynamo\n    import torch.fx.experimental.symbolic_shapes\nimport torch\n"
    assert [name for _, name in _private_modules("m", source)] == [
        "torch._dynamo",
        "torch.fx.experimental.symbolic_shapes",
    ]


def test_a_room_is_tested_with_those_that_import_it() -> None:
    found = imports.affected("passes/recovering")
    assert found[0] == "tests/passes/recovering"
    assert {"tests/passes/pipeline", "tests/verifying"} <= set(found)
    assert not {"tests/spec", "tests/lowerings/fa4", "tests/passes"} & set(found)
    of_a_family = imports.affected("lowerings/fa4")
    assert "tests/lowerings/test_init.py" in of_a_family, "its list imports the family"
    assert "tests/lowerings" not in of_a_family
    with pytest.raises(SystemExit, match="no folder"):
        imports.affected("passes/nothing")


def test_circles_are_seen() -> None:
    one, two, three = frozenset({"b"}), frozenset({"c"}), frozenset({"b"})
    assert imports.circles({"a": one, "b": two, "c": three}) == [["b", "c"]]
