"""`model.generate` with a static cache: transformers compiles the decode step itself, with the backend that its config names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.hf.family import Size
from tests.hf.outputs import NEW_TOKENS, generated
from tests.hf.packages import Unavailable, import_package
from tests.hf.survey import FAMILY, Recorder


@pytest.mark.in_turns(4)
@pytest.mark.parametrize(
    ("family", "impl"), [("llama", "sdpa"), ("gemma3", "sdpa"), ("gpt_oss", "eager"), ("bart", "sdpa")]
)
def test_a_left_padded_batch_generates_as_eager_does(family: str, impl: str) -> None:
    try:
        model: Any = FAMILY[family].build(impl).eval()
        config_class = import_package("transformers").CompileConfig
    except Unavailable as missing:
        pytest.skip(str(missing))
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = 0
    inputs = {"input_ids": FAMILY[family].inputs(Size())["input_ids"], "attention_mask": mask}
    recorder = Recorder()

    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        # A function, because generate deep-copies its config and with it a recorder.
        return recorder(gm, example_inputs)

    compile_config = config_class(backend=backend, mode=None, fullgraph=False, dynamic=False)
    # transformers compiles by itself on accelerators only.
    compile_config._compile_all_devices = True

    tokens, logits = generated(model, inputs, disable_compile=True)
    compiled_tokens, compiled_logits = generated(model, inputs, compile_config=compile_config)

    # The first token comes from the prefill, which transformers does not compile.
    assert recorder.found == FAMILY[family].expected("static_decode") * (NEW_TOKENS - 1)
    torch.testing.assert_close(compiled_logits, logits, rtol=1e-4, atol=1e-4 * logits.abs().max().item())
    assert torch.equal(compiled_tokens, tokens)
