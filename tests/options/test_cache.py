from __future__ import annotations

from pathlib import Path

import pytest

from attn_compiler.context_parallel import ContextParallel
from attn_compiler.options import cache
from attn_compiler.options.options import Options
from attn_compiler.spec.target import Target
from tests.meshes import fake_mesh

CPU = Target.fake(device="cpu")
GPU = Target.fake()


def test_key_differs_with_everything_that_decides_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        cache.cache_key(Options(), [CPU]),
        cache.cache_key(Options(lowering="sdpa"), [CPU]),
        cache.cache_key(Options(), [GPU]),
        cache.cache_key(Options(), [CPU, GPU]),
        cache.cache_key(Options(), [Target.fake(device="cpu", disabled=frozenset({"flash"}))]),
    ]
    monkeypatch.setattr(cache, "package_version", lambda: "999.0")
    keys.append(cache.cache_key(Options(), [CPU]))
    monkeypatch.setattr(cache, "sources_digest", lambda: "edited")
    keys.append(cache.cache_key(Options(), [CPU]))
    assert len(set(keys)) == len(keys)


def test_key_has_how_a_sequence_is_spread_but_not_the_rank() -> None:
    keys = []
    for rank, replicated in ((0, ()), (1, ()), (0, ("image",))):
        with fake_mesh(2, rank=rank) as mesh:
            options = Options(context_parallel=ContextParallel(mesh, replicated=replicated))
            keys.append(cache.cache_key(options, [CPU]))
    assert keys[0] == keys[1] != keys[2]
    assert cache.cache_key(Options(), [CPU]) not in keys


def test_key_is_the_same_for_the_same_compilation() -> None:
    assert cache.cache_key(Options(), [CPU, GPU]) == cache.cache_key(Options(dump_dir="elsewhere"), [GPU, CPU])


def test_digest_of_sources_sees_edits_new_files_and_renames_but_no_bytecode(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.py").write_text("x = 1")
    first = cache.digest_of_tree(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(b"any")
    assert cache.digest_of_tree(tmp_path) == first
    (tmp_path / "priorities.toml").write_text("")
    second = cache.digest_of_tree(tmp_path)
    (tmp_path / "kernels" / "a.py").write_text("x = 2")
    third = cache.digest_of_tree(tmp_path)
    (tmp_path / "kernels" / "a.py").rename(tmp_path / "kernels" / "b.py")
    assert len({first, second, third, cache.digest_of_tree(tmp_path)}) == 4


def test_sources_digest_covers_this_package() -> None:
    package = Path(cache.__file__).parents[1]
    assert cache.sources_digest() == cache.digest_of_tree(package)
    assert (package / "lowerings").is_dir()
