"""Hugging Face's launchers compile with this backend: Trainer and accelerate, whole models and layers one by one."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

import attn_compiler
from attn_compiler.integrations.transformers import KNOWN_BLOCKS, CompileCallback, compile_model
from tests.integrations import launching

SEQLEN, LAYERS = 32, 3
OPTIONS = {"inner": "eager", "strict": True}
#: what AOTAutograd makes of a whole model, and of layers that share their code
TRACED = {"inner": "aot_eager", "strict": True}


def _model(**config: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    llama = transformers.LlamaConfig(**sizes, intermediate_size=128, vocab_size=128, **{"use_cache": False, **config})
    return transformers.LlamaForCausalLM(llama)


def _batch(padding: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(0, 128, (2, SEQLEN), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    if padding:
        batch["attention_mask"][0, SEQLEN - 9 :] = 0
    return batch


def _words() -> list[str]:
    return [site.spec.mask.words for report in attn_compiler.reports() for site in report.sites for _ in site.modules]


def _same(model: nn.Module, plain: nn.Module, batch: dict[str, Tensor]) -> None:
    got, wanted = model(**batch).loss, plain(**batch).loss
    torch.testing.assert_close(got, wanted)
    got.backward()
    wanted.backward()
    for (name, mine), right in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_a_whole_model_is_compiled_in_place() -> None:
    model = _model()
    plain = copy.deepcopy(model)
    assert compile_model(model, options=TRACED) is model
    _same(model, plain, _batch())
    assert len(_words()) == LAYERS
    assert list(model.state_dict()) == list(plain.state_dict())


def test_layers_that_are_compiled_one_by_one_know_their_mask() -> None:
    model = _model()
    plain = copy.deepcopy(model)
    compile_model(model, per_layer=True, options=TRACED)
    _same(model, plain, _batch())
    assert _words() == ["causal ∧ key padding attention_mask[b, 0, 31, k] (proved)"]


def test_without_padding_layers_get_no_mask() -> None:
    model = _model()
    plain = copy.deepcopy(model)
    compile_model(model, per_layer=True, options=OPTIONS)
    _same(model, plain, _batch(padding=False))
    assert _words() == ["causal"]


def test_batches_with_and_without_padding_take_turns() -> None:
    model = _model()
    plain = copy.deepcopy(model)
    compile_model(model, per_layer=True, options=OPTIONS)
    for padding in (True, False, True, False):
        model.zero_grad()
        plain.zero_grad()
        _same(model, plain, _batch(padding=padding))
    assert len(_words()) == 2


def test_layers_of_a_model_with_eager_attention_are_compiled_as_they_are() -> None:
    model = _model(attn_implementation="eager")
    plain = copy.deepcopy(model)
    compile_model(model, per_layer=True, options=OPTIONS)
    _same(model, plain, _batch())
    assert model.config._attn_implementation == "eager"


def test_layers_share_their_code_though_the_config_asks_for_a_cache() -> None:
    model = _model(use_cache=True)
    plain = copy.deepcopy(model)
    compile_model(model, per_layer=True, options=OPTIONS)
    _same(model, plain, _batch())
    assert len(_words()) == 1
    assert model(**_batch()).past_key_values is None


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("padding", [False, True])
def test_a_model_with_flex_attention_makes_its_block_masks_in_its_own_graph(
    padding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU has no backward of Flex's kernel.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    model, plain, batch = _model(attn_implementation="flex_attention"), _model(), _batch()
    if not padding:
        del batch["attention_mask"]
    compile_model(model, options={**OPTIONS, "lowerings": ["sdpa_cpu_flash", "reference"]})
    _same(model, plain, batch)
    assert len(attn_compiler.reports()) == 1
    words = _words()
    assert len(words) == LAYERS
    assert words[0].startswith("causal ∧ key padding attention_mask[b, k] (proved)" if padding else "causal (proved)")


def _gpt_oss(**config: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "batched_mm"}
    settings = {"num_hidden_layers": 2, "sliding_window": 8, "vocab_size": 128, "use_cache": False}
    # The range of the weights: at the usual 0.02 sinks are all that matters, or nothing.
    gpt_oss = transformers.GptOssConfig(**sizes, **experts, **settings, initializer_range=0.3, **config)
    return transformers.GptOssForCausalLM(gpt_oss)


def _with_sinks_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers refuses sinks on a CPU, for a fault of PyTorch's compiler there that eager code does not have."""
    module = importlib.import_module("transformers.integrations.flex_attention")
    lines, condition = inspect.getsource(module.flex_attention_forward), 'query.device.type != "cpu"'
    assert condition in lines
    made: dict[str, Any] = {}
    exec(compile(lines.replace(condition, "True"), module.__file__, "exec"), vars(module), made)
    monkeypatch.setattr(
        attn_compiler.integrations.transformers, "flex_attention_forward", made["flex_attention_forward"]
    )
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


@pytest.mark.further
def test_gpt_oss_with_flex_attention_has_sites_with_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_sinks_on_a_cpu(monkeypatch)
    model, plain = (_gpt_oss(attn_implementation=name) for name in ("flex_attention", "eager"))
    compile_model(model, options={**OPTIONS, "lowerings": ["reference"]})
    _same(model, plain, _batch())
    (report,) = attn_compiler.reports()
    assert not report.misses
    sinks = [site.spec.score.sinks for site in report.sites for _ in site.modules]
    assert len(sinks) == 2
    assert all(found is not None and found.requires_grad for found in sinks)
    assert sum("window" in words for words in _words()) == 1
    assert all("key padding attention_mask[b, k] (proved)" in words for words in _words())


@pytest.mark.usefixtures("quick")
def test_the_recipe_of_flex_attention() -> None:
    model, plain, batch = _model(attn_implementation="flex_attention").eval(), _model().eval(), _batch()
    with torch.no_grad():
        found = launching.run("FlexAttention in transformers", model=model, batch=batch)
        torch.testing.assert_close(found["loss"], plain(**batch).loss)
    assert launching.found(sites=LAYERS) == [f"{SEQLEN}: causal ∧ key padding attention_mask[b, k] (proved)"]


def test_a_model_with_flex_attention_runs_as_ever_where_it_is_not_compiled() -> None:
    model, plain = _model(attn_implementation="flex_attention").eval(), _model().eval()
    compile_model(model)
    assert model.config._attn_implementation == KNOWN_BLOCKS
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(model(**_batch()).logits, plain(**_batch()).logits)


def test_a_model_without_layers_that_repeat_is_told_so() -> None:
    with pytest.raises(ValueError, match="Linear has no list of layers of one class"):
        compile_model(nn.Linear(2, 2), per_layer=True)


def _trained(model: nn.Module, path: Path, launch: Callable[..., Any]) -> list[float]:
    """The losses. launch: as Trainer is called, gives a trainer that has trained."""
    arguments = transformers.TrainingArguments(
        output_dir=str(path), max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True
    )
    rows = [{name: x[i] for name, x in _batch().items()} for i in range(2)]
    trainer = launch(model=model, args=arguments, train_dataset=rows)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _plain_training(callbacks: Sequence[Any] = (), **settings: Any) -> Any:
    trainer = transformers.Trainer(**settings, callbacks=list(callbacks))
    trainer.train()
    return trainer


def _trainers_recipe(model: nn.Module, args: Any, train_dataset: Any) -> Any:
    return launching.run("Trainer", model=model, arguments=args, dataset=train_dataset)["trainer"]


def _layer_by_layer(**settings: Any) -> Any:
    return _plain_training([CompileCallback(per_layer=True, options=OPTIONS)], **settings)


@pytest.mark.in_turns(2)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("launch", [_trainers_recipe, _layer_by_layer])
def test_trainer(launch: Callable[..., Any], tmp_path: Path) -> None:
    model = _model()
    plain = copy.deepcopy(model)
    wanted = _trained(plain, tmp_path, _plain_training)
    assert _trained(model, tmp_path, launch) == pytest.approx(wanted, rel=1e-5)
    # Layers that are compiled one by one share their code.
    assert len(_words()) == (1 if launch is _layer_by_layer else LAYERS)
    assert all(words.startswith("causal ∧ key padding") for words in _words())


@pytest.mark.usefixtures("quick")
def test_accelerate() -> None:
    model = _model()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    launching.run("accelerate", model=model, optimizer=optimizer, batch=_batch())
    _stepped_as(plain, model)
    assert len(_words()) == LAYERS
    assert all(words.startswith("causal ∧ key padding") for words in _words())


def _stepped_as(plain: nn.Module, model: nn.Module) -> None:
    """The plain model's step, and the same parameters after it."""
    plain(**_batch()).loss.backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    for mine, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.usefixtures("quick")
def test_peft() -> None:
    peft = pytest.importorskip("peft")
    model = _model()
    torch.manual_seed(1)
    plain = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    given = launching.run("PEFT", model=model, batch=_batch())
    wanted = plain(**_batch()).loss
    wanted.backward()
    torch.testing.assert_close(given["loss"], wanted)
    for mine, right in zip(given["model"].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad)
    assert len(_words()) == LAYERS
    assert all(words.startswith("causal ∧ key padding") for words in _words())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("checkpoint", [False, True])
def test_sharded_layers_know_a_padded_batchs_mask(checkpoint: bool) -> None:
    """FSDP2 hands on the very tensor that it is given."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = _model()
        if checkpoint:
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
        plain = copy.deepcopy(model)
        given = launching.run("FSDP2", model=model, mesh=mesh, batch=_batch())
        wanted = plain(**_batch()).loss
        torch.testing.assert_close(given["loss"], wanted)
        wanted.backward()
        for mine, right in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), right.grad)
    finally:
        torch.distributed.destroy_process_group()
    assert _words() == ["causal ∧ key padding attention_mask[b, 0, 31, k] (proved)"]


def _sharing() -> Any:
    """A Gemma 4 whose last two layers read keys and values of the two before, under gradient checkpointing."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    inputs = {"vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "pad_token_id": 0}
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}
    config = transformers.AutoConfig.for_model("gemma4_text", **sizes, **inputs, **layers, num_kv_shared_layers=2)
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="this transformers has no Gemma 4")
def test_checkpointed_layers_that_share_keys_and_values_are_found() -> None:
    model = _sharing()
    plain = copy.deepcopy(model)
    compile_model(model, options=TRACED)
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    _same(model, plain, {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)})
    (report,) = attn_compiler.reports()
    assert (report.num_sites, report.num_misses) == (4, 0)
