from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_compiler.context_parallel import ContextParallel
from attn_compiler.options.options import (
    CACHE_VARIABLE,
    DUMP_DIR_VARIABLE,
    GONE,
    OPTION_NAMES,
    Options,
    check_lowering_names,
    split_options,
)
from attn_compiler.reasons.errors import InvalidOption, UnknownOption
from attn_compiler.spec.fp8_recipe import Fp8Recipe
from attn_compiler.torch_private import inductor as torch_inductor
from tests.meshes import fake_mesh

NO_ENVIRONMENT: dict[str, str] = {}


@pytest.fixture
def cp() -> Iterator[ContextParallel]:
    with fake_mesh(4, rank=1) as mesh:
        yield ContextParallel(mesh)


def test_ours_and_inductors_are_told_apart() -> None:
    given = {"strict": True, "max_autotune": True, "triton.cudagraphs": False, "attn.lowerings": ["sdpa", "flex"]}
    ours, patches = split_options(None, given, NO_ENVIRONMENT)
    assert ours == Options(strict=True, lowerings=("sdpa", "flex"))
    assert patches == {"max_autotune": True, "triton.cudagraphs": False}
    assert given["attn.lowerings"] == ["sdpa", "flex"]  # torch.compile compares the dict later: it is only read


def test_dashes_in_inductors_names_are_accepted_as_inductor_does() -> None:
    assert split_options(None, {"max-autotune": True}, NO_ENVIRONMENT)[1] == {"max_autotune": True}


def test_nothing_given() -> None:
    assert split_options(None, None, NO_ENVIRONMENT) == (Options(), {})
    assert split_options("default", {}, NO_ENVIRONMENT) == (Options(), {})


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_mode_becomes_inductors_patches(mode: str) -> None:
    from torch._inductor import list_mode_options

    assert split_options(mode, None, NO_ENVIRONMENT)[1] == list_mode_options(mode) != {}


def test_options_themselves_mean_what_a_dict_means() -> None:
    given = Options(inner="eager", strict=True)
    assert split_options(None, given, {}) == split_options(None, {"inner": "eager", "strict": True}, {})
    assert split_options(None, Options(), {CACHE_VARIABLE: "0"})[0].cache_rewrites is False
    double = torch.compile(lambda x: x * 2, backend="attn_compiler", options=given)
    assert double(torch.ones(2)).tolist() == [2.0, 2.0]


def test_our_names_are_not_inductors() -> None:
    assert not set(OPTION_NAMES) & torch_inductor.inductor_option_names()


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("stric", "strict"),
        ("fp8", "fp8_recipe"),
        ("attn.cache", "cache_rewrites"),
        ("attn.dumpdir", "dump_dir"),
        ("max_autotun", "max_autotune"),
        ("cudagraphs", "triton.cudagraphs"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(UnknownOption) as caught:
        split_options(None, {key: True}, NO_ENVIRONMENT)
    assert nearest in caught.value.nearest


@pytest.mark.parametrize("key", ["autotune", "attn.autotune"])
def test_an_option_that_is_gone_says_what_to_do(key: str) -> None:
    with pytest.raises(UnknownOption, match=rf"no option '{key}'\. It is gone since 0\.3\.0: leave it out\."):
        split_options(None, {key: True}, NO_ENVIRONMENT)


def test_no_option_is_gone_and_there() -> None:
    assert not GONE.keys() & {*OPTION_NAMES, *torch_inductor.inductor_option_names()}


def test_inductors_option_with_our_prefix_is_unknown() -> None:
    with pytest.raises(UnknownOption):
        split_options(None, {"attn.max_autotune": True}, NO_ENVIRONMENT)


def test_key_that_is_no_string_is_unknown() -> None:
    with pytest.raises(UnknownOption, match="3"):
        split_options(None, {3: True}, NO_ENVIRONMENT)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lowering", 3),
        ("lowerings", "sdpa"),
        ("lowerings", ()),
        ("lowerings", ("sdpa", 1)),
        ("strict", "yes"),
        ("strict", 1),
        ("dump_dir", 7),
        ("check_invariants", None),
        ("verify", 1),
        ("inner", "inductr"),
        ("fp8_recipe", "current"),
        ("fp8_recipe", {"smooth_k": True}),
        ("fp8_recipe", Fp8Recipe),
        ("context_parallel", "cp"),
        ("context_parallel", ContextParallel),
        ("checkpoint", "keep"),
        ("checkpoint", True),
        ("linear_precision", "float32"),
        ("max_autotune", "yes"),
        ("mode", "max-autotune"),
    ],
)
def test_wrong_value_is_refused_and_named(key: str, value: Any) -> None:
    expected = UnknownOption if key == "mode" else InvalidOption
    with pytest.raises(expected) as caught:
        split_options(None, {key: value}, NO_ENVIRONMENT)
    assert caught.value.option == key


def test_wrong_mode_lists_the_modes() -> None:
    with pytest.raises(InvalidOption, match=r"'reduce-overhead'.*got 'fast'"):
        split_options("fast", None, NO_ENVIRONMENT)


def test_options_that_are_no_dict() -> None:
    with pytest.raises(InvalidOption, match="a dict of options"):
        split_options(None, ["strict"], NO_ENVIRONMENT)  # type: ignore[arg-type]


def test_the_same_option_twice() -> None:
    with pytest.raises(InvalidOption, match="given twice"):
        split_options(None, {"strict": True, "attn.strict": False}, NO_ENVIRONMENT)


def test_one_lowering_and_several_contradict() -> None:
    with pytest.raises(InvalidOption, match="'lowering'"):
        Options(lowering="sdpa", lowerings=("sdpa",))


class _BytesPath:
    def __fspath__(self) -> bytes:
        return b"by\xfftes"


@pytest.mark.parametrize(
    ("given", "meant"), [("", None), (None, None), (".", "."), (Path(""), "."), (_BytesPath(), "by\udcfftes")]
)
def test_an_empty_dump_dir_means_nowhere(given: Any, meant: str | None) -> None:
    """As the empty environment variable does, and not the current directory."""
    assert split_options(None, {"dump_dir": given}, {DUMP_DIR_VARIABLE: ""})[0].dump_dir == meant
    if given == "":
        assert split_options(None, {"dump_dir": given}, {DUMP_DIR_VARIABLE: "elsewhere"})[0].dump_dir is None


def test_dump_dir_comes_from_the_environment_unless_given() -> None:
    environment = {DUMP_DIR_VARIABLE: "from_environment"}
    assert split_options(None, None, environment)[0].dump_dir == "from_environment"
    assert split_options(None, {"dump_dir": Path("given")}, environment)[0].dump_dir == "given"
    assert split_options(None, None, {DUMP_DIR_VARIABLE: ""})[0].dump_dir is None


def test_unknown_lowering_names_the_nearest() -> None:
    check_lowering_names(Options(lowering="sdpa"), lambda: ("sdpa", "flex"))
    check_lowering_names(Options(), lambda: ())
    with pytest.raises(InvalidOption, match=r"'lowering' takes .*nearest: 'sdpa'.*got 'spda'"):
        check_lowering_names(Options(lowering="spda"), lambda: ("sdpa", "flex"))
    with pytest.raises(InvalidOption, match=r"'lowerings' takes names among sdpa, got 'zzz'"):
        check_lowering_names(Options(lowerings=("sdpa", "zzz")), lambda: ("sdpa",))


def test_digest_differs_with_every_option_that_changes_code(cp: ContextParallel) -> None:
    changed: list[dict[str, Any]] = [
        {},
        {"lowering": "sdpa"},
        {"lowerings": ("sdpa", "flex")},
        {"lowerings": ("flex", "sdpa")},
        {"inner": "eager"},
        {"fp8_recipe": Fp8Recipe()},
        {"unpad": True},
        {"share_prefix": True},
        {"time_kernels": True},
        {"linear_precision": "fla"},
        {"checkpoint": "keep_attention"},
        {"context_parallel": cp},
        {"context_parallel": dataclasses.replace(cp, method="all_gather")},
        {"context_parallel": dataclasses.replace(cp, load_balance=None)},
    ]
    others: dict[str, Any] = {
        "strict": True,
        "dump_dir": "anywhere",
        "check_invariants": False,
        "verify": True,
        "cache_rewrites": False,
    }
    assert {name for one in changed for name in one} == set(OPTION_NAMES) - others.keys()
    assert len({Options(**one).digest() for one in changed}) == len(changed)
    assert {Options(**{name: value}).digest() for name, value in others.items()} == {Options().digest()}


def test_digest_is_the_same_in_another_process() -> None:
    code = "from attn_compiler.options.options import Options; print(Options(lowerings=('a', 'b')).digest())"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == Options(lowerings=("a", "b")).digest()


def test_options_as_data_are_json(cp: ContextParallel) -> None:
    given = Options(fp8_recipe=Fp8Recipe(), context_parallel=cp)
    data = json.loads(json.dumps(given.to_dict()))
    assert data.keys() == set(OPTION_NAMES)
    assert data["context_parallel"]["method"] == "auto"
    assert data["fp8_recipe"]["scaling"]["granularity"] == "block"


def test_attention_is_not_kept_where_ranks_share_a_sequence(cp: ContextParallel) -> None:
    with pytest.raises(InvalidOption, match="'recompute' beside context_parallel"):
        Options(context_parallel=cp, checkpoint="keep_attention")


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().strict = True  # type: ignore[misc]


def test_environment_switches_the_cache_of_rewrites_off_unless_options_say_otherwise() -> None:
    off = {"ATTN_COMPILER_CACHE_REWRITES": "0"}
    assert split_options(None, None, {})[0].cache_rewrites is True
    assert split_options(None, None, off)[0].cache_rewrites is False
    assert split_options(None, {"cache_rewrites": True}, off)[0].cache_rewrites is True


def test_environment_switches_timing_on() -> None:
    on = {"ATTN_COMPILER_TIME_KERNELS": "1"}
    assert split_options(None, None, {})[0].time_kernels is False
    assert split_options(None, None, on)[0].time_kernels is True
    assert split_options(None, {"time_kernels": False}, on)[0].time_kernels is False
