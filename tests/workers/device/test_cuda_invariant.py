"""No bit of a GPU's outputs depends on the batch, where that is asked for.

The oracle is the same model with another budget of tokens, other requests beside, and no recorded steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Parallel, WorkerConfig
from pagewire.kernels.cuda.kernels import CudaKernels
from pagewire.kernels.cuda.source import Variant
from pagewire.workers.device.interface import KernelNeeds
from pagewire.workers.errors import LoadError
from pagewire.workers.network.loading import check_invariant, check_sums
from pagewire.workers.process import wiring
from pagewire.workers.run.runner import Runner
from tests.kernels.cuda.emulate.launcher import EmulatedLauncher
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice, emulated
from tests.workers.architectures import SERVED, VOCAB_SIZE, Architecture
from tests.workers.device.conftest import HEADS, SIZES
from tests.workers.driver import Driver, Request, load_runner
from tests.workers.parity import make_prompts

SAMPLED = SamplingParams(temperature=1.0, logprobs=3, prompt_logprobs=2)
Load = Callable[..., Runner]


@pytest.fixture
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Makes runners on emulated devices, where a test does not say otherwise."""
    if getattr(request, "param", "emulated") == "gpu":
        if not torch.cuda.is_available():
            pytest.skip("there is no GPU")
        yield lambda folder, **fields: load_runner(folder, **(SIZES | {"max_model_len": 90} | fields))[0]
        return
    launcher = EmulatedLauncher(multiprocessors=60)
    kernels = CudaKernels(launcher, "cpu")

    def opened(config: WorkerConfig) -> EmulatedCudaDevice:
        device = EmulatedCudaDevice(launcher)
        device.kernels, kernels.batch_invariant = kernels, config.batch_invariant
        return device

    monkeypatch.setattr(wiring, "open_device", opened)
    with emulated(kernels):
        yield lambda folder, **fields: load_runner(folder, **(SIZES | {"max_model_len": 90} | fields))[0]


def written(folder: Path, name: str) -> Path:
    return Architecture(name, SERVED[name].fields | HEADS).write(folder, dtype="bfloat16")


def facts(request: Request) -> tuple[object, ...]:
    """All that a request gives, log probabilities to the last bit."""
    prompt = [number for rows in request.prompt_logprobs for number in rows.logprobs.tolist()]
    return request.output, request.logprobs, prompt


@pytest.mark.parametrize("load", ["emulated", "gpu"], indirect=True)
@pytest.mark.parametrize(("name", "quantization"), [("llama", None), ("mixtral", None), ("llama", "int4")])
def test_no_bit_depends_on_the_batch(tmp_path: Path, load: Load, name: str, quantization: str | None) -> None:
    """Alone and among others, in chunks of 7 and in whole prompts, recorded or not."""
    folder = written(tmp_path, name)
    runner = load(folder, batch_invariant=True, quantization=quantization)
    prompts = make_prompts(VOCAB_SIZE, (70, 5, 33))
    together = Driver(runner, budget=7).run(prompts, 6, SAMPLED, seeds=[1, 2, 3])
    plain = load(folder, batch_invariant=True, quantization=quantization, enforce_eager=True)
    for number, prompt in enumerate(prompts):
        (alone,) = Driver(plain, budget=90).run([prompt], 6, SAMPLED, seeds=[number + 1])
        assert facts(alone) == facts(together[number])


def test_kernels_of_their_own_run_only_where_it_is_asked_for(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, names = EmulatedLauncher.launch, set[str]()

    def count(self: EmulatedLauncher, variant: Variant, *others: Any) -> None:
        names.add(variant.name.partition("<")[0])
        launch(self, variant, *others)

    monkeypatch.setattr(EmulatedLauncher, "launch", count)
    folder = written(tmp_path, "llama")
    for batch_invariant in (False, True):
        runner = load(folder, batch_invariant=batch_invariant)
        names.clear()
        Driver(runner).run(make_prompts(VOCAB_SIZE, (5,)), 2)
        assert ({"linear_few", "span_attention"} <= names) == batch_invariant
        assert ("decode_attention" in names) != batch_invariant


def test_what_depends_on_the_batch_is_refused(tmp_path: Path, load: Load) -> None:
    more = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = Architecture("diffllama", HEADS | more).write(tmp_path, dtype="bfloat16")
    with pytest.raises(LoadError, match="batch_invariant: layers of this model run as modules"):
        load(folder, batch_invariant=True)
    with pytest.raises(LoadError, match="none for encoders or float32"):
        load(folder, batch_invariant=True, dtype="float32")
    device = EmulatedCudaDevice()
    for changed, reason in (
        ({"lora": LoRAConfig(max_loras=1, max_lora_rank=8)}, "enable_lora"),
        ({"parallel": Parallel(0, 2)}, "tensor_parallel_size"),
    ):
        config = WorkerConfig(str(folder), batch_invariant=True, **changed)
        with pytest.raises(LoadError, match=reason):
            check_invariant(config, device)


def test_routers_of_float32_are_refused(tmp_path: Path, load: Load) -> None:
    fields = SERVED["glm4_moe"].fields | HEADS | {"moe_intermediate_size": 32}
    folder = Architecture("glm4_moe", fields).write(tmp_path, dtype="bfloat16")
    model = load(folder).model.model
    with pytest.raises(LoadError, match="batch_invariant: its routers compute in float32"):
        check_sums(model)
    check_sums(load(written(tmp_path / "mixtral", "mixtral")).model.model)


def test_a_device_that_gets_a_kernel_wrong_is_refused(load: Load) -> None:
    device = EmulatedCudaDevice()
    device.kernels.batch_invariant = True
    device.kernels.replace("rms_norm")
    with pytest.raises(LoadError, match="differ from PyTorch \\(rms_norm\\)"):
        device.prepare(KernelNeeds(torch.bfloat16, torch.bfloat16, [64]))
