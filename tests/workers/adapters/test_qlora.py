"""QLoRA as the engine's options name it: an adapter over weights that are brought to NF4 while they are loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from pagewire.engine_core.config.config import EngineConfig
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.params import SamplingParams
from pagewire.kernels.data.weight import dense_weight
from pagewire.workers.checkpoint.formats.online import online
from tests.workers.architectures import GROUPED, VOCAB_SIZE, Architecture
from tests.workers.driver import Driver
from tests.workers.parity import NUM_TOKENS, make_prompts
from tests.workers.peft_adapters import AdaptedRunner, write_adapter

SIZES = GROUPED | {"intermediate_size": 128}
MARGIN = 0.1  # between log probabilities; our products round their inputs, those of PEFT do not


def dequantised(model: Path, folder: Path) -> Path:
    """A checkpoint with the numbers that the engine holds of this one."""
    from transformers import AutoModelForCausalLM

    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    quantise = online("bitsandbytes")
    for name, module in causal.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data = quantise(name, dense_weight(module.weight.data)).dense().contiguous()
    causal.save_pretrained(folder)
    return folder


def logprobs(model: Path, adapter: Path, token_ids: list[int]) -> torch.Tensor:
    """PEFT's log probabilities [n - 1, V] of each token after the first."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    adapted = PeftModel.from_pretrained(base, adapter).eval()
    with torch.inference_mode():
        return adapted(input_ids=torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)


def test_the_adapter_of_the_options_over_nf4_weights(tmp_path: Path) -> None:
    """Tokens and log probabilities are those of PEFT over the dequantised model, but for how inputs are rounded."""
    model = Architecture("llama", SIZES).write(tmp_path / "model")
    plain = dequantised(model, tmp_path / "plain")
    adapter = write_adapter(plain, tmp_path / "adapter", 1, 0.5, r=8, target_modules="all-linear")
    args = EngineArgs(
        str(model), quantization="bitsandbytes", enable_lora=True, qlora_adapter_name_or_path=str(adapter)
    )
    config = EngineConfig.resolve(args)
    worker, first = config.worker_config(), config.first_adapter
    assert worker.lora is not None and first is not None
    runner = AdaptedRunner(Path(worker.model_path), worker.lora, quantization=worker.quantization)
    assert runner.load(1, Path(first.path)).error is None
    (prompt,) = make_prompts(VOCAB_SIZE, (17,))
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    ours, base = Driver(runner.runner, 64).run([prompt] * 2, NUM_TOKENS, params, adapters=[1, 0])
    expected = logprobs(plain, adapter, [*prompt, *ours.output])
    chosen = expected.gather(1, torch.tensor([*prompt, *ours.output])[1:, None])[:, 0]
    of_prompt, of_output = chosen.split([len(prompt) - 1, NUM_TOKENS])
    near, far = (
        torch.tensor(each.prompt_logprobs[0].logprobs.tolist()).flatten() - of_prompt for each in (ours, base)
    )
    assert near.abs().mean() < MARGIN < far.abs().mean()
    assert (of_output > expected[-NUM_TOKENS:].amax(1) - MARGIN).all()
