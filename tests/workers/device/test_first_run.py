"""The first run on a device: PyTorch replaces what is wrong there, and verdicts are kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from pagewire.kernels.cuda.kernels import PREFERRED
from pagewire.kernels.cuda.trial import Trial
from pagewire.kernels.cuda.trials import trials
from pagewire.kernels.cuda.variants import Launches
from pagewire.workers.device import cuda, first_run, trial_process
from pagewire.workers.device.cpu import CpuTokenSampler
from pagewire.workers.device.first_run import (
    NoTrialError,
    Tried,
    replace_wrong_kernels,
    verdicts_from,
    why_sampling_is_wrong,
)
from pagewire.workers.process import wiring
from pagewire.workers.run.runner import Runner
from tests.kernels.cuda.emulate import Edit, EmulatedLauncher
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice, emulated
from tests.workers.architectures import VOCAB_SIZE, Architecture
from tests.workers.device.conftest import HEADS, SIZES
from tests.workers.device.test_cuda import WITH_KERNEL, write_latents
from tests.workers.driver import Driver, load_runner
from tests.workers.parity import make_prompts

LAUNCHES = Launches(torch.bfloat16, torch.bfloat16, 32)
LAUNCHES_OF_MIXTURE = LAUNCHES._replace(mixture=True, capability=(9, 0))
GATE = Edit("gates.cu", "x / (1.0f + expf(-x))", "x / (1.0f + expf(x))")


class Store:
    """A cache in memory. What emulates the kernels stays in its own."""

    FORMAT = ""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.read, self.write = self.files.get, self.files.__setitem__

    def cache_folder(self) -> Path:
        return Path("/cache")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(first_run, "cache", store := Store())
    return store


class NewDevice(EmulatedCudaDevice):
    """An emulated device whose kernels are compared with PyTorch when a model is loaded."""

    def try_kernels(self, launches: Launches) -> None:
        replace_wrong_kernels(self, launches, first_run.here)


def test_an_engine_serves_although_kernels_are_wrong(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch computes the gate, and the sampler of CPUs draws tokens; the next start knows without trials."""
    some = [trial for trial in trials(LAUNCHES) if trial.name == "silu_and_mul"]
    monkeypatch.setattr(first_run, "trials", lambda *_, **__: some)  # the others take long to compile
    monkeypatch.setattr(
        first_run, "why_sampling_is_wrong", lambda device, dtype: "differs from the CPU's sampler"
    )
    folder = Architecture("llama", HEADS).write(tmp_path, dtype="bfloat16")
    prompts = make_prompts(VOCAB_SIZE, (9, 2))

    def load(device: EmulatedCudaDevice, eager: bool = False) -> tuple[Runner, list[list[int]]]:
        monkeypatch.setattr(wiring, "open_device", lambda config: device)
        with emulated(device.kernels):
            runner = load_runner(folder, **SIZES | {"max_num_seqs": 2, "enforce_eager": eager})[0]
            return runner, Driver(runner).generate(prompts, 4)

    _, expected = load(EmulatedCudaDevice(), eager=True)
    for start in ("first", "next"):
        caplog.clear()
        runner, tokens = load(device := NewDevice(EmulatedLauncher(edits=(GATE,))))
        assert tokens == expected, start
        assert device.kernels.replaced == {"activate_and_mul", "sample"}
        assert isinstance(runner.sampler, CpuTokenSampler) and runner.graphs is None
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert sorted(warning.partition(";")[0].partition(" by ")[0] for warning in warnings) == [
            "PyTorch computes activate_and_mul: silu_and_mul differs from PyTorch",
            "PyTorch computes sample: sampling differs from the CPU's sampler",
        ]
        monkeypatch.setattr(first_run, "here", None)  # the next start runs no trial
    assert len(store.files) == 1


def test_another_kernel_attends_where_warpgroups_are_wrong(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not PyTorch, nor are graphs lost. The fault is in that kernel's source alone."""
    launches = LAUNCHES._replace(head_dim=64, capability=(9, 0))
    some = [trial for trial in trials(launches) if trial.name.startswith("prefill attention")]
    monkeypatch.setattr(first_run, "trials", lambda *_: some)
    monkeypatch.setattr(first_run, "why_sampling_is_wrong", lambda device, dtype: "")
    fault = Edit("warpgroup_attention.cu", "        shrink_values<S>(rows, shrink);\n", "")
    device = EmulatedCudaDevice(EmulatedLauncher(edits=(fault,)))
    replace_wrong_kernels(device, launches, first_run.here)
    assert device.kernels.preferred == PREFERRED - {"warpgroup_attention"} and not device.kernels.replaced
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    begin = (
        "the kernel for all GPUs computes warpgroup_attention: prefill attention of warpgroups over bfloat16"
    )
    assert warning.startswith(begin)
    assert not any(trial.why_wrong(device.kernels, torch.device("cpu")) for trial in some)


@pytest.mark.planted_faults
def test_latents_are_expanded_where_their_kernels_are_wrong(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That shows before the cache is allocated. Only then are the kernels for expanded heads compiled and tried."""
    tried = list[int]()

    def some(launches: Launches) -> list[Trial]:
        tried.append(launches.head_dim)
        found = trials(launches)
        return [
            trial
            for trial in found
            if trial.name in ("a write of latents of 288", "drafts attention to latents of 288")
        ]

    monkeypatch.setattr(first_run, "trials", some)
    monkeypatch.setattr(first_run, "why_sampling_is_wrong", lambda device, dtype: "")
    fault = Edit("latent_attention.cu", "        shrink_values<V>(rows, shrinks);\n", "")
    device = NewDevice(EmulatedLauncher(edits=(fault,)))
    monkeypatch.setattr(wiring, "open_device", lambda config: device)
    folder = write_latents("youtu", tmp_path, **WITH_KERNEL, qk_nope_head_dim=32)
    with emulated(device.kernels):
        runner = load_runner(folder, **SIZES, dtype="bfloat16")[0]
        assert {(shape.head_dim, shape.v_head_dim) for shape in runner.model.kv_shapes} == {(64, 64)}
        Driver(runner).generate(make_prompts(VOCAB_SIZE, (9, 2)), 2)
    assert list(dict.fromkeys(tried)) == [288, 64]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith(
        "the kernel for expanded heads computes latents: drafts attention to latents of 288 differs"
    )


@pytest.mark.planted_faults
@pytest.mark.parametrize(
    "edit",
    [
        Edit("sampling.cu", "u64 best = NO_LIMIT;", "u64 best = NO_LIMIT; size = min(size, 64);"),
        Edit("sampling.cu", "c3 = u32(p0);", "c3 = u32(p0) + 1;"),
        Edit("sampling_logprobs.cu", "int(larger) + 1;", "int(larger);"),
    ],
    ids=["greedy", "random", "ranks"],
)
def test_wrong_sampling_is_found(edit: Edit) -> None:
    device = EmulatedCudaDevice(EmulatedLauncher(edits=(edit,)))
    assert why_sampling_is_wrong(device, torch.bfloat16) == "differs from the CPU's sampler"


def test_right_sampling_is_left_alone() -> None:
    assert not why_sampling_is_wrong(EmulatedCudaDevice(), torch.bfloat16)


def python(code: str) -> list[str]:
    """A process that runs this, with the number of skipped trials as `skip`, after it has said that it is ready."""
    head = "import json, os, sys, time\nskip = int(sys.argv[2])\n"
    return [sys.executable, "-S", "-c", head + code]


def test_kernels_that_end_their_process() -> None:
    """A crash, and an exception, after which a driver refuses everything: others have their trials all the same."""
    command = python(
        "print('ready', flush=True)\n"
        "for i in range(skip, 5):\n"
        "    if i == 1: os.abort()\n"
        "    print(json.dumps('failed: Error: illegal address' if i == 3 else ''), flush=True)\n"
        "    if i == 3: break\n"
    )
    reasons = ["", "failed: its process was killed by SIGABRT", "", "failed: Error: illegal address", ""]
    assert verdicts_from(command, list("abcde")) == dict(zip("abcde", reasons, strict=True))


def test_a_device_on_which_everything_crashes() -> None:
    verdicts = verdicts_from(python("print('ready', flush=True); os.abort()"), list("abcdefgh"))
    assert set(verdicts) == set("abcdefgh") and all(verdicts.values())
    assert verdicts["h"] == "was not tried, after failures of others"


def test_trials_that_cannot_be_run(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernels are used, and the next start tries again."""
    with pytest.raises(NoTrialError, match="exited with status 1: the device is busy"):
        verdicts_from(python("sys.exit('the device is busy')"), ["a"])
    with pytest.raises(NoTrialError, match="status 2"):
        verdicts_from(python("print('ready'); sys.exit(2)"), ["a"])
    monkeypatch.setattr(first_run, "LIMIT_SECONDS", 0.0)
    with pytest.raises(NoTrialError, match="did not end within 0 s"):
        verdicts_from(python("time.sleep(600)"), ["a"])

    def fails(*_: object) -> dict[str, str]:
        raise NoTrialError("the device is busy")

    replace_wrong_kernels(device := EmulatedCudaDevice(), LAUNCHES, fails)
    assert caplog.messages == ["the kernels were not compared with PyTorch: the device is busy"]
    assert not store.files and not device.kernels.replaced


def test_the_process_of_trials(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def raises(error: Exception) -> str:
        raise error

    tried = [
        Tried("a", "a", lambda: pytest.fail("it is skipped")),
        Tried("b", "b", lambda: ""),
        Tried("c", "c", lambda: "differs"),
        Tried("d", "d", lambda: raises(RuntimeError("illegal address\nmore"))),
        Tried("e", "e", lambda: pytest.fail("the driver refuses it")),
    ]
    monkeypatch.setattr(trial_process, "die_with_parent", lambda fd: None)
    monkeypatch.setattr(cuda.CudaDevice, "open", lambda index: EmulatedCudaDevice())
    monkeypatch.setattr(
        trial_process, "all_trials", lambda _, launches: tried if launches == LAUNCHES_OF_MIXTURE else []
    )
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "trial_process",
            "cuda:0",
            "bfloat16",
            "bfloat16",
            "32",
            "--mixture",
            "--packed",
            "--skip",
            "1",
            "--lifeline",
            "0",
        ],
    )
    assert trial_process.main() == 0
    ready, *lines = capsys.readouterr().out.splitlines()
    verdicts = [json.loads(line) for line in lines]
    assert (ready, verdicts) == ("ready", ["", "differs", "failed: RuntimeError: illegal address"])
    tried[1] = Tried("b", "b", lambda: raises(torch.OutOfMemoryError("it is full")))
    assert trial_process.main() == first_run.NO_TRIAL and "it is full" in capsys.readouterr().err
