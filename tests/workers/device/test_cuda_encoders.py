"""Encoders on a GPU, emulated or real: packed prompts without a KV cache, against transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.ipc.wire.pooling import PoolerConfig, PoolingParams
from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan, StepResult
from pagewire.workers.device.cuda import CudaDevice
from pagewire.workers.errors import LoadError
from pagewire.workers.families.encoder_structures import STRUCTURES
from pagewire.workers.network.network import Network
from pagewire.workers.run.launch import StepLauncher
from pagewire.workers.run.runner import Runner
from tests.kernels.cuda.emulate.launcher import EmulatedLauncher
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice
from tests.workers.device.test_cuda import never_waiting
from tests.workers.parity import make_prompts
from tests.workers.pooled import cosine, hidden_states, pool, write
from tests.workers.test_pooling import EMBED, MEAN

SIZES = {"num_attention_heads": 2, "intermediate_size": 96}  # heads of 32, which have a kernel
POOLER = PoolerConfig(pooling_type="MEAN")
LENGTHS = (23, 1, 64, 5)
Load = Callable[..., Runner]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that the emulation has launched; empty on a GPU."""
    names: list[str] = []
    launch = EmulatedLauncher.launch

    def spy(self: EmulatedLauncher, variant: Any, *args: Any) -> None:
        names.append(variant.name.partition("<")[0])
        launch(self, variant, *args)

    monkeypatch.setattr(EmulatedLauncher, "launch", spy)
    return names


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "mpnet", "albert", "deberta-v2"])
def test_encoders_embed(
    model_type: str,
    load: Load,
    launched: list[str],
    tmp_path: Path,
) -> None:
    """As a stack, layer by layer, and prompt by prompt: a stack to the bits of each prompt alone."""
    folder = write(tmp_path, model_type, dtype="float16", **SIZES)
    prompts = make_prompts(128, LENGTHS)
    runner = load(folder, pooler_config=POOLER)
    base, is_own = runner.model.model.base, model_type == "deberta-v2"
    assert isinstance(base, Network) == (model_type in STRUCTURES)
    launched.clear()
    crowd = pool(runner, prompts, MEAN)
    if isinstance(runner.device, EmulatedCudaDevice):
        assert launched.count("prefill_attention") == (0 if is_own else 2)  # layers
        assert "decode_attention" not in launched
    for prompt, vector, hidden in zip(prompts, crowd, hidden_states(folder, prompts), strict=True):
        assert cosine(vector, hidden.mean(0)) > 0.9999
        if isinstance(base, Network):
            assert torch.equal(pool(runner, [prompt], MEAN)[0], vector)


def test_float32_without_kernels(load: Load, launched: list[str], tmp_path: Path) -> None:
    folder = write(tmp_path, "modernbert")
    prompts = make_prompts(128, LENGTHS)
    found = pool(load(folder, pooler_config=POOLER), prompts, MEAN)
    for vector, hidden in zip(found, hidden_states(folder, prompts), strict=True):
        assert cosine(vector, hidden.mean(0)) > 0.999999
    assert launched == []


def test_pairs_have_token_types(load: Load, tmp_path: Path) -> None:
    """They go to the device with the tokens, and the classifier runs there."""
    import transformers

    head = "AutoModelForSequenceClassification"
    folder = write(tmp_path, "bert", head, dtype="float16", num_labels=1, **SIZES)
    prompts, seconds = make_prompts(128, LENGTHS), [0, 0, 30, 2]
    model = getattr(transformers, head).from_pretrained(folder, dtype=torch.float32).eval()
    tasks = [PoolingParams(task="classify", all_tokens=True, second_segment=start) for start in seconds]
    scores = pool(load(folder), prompts, tasks)
    for score, ids, start in zip(scores, prompts, seconds, strict=True):
        types = (torch.arange(len(ids)) >= (start or 99)).long()
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), token_type_ids=types[None]).logits[0]
        torch.testing.assert_close(score, logits.sigmoid(), atol=2e-3, rtol=0)


def test_a_step_is_launched_before_the_one_before_it_is_finished(load: Load, tmp_path: Path) -> None:
    """Nothing waits for the GPU meanwhile, and the pages of keys and values serve one step after the other."""
    runner = load(write(tmp_path, "bert", dtype="float16", **SIZES), pooler_config=POOLER)
    plans = []
    for step, prompts in enumerate((make_prompts(128, (23, 5)), make_prompts(128, (40, 9), seed=2))):
        slots = range(2 * step, 2 * step + 2)
        inits = [SlotInit(i, p, len(p), [i], EMBED, 0) for i, p in zip(slots, prompts, strict=True)]
        rows = [Row(i, 0, len(p), pool=True) for i, p in zip(slots, prompts, strict=True)]
        plans.append(StepPlan(step, rows, inits))
    with never_waiting(runner):
        steps = [runner.launch(plan) for plan in plans]
    ahead = [step.finish() for step in steps]
    runner.step(StepPlan(2, [], freed_slots=[0, 1, 2, 3]))
    assert [vectors(step) for step in ahead] == [vectors(runner.step(plan)) for plan in plans]


def vectors(result: StepResult) -> list[list[float]]:
    """The embeddings of a step."""
    assert all(row.error is None and row.pooled is not None for row in result.rows)
    return [row.pooled.tolist() for row in result.rows if row.pooled is not None]


def test_heads_without_a_kernel_are_refused(load: Load, tmp_path: Path) -> None:
    """With what serves them."""
    folder = write(tmp_path, "bert", dtype="float16")
    text = "BertModel is not supported: .*no kernel for heads of 16.*CPUs serve it, and so does float32"
    with pytest.raises(LoadError, match=text):
        load(folder)


@pytest.mark.parametrize(
    "outcome", [1 << 40, torch.OutOfMemoryError("CUDA out of memory")], ids=["small", "none"]
)
def test_steps_that_do_not_fit_are_refused(
    outcome: int | Exception,
    load: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the engine starts, by the largest steps that there may be: of all tokens, and of one token each."""
    widths: list[list[int]] = []

    def activations(self: CudaDevice, widest_step: Callable[[], object]) -> int:
        run = StepLauncher.launch

        def launch(launcher: StepLauncher, plan: StepPlan) -> Any:
            widths.append([row.num_tokens for row in plan.rows])
            return run(launcher, plan)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepLauncher, "launch", launch)
            widest_step()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    for device in (CudaDevice, EmulatedCudaDevice):
        monkeypatch.setattr(device, "_activations_of", activations)
    folder = write(tmp_path, "bert", dtype="float16", **SIZES)
    with pytest.raises(LoadError, match=r"steps of 40 tokens \(max_num_batched_tokens\) do not fit into"):
        load(folder, max_num_batched_tokens=40)
    assert [sorted(width) for width in widths if width] == [[64], [1] * 6]
