"""Decoding with a cache that ranks share: the tokens and logits of one process, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from attn_compiler import ContextParallel
from attn_compiler.reasons.errors import AttnCompilerError
from tests.context_parallel import decoding
from tests.context_parallel.decoding import NEW, RUNS, Found, Run
from tests.distributed import processes
from tests.thinned import asked_for, further

#: one of each with three ranks
_THREE = [run for run in RUNS if not run.compiled or run.verify or run.given]


@pytest.fixture(scope="module")
def by_two(request: pytest.FixtureRequest) -> dict[str, list[Found]]:
    return _by_name(asked_for(request, "run"), 2)


@pytest.fixture(scope="module")
def by_three(request: pytest.FixtureRequest) -> dict[str, list[Found]]:
    return _by_name(asked_for(request, "run", _THREE), 3)


def _by_name(runs: list[Run], size: int) -> dict[str, list[Found]]:
    return dict(zip((run.name for run in runs), processes.run_each(decoding.measured, runs, size=size), strict=True))


@pytest.mark.parametrize("run", further(RUNS, daily=[RUNS[0], RUNS[5]]), ids=lambda run: run.name)
def test_two_ranks_generate_what_one_process_generates(by_two: dict[str, list[Found]], run: Run) -> None:
    _check(by_two[run.name], run, 2)


@pytest.mark.parametrize("run", further(_THREE, daily=[RUNS[5]]), ids=lambda run: run.name)
def test_so_do_three_of_which_some_keep_a_position_less(by_three: dict[str, list[Found]], run: Run) -> None:
    _check(by_three[run.name], run, 3)


def _check(found: list[Found], run: Run, size: int) -> None:
    for one in found:
        assert one.error < 1e-12
        assert one.tokens == one.expected
        assert one.slots == -(-(run.prompt + NEW) // size)
        assert "keys_of_slots" not in one.calls
        # It is asked once for the positions of slots, and not by each layer.
        assert one.calls.get("sequence_rank", 0) == run.compiled
        # One collective a layer.
        assert one.calls.get("merged_over_ranks", 0) == (2 if run.compiled else 0)
        said = [note for note in one.notes if "attends to the keys that it keeps, and sends" in note]
        assert bool(said) == run.compiled, one.notes


@pytest.mark.further
@pytest.mark.parametrize("is_early", [False, True])
def test_a_compiled_prompt_is_attended_to_by_slots(is_early: bool) -> None:
    for one in processes.run(decoding.prompted, is_early, size=2):
        assert one.error < 1e-12
        assert one.tokens == one.expected
        assert "keys_of_slots" not in one.calls
        # Two layers, of the prompt and of a step.
        assert one.calls["merged_over_ranks"] == 4
        assert all("attends to the keys that it keeps" in note for note in one.notes)


def _refusals(size: int) -> dict[str, str]:
    """To be called on every rank: what each call that is not supported raises."""
    from transformers import MistralConfig, T5Config

    from attn_compiler.integrations.transformers_cache import ShardedCache

    cp = ContextParallel(init_device_mesh("cpu", (size,)))
    run = Run()
    model, given = decoding.build(run), decoding.inputs(run)

    def cache() -> Any:
        return ShardedCache(model.config, cp, max_cache_len=16)

    def other_tokens() -> None:
        ids = given["input_ids"] if dist.get_rank() == 0 else given["input_ids"].flip(1)
        model.generate(ids, past_key_values=cache(), max_new_tokens=1, do_sample=False)

    def gradients() -> None:
        model(**given, past_key_values=cache())

    def beams() -> None:
        model.generate(**given, past_key_values=cache(), max_new_tokens=3, do_sample=False, num_beams=2)

    calls = {
        "other tokens": other_tokens,
        "gradients": gradients,
        "beams": beams,
        "window": lambda: ShardedCache(MistralConfig(sliding_window=8), cp, max_cache_len=16),
        "encoder": lambda: ShardedCache(T5Config(), cp, max_cache_len=16),
        "crop": lambda: cache().crop(1),
        "repeat": lambda: cache().batch_repeat_interleave(2),
        "select": lambda: cache().batch_select_indices(torch.tensor([0])),
    }
    return {name: _raised(call) for name, call in calls.items()}


def _raised(call: Any) -> str:
    try:
        call()
    except AttnCompilerError as error:
        return str(error)
    return "nothing"


def test_what_a_shared_cache_can_not_do_is_refused_on_every_rank() -> None:
    words = {
        "other tokens": "differ between ranks",
        "gradients": "no gradients",
        "beams": "beam search",
        "window": "sliding_attention",
        "encoder": "encoder",
        "crop": "crop",
        "repeat": "batch_repeat_interleave",
        "select": "batch_select_indices",
    }
    for found in processes.run(_refusals, 2):
        assert {name: words[name] in text for name, text in found.items()} == dict.fromkeys(words, True), found
