"""Adapters that PEFT makes, and the tokens that it generates with them: the oracle of our own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pagewire.ipc.wire.lora import AdapterLoaded, LoadAdapter, LoRAConfig
from pagewire.workers.module.matrices import is_linear
from tests.workers.driver import load_runner
from tests.workers.parity import NUM_TOKENS, greedy_tokens
from tests.workers.random_adapters import load

LIMITS = LoRAConfig(max_loras=8, max_lora_rank=64, extra_vocab_size=0)


def write_adapter(model: Path, folder: Path, seed: int = 0, size: float = 0.2, **fields: Any) -> Path:
    """An adapter with random numbers for a checkpoint, as PEFT saves it.

    size: of the numbers of second matrices. fields: of `LoraConfig`.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **fields))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + torch.rand_like(parameter) / 2)
            elif parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * size)
    adapted.save_pretrained(folder)
    return folder


def peft_tokens(
    model: Path, adapters: Sequence[Path | None], prompts: list[list[int]], num_tokens: int = NUM_TOKENS
) -> list[list[int]]:
    """What PEFT generates for each prompt with its adapter, greedily in float32, past any end of sequence."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    outputs = []
    for prompt, adapter in zip(prompts, adapters, strict=True):
        base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        adapted = base if adapter is None else PeftModel.from_pretrained(base, adapter).eval()
        outputs.append(greedy_tokens(adapted, prompt, num_tokens))
    return outputs


def peft_logprobs(model: Path, adapter: Path | None, prompt: list[int]) -> list[float]:
    """The log probability of each token of a prompt after its first."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    adapted = base if adapter is None else PeftModel.from_pretrained(base, adapter).eval()
    with torch.inference_mode():
        logprobs = adapted(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    values = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])
    return values.flatten().tolist()  # type: ignore[no-any-return]


def targets_of(model: Path) -> list[str]:
    """The names of a model's linear layers but for its output layer and the choice of experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return sorted(
        {
            name.rpartition(".")[2]
            for name, child in module.named_modules()
            if is_linear(child) and child is not module.get_output_embeddings() and not name.endswith("_gate")
        }
    )


def write_adapter_of_all(model: Path, folder: Path) -> Path:
    """A random adapter of rank 4 of all of `targets_of`, with biases."""
    targets = targets_of(model)
    if (
        "kv_a_proj_with_mqa" in targets
    ):  # PEFT takes DeepSeek's feed-forward layers for the experts' parameters
        targets = [target for target in targets if target.startswith(("q_", "kv_", "o_"))]
    return write_adapter(model, folder, 1, 1.0, r=4, target_modules=targets, bias="lora_only")


class AdaptedRunner:
    """A runner that serves adapters, which it loads one after the other."""

    def __init__(self, model: Path, limits: LoRAConfig = LIMITS, **fields: Any) -> None:
        self._awake = threading.Event()
        self.runner, self.ready = load_runner(model, wake=self._awake.set, lora=limits, **fields)

    def load(self, index: int, folder: Path, content: bytes = b"") -> AdapterLoaded:
        """The message that an adapter is loaded, or why it is not."""
        return load(self.runner.adapters, LoadAdapter(index, str(folder), content), self._awake)

    def load_all(self, folders: Sequence[Path]) -> list[AdapterLoaded]:
        """Adapters 1, 2 and so on; each must be loaded."""
        messages = [self.load(index, folder) for index, folder in enumerate(folders, 1)]
        assert [message.error for message in messages] == [None] * len(folders)
        return messages
