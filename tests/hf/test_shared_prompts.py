"""Models of Hugging Face compute a prompt that rows share once, as trainers call them: outputs, losses and gradients are eager's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import attn_compiler
from attn_compiler.reporting.facts import UnpadReport

WORDS, PROMPT, ANSWER = 120, 20, 6
TOKENS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 2}
LLAMA = {
    **TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
GPT = {**TOKENS, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", LLAMA),
    "Qwen3": ("ForCausalLM", LLAMA),
    "Gemma3": ("ForCausalLM", {**LLAMA, **WINDOWS}),
    "Cohere": ("ForCausalLM", LLAMA),
    "GPTNeoX": ("ForCausalLM", LLAMA),
    "GPT2": ("LMHeadModel", GPT),
}


def build(name: str = "Llama", ending: str = "ForCausalLM", settings: dict[str, Any] = LLAMA) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(name, name) + "Config")
    model = getattr(transformers, name + ending)(config(**settings, attn_implementation="sdpa"))
    return model.double().eval()


def batch(groups: tuple[int, ...] = (0, 1, 2, 1, 0, 2), seed: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts are padded on the left and answers on the right, as GRPO has them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (len(groups), PROMPT + ANSWER), generator=generator)
    prompts = torch.randint(3, WORDS, (3, PROMPT), generator=generator)
    at = torch.arange(PROMPT + ANSWER)
    rows = [(at >= 3 * group) & (at < PROMPT + ANSWER - row % 3) for row, group in enumerate(groups)]
    mask = torch.stack(rows).long()
    ids[:, :PROMPT] = prompts[list(groups)]
    return ids * mask, mask


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    attn_compiler.reset()
    options = {"inner": "eager", "share_prefix": True, "strict": True, **options}
    return torch.compile(model, backend="attn_compiler", options=options, dynamic=False)


def report() -> UnpadReport:
    return [one.unpad for one in attn_compiler.reports() if one.unpad is not None][-1]


def log_probabilities(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """As TRL asks for them."""
    logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=ANSWER + 1, use_cache=False).logits[:, :-1]
    return torch.log_softmax(logits, -1).gather(-1, ids[:, -ANSWER:, None])[..., 0] * mask[:, -ANSWER:]


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [torch.zeros(()) if x is None else x for x in found]


@pytest.mark.parametrize("name", MODELS)
def test_policies_share_prompts(name: str) -> None:
    model = build(name, *MODELS[name])
    function = compiled(model)
    advantages = torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None]
    for seed in range(2):
        ids, mask = batch(seed=seed)
        expected, found = (log_probabilities(x, ids, mask) for x in (model, function))
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
        own, others = (gradients((x * advantages).sum(), model) for x in (found, expected))
        # Norms compute in float32, whatever the model does.
        torch.testing.assert_close(own, others, atol=1e-7, rtol=1e-5)
    told = report()
    assert told.kept is None
    assert {(step.positions, step.groups, step.failed) for step in told.last} == {(6 * (PROMPT + ANSWER), 3, ())}
    assert all(step.number <= 3 * PROMPT + 6 * ANSWER for step in told.last)


@pytest.mark.parametrize(
    ("name", "experts", "layers", "rule", "observed"),
    [
        ("Qwen3Moe", "batched_mm", 2, "each op between the inputs and the outputs", "aten.topk.default"),
        # A loop over the experts that were asked for cuts the graph.
        ("Mixtral", "eager", 1, "an input is of (rows, positions)", "the graph has none"),
    ],
)
def test_experts_compute_each_row(name: str, experts: str, layers: int, rule: str, observed: str) -> None:
    counts = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 24}
    model = build(name, settings={**LLAMA, **counts, "num_hidden_layers": layers, "output_router_logits": True})
    model.set_experts_implementation(experts)
    function, (ids, mask) = compiled(model), batch()
    labels = ids.masked_fill(mask == 0, -100)
    found, expected = (
        run(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False) for run in (function, model)
    )
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(gradients(found.loss, model), gradients(expected.loss, model), atol=1e-7, rtol=1e-5)
    kept = report().kept
    assert kept is not None
    assert kept.rule.startswith(rule)
    assert kept.observed.startswith(observed)


def test_chosen_and_rejected_share_their_prompt() -> None:
    """DPO, with checkpoints."""
    policy, ids, mask = build().train(), *batch((0, 1, 2, 0, 1, 2))
    reference = copy.deepcopy(policy).eval()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def loss(policy: Any, reference: Any) -> Tensor:
        with torch.no_grad():
            beside = log_probabilities(reference, ids, mask).sum(1)
        ratios = log_probabilities(policy, ids, mask).sum(1) - beside
        return -torch.nn.functional.logsigmoid(0.1 * (ratios[:3] - ratios[3:])).mean()

    expected = loss(policy, reference)
    found = loss(compiled(policy), compiled(reference))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(gradients(found, policy), gradients(expected, policy), atol=1e-7, rtol=1e-5)
    assert report().kept is None


class Pairs(nn.Module):
    """DPO's loss of each pair, with the policy and the reference in one graph."""

    def __init__(self, policy: Any, reference: Any) -> None:
        super().__init__()
        self.policy, self.reference = policy, reference

    def forward(self, ids: Tensor, mask: Tensor, margins: Tensor) -> Tensor:
        ratios = log_probabilities(self.policy, ids, mask).sum(1)
        with torch.no_grad():
            beside = log_probabilities(self.reference, ids, mask).sum(1)
        chosen, rejected = (ratios - beside).chunk(2)
        return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected) - margins)


def test_policy_and_reference_may_be_one_graph() -> None:
    policy = build()
    with torch.no_grad():
        policy.lm_head.weight *= 1.5
    model = Pairs(policy, build())
    function = compiled(model)
    for seed in range(2):
        (ids, mask), margins = (
            batch((0, 1, 2, 0, 1, 2), seed),
            torch.rand(3, generator=torch.Generator().manual_seed(seed)),
        )
        expected, found = (run(ids, mask, margins) for run in (model, function))
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
        own, others = (gradients((x * margins).sum(), policy) for x in (found, expected))
        torch.testing.assert_close(own, others, atol=1e-7, rtol=1e-5)
    assert {(step.positions, step.groups, step.failed) for step in report().last} == {(6 * (PROMPT + ANSWER), 3, ())}


def test_rows_are_classified_by_one_template() -> None:
    model = build(ending="ForSequenceClassification", settings={**LLAMA, "num_labels": 3})
    function, (ids, mask) = compiled(model), batch((0,) * 6)
    found, expected = (x(input_ids=ids, attention_mask=mask, use_cache=False).logits for x in (function, model))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(gradients(found.sum(), model), gradients(expected.sum(), model), atol=1e-7, rtol=1e-5)
    assert [step.groups for step in report().last] == [1]


def test_the_trainer_trains_as_before(tmp_path: Path) -> None:
    ids, mask = batch((0, 0, 0, 1, 1, 1, 2, 2))
    labels = ids.masked_fill(mask == 0, -100)
    rows = [{"input_ids": i, "attention_mask": m, "labels": x} for i, m, x in zip(ids, mask, labels, strict=True)]
    found = []
    for shares in (False, True):
        model = build()
        model.config.use_cache = False
        if shares:
            torch._dynamo.reset()
            attn_compiler.reset()
            model.compile(backend="attn_compiler", options={"inner": "eager", "share_prefix": True, "strict": True})
        settings = {"max_steps": 4, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True}
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, seed=0, disable_tqdm=True, learning_rate=1e-3, **settings
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        losses = torch.tensor([one["loss"] for one in trainer.state.log_history if "loss" in one])
        found.append((losses, [x.detach() for x in model.parameters()]))
    assert len(found[0][0]) == 4
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-6, rtol=0)
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-6, rtol=0)
    assert any(step.number < step.positions and not step.failed for step in report().last)
