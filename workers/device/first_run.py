"""The first run on a device: each kernel that a model may launch, once beside PyTorch.

The verdicts are kept in the cache of kernels, for this driver, chip and code, so the next start runs nothing. The
trials run in a process of their own (`trial_process.py`): a kernel that crashes or hangs ends that one, and not the
worker.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from pagewire.ipc.host.lifeline import Child, exit_cause
from pagewire.ipc.speculative import DEFAULT_THRESHOLD
from pagewire.ipc.wire.params import SamplingParams
from pagewire.kernels.cuda.kernels import STAND_INS, CudaKernels
from pagewire.kernels.cuda.source import HERE
from pagewire.kernels.cuda.trial import normal
from pagewire.kernels.cuda.trials import trials
from pagewire.kernels.cuda.variants import Launches
from pagewire.kernels.native import cache
from pagewire.workers.device.cuda_sampler import CudaTokenSampler, Transfers
from pagewire.workers.sample.sampler import SamplingSlot, sample
from pagewire.workers.sample.typical import Candidate, TypicalAcceptance

logger = logging.getLogger("pagewire.worker")

SAMPLING = "sample"
"""Stands for the sampling kernels among the methods that PyTorch computes; the sampler of CPUs replaces them."""
LIMIT_SECONDS = 120.0  # for all trials: they take seconds, and more if the cache of kernels cannot be written
MOST_PROCESSES = 6
"""Processes that may end by a trial. Then the kernels that remain are replaced without one."""
PROGRAM = "pagewire.workers.device.trial_process"
KINDS = ("encodes", "recurrent", "mixture", "packed", "invariant", "indexed")
"""The fields of `Launches` that are options of the program."""
NO_TRIAL = 2
"""The exit status of a process that cannot run trials."""
VOCAB_SIZE = 5000  # more than the sampling kernels' slice


class NoTrialError(Exception):
    """The trials cannot be run. The message says why."""


class TriedDevice(Transfers, Protocol):
    """The part of `cuda.CudaDevice` that the trials use."""

    kernels: CudaKernels


class Tried(NamedTuple):
    """A trial that can be run. run: returns why the kernels cannot be relied on, empty if they can."""

    name: str
    method: str
    run: Callable[[], str]


def all_trials(device: TriedDevice, launches: Launches) -> list[Tried]:
    """The trials of a model's kernels, sampling included."""

    def sampling() -> str:
        return why_sampling_is_wrong(device, launches.dtype)

    result = [Tried("sampling", SAMPLING, sampling)]
    for trial in trials(launches):

        def run(why_wrong: Callable[..., str] = trial.why_wrong) -> str:
            return why_wrong(device.kernels, device.torch_device)

        result.append(Tried(trial.name, trial.method, run))
    return result


@torch.inference_mode()
def why_sampling_is_wrong(device: Transfers, dtype: torch.dtype) -> str:
    """Why the sampling kernels cannot be relied on; empty if they give the tokens of the CPU's sampler."""
    rows = [
        SamplingParams(temperature=0.0, logprobs=5),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, logprobs=0),
        SamplingParams(
            temperature=1.0, repetition_penalty=1.3, presence_penalty=0.7, bad_words_token_ids=[[9], [11, 12]]
        ),
    ]
    tokens = np.array([1, 2, 3, 11])
    slots = [SamplingSlot(params, seed, [5], tokens, 3, 4, VOCAB_SIZE) for seed, params in enumerate(rows)]
    logits = 3 * normal(len(slots), VOCAB_SIZE).to(dtype)
    drafts = [int(row.topk(rank).indices[-1]) for row, rank in zip(logits, (6, 6, 30, 900), strict=True)]
    rule = TypicalAcceptance(DEFAULT_THRESHOLD, DEFAULT_THRESHOLD**0.5)
    slots += [slot.ahead([], Candidate(draft, rule)) for slot, draft in zip(slots, drafts, strict=True)]
    logits = torch.cat([logits, logits])
    sampler = CudaTokenSampler(device, len(slots), VOCAB_SIZE, 5)
    result = sampler.launch(logits.to(device.torch_device), slots).finish()
    return "" if result == sample(logits, slots) else "differs from the CPU's sampler"


def replace_wrong_kernels(
    device: TriedDevice,
    launches: Launches,
    run_trials: Callable[[TriedDevice, Launches], dict[str, str]],
) -> None:
    """Let PyTorch compute what this device's kernels get wrong, with a log line for each method.

    run_trials: `in_processes`, or `here` in tests.
    """
    file = kept_name(device, launches)
    stored = cache.read(file)
    try:
        verdicts: dict[str, str] = json.loads(stored) if stored else run_trials(device, launches)
    except NoTrialError as error:
        logger.warning("the kernels were not compared with PyTorch: %s", error)
        return
    if not stored:
        cache.write(file, json.dumps(verdicts).encode())
        right = sum(not reason for reason in verdicts.values())
        logger.info("first run of the kernels here: %d of %d equal PyTorch", right, len(verdicts))
    reasons: dict[str, list[str]] = {}
    for each in all_trials(device, launches):
        if reason := verdicts[each.name]:
            reasons.setdefault(each.method, []).append(f"{each.name} {reason}")
    for method, texts in reasons.items():
        if method == SAMPLING:
            device.kernels.replaced.add(method)
        else:
            device.kernels.replace(method)
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        at = cache.cache_folder() / file
        by = STAND_INS.get(method, "PyTorch")
        logger.warning("%s computes %s: %s%s; remove %s to try again", by, method, texts[0], more, at)


def kept_name(device: TriedDevice, launches: Launches) -> str:
    """The name of the file of verdicts: of the device, its driver, and all that the kernels are made of."""
    facts = (cache.FORMAT, *(str(part) for part in launches), *device_facts(device.torch_device))
    digest = hashlib.sha256(repr(facts).encode())
    for path in sorted(path for path in (Path(__file__), *HERE.iterdir()) if path.is_file()):
        digest.update(path.read_bytes())
    return f"first-run-{digest.hexdigest()[:32]}.json"


def device_facts(device: torch.device) -> list[str]:
    """What results may depend on beside the kernels: chip, driver, compiler, PyTorch."""
    facts = [str(torch.__version__)]
    if device.type == "cuda":
        from pagewire.kernels.cuda.compile import OPTIONS, nvrtc

        facts += [torch.cuda.get_device_name(device), str(torch.cuda.get_device_capability(device))]
        facts += [*driver_versions(), str(nvrtc().getVersion()), *OPTIONS]
    return facts


def driver_versions() -> list[str]:
    """The versions of the driver (where the system shows it) and of the CUDA that the driver supports."""
    import cupy

    file = Path("/proc/driver/nvidia/version")
    own = file.read_text().splitlines()[:1] if file.exists() else []
    return [*own, str(cupy.cuda.runtime.driverGetVersion())]


def verdict(tried: Tried) -> str:
    """Why kernels cannot be relied on; empty if they can. An exception is a reason, too.

    Raises:
        NoTrialError: the device's memory does not suffice for the trial.
    """
    try:
        return tried.run()
    except torch.OutOfMemoryError as error:
        raise NoTrialError(str(error)) from error
    except Exception as error:  # CuPy, the driver and torch raise many types
        lines = str(error).splitlines() or [""]
        return f"failed: {type(error).__name__}: {lines[0]}"


def here(device: TriedDevice, launches: Launches) -> dict[str, str]:
    """The verdicts of all trials by name, run in this process."""
    return {tried.name: verdict(tried) for tried in all_trials(device, launches)}


def in_processes(device: TriedDevice, launches: Launches) -> dict[str, str]:
    """The verdicts of all trials by name, run in a process. If one ends it, another one runs those after it.

    Raises:
        NoTrialError: a process cannot be started, or ended before the first trial.
    """
    types = [str(dtype).removeprefix("torch.") for dtype in launches[:2]]
    command = [sys.executable, "-m", PROGRAM, str(device.torch_device), *types, str(launches.head_dim)]
    command += [f"--{name}" for name in KINDS if getattr(launches, name)]
    return verdicts_from(command, [tried.name for tried in all_trials(device, launches)])


def verdicts_from(command: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """The verdicts that processes print, as `PROGRAM` does. command: gets `--skip N`, the trials that are done.

    Raises:
        NoTrialError: see `in_processes`.
    """
    verdicts: dict[str, str] = {}
    for _ in range(MOST_PROCESSES):
        lines, status, cause = output_of([*command, "--skip", str(len(verdicts))])
        if status == NO_TRIAL or not lines:
            raise NoTrialError(cause)
        verdicts.update(zip(names[len(verdicts) :], (json.loads(line) for line in lines[1:]), strict=False))
        if status:
            verdicts[names[len(verdicts)]] = f"failed: its process {cause}"
        if len(verdicts) == len(names):
            return verdicts
    return {name: verdicts.get(name, "was not tried, after failures of others") for name in names}


def output_of(command: Sequence[str]) -> tuple[list[str], int, str]:
    """The lines that a process has printed, its exit status, and how it ended, with the last line of its errors.

    Raises:
        NoTrialError: it cannot be started.
    """
    try:
        child = Child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        raise NoTrialError(str(error)) from error
    try:
        output, errors = child.process.communicate(timeout=LIMIT_SECONDS)
        cause = exit_cause(child.process.returncode)
    except subprocess.TimeoutExpired:
        child.kill()
        output, errors = child.process.communicate()
        cause = f"did not end within {LIMIT_SECONDS:g} s"
    child.release()
    last = errors.decode(errors="replace").strip().splitlines()[-1:]
    return output.decode().splitlines(), child.process.returncode, ": ".join([cause, *last])
