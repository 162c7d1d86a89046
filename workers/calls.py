"""What may be asked of a worker by name. Each takes the runner, and answers what msgpack can hold."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pagewire.workers.model.loading import Phases, load_model
from pagewire.workers.runner import Runner


def ping(runner: Runner) -> str:
    """I live."""
    return "pong"


def memory(runner: Runner) -> dict[str, int]:
    """Bytes: of the device, of this process, of weights and KV cache."""
    return runner.memory()


def model_info(runner: Runner) -> dict[str, Any]:
    """What is loaded."""
    loaded = runner.model
    return {
        "architecture": loaded.architecture,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "num_layers": len(loaded.kv_shapes),
        "vocab_size": loaded.vocab_size,
        "max_model_len": loaded.max_model_len,
        "weight_bytes": loaded.weight_bytes,
        "num_blocks": runner.num_blocks,
        "num_threads": runner.device.num_threads,
        "forward": type(loaded.model.base).__name__,
    }


def sleep(runner: Runner, level: int = 1) -> None:
    """Give memory back: level 1 the KV cache, level 2 the weights as well. Forgets every request.

    Raises:
        ValueError: another level.
    """
    if level not in (1, 2):
        raise ValueError(f"sleep level must be 1 or 2, got {level!r}")
    runner.free()
    if level == 2:
        runner.loaded = None
    gc.collect()
    runner.device.give_back()


def wake_up(runner: Runner, tags: Sequence[str] | None = None) -> None:
    """Take memory again, and load the weights if they were dropped. tags: only "weights", or "kv_cache" too.

    Raises:
        ValueError: an unknown tag. LoadError: the memory is not there any more.
    """
    if unknown := set(tags or ()) - {"weights", "kv_cache"}:
        raise ValueError(f"wake_up knows the tags weights and kv_cache, not {', '.join(sorted(unknown))}")
    if runner.loaded is None:
        runner.loaded = load_model(runner.config, Phases(lambda phase, seconds: None), runner.device)
    if not runner.caches and (tags is None or "kv_cache" in tags):
        runner.allocate_kv()
        runner.warm_up()


def start_profile(runner: Runner) -> None:
    """Begin to record what PyTorch does.

    Raises:
        RuntimeError: a recording is going on.
    """
    if runner.profile is not None:
        raise RuntimeError("a profile is being recorded already")
    runner.profile = torch.profiler.profile(activities=runner.device.activities)
    runner.profile.start()


def stop_profile(runner: Runner) -> str:
    """End the recording: the path of a trace in Chrome's format, in `$PAGEWIRE_TORCH_PROFILER_DIR`.

    Raises:
        RuntimeError: nothing is being recorded.
    """
    if runner.profile is None:
        raise RuntimeError("no profile is being recorded: call start_profile first")
    profile, runner.profile = runner.profile, None
    profile.stop()
    folder = Path(os.environ.get("PAGEWIRE_TORCH_PROFILER_DIR") or tempfile.mkdtemp(prefix="pagewire-"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"worker-{os.getpid()}-{time.time_ns()}.json"
    profile.export_chrome_trace(str(path))
    return str(path)


CALLS: dict[str, Callable[..., Any]] = {
    method.__name__: method
    for method in (ping, memory, model_info, sleep, wake_up, start_profile, stop_profile)
}


def call(runner: Runner, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one of `CALLS`.

    Raises:
        ValueError: no such method. Others: whatever the method raises.
    """
    if method not in CALLS:
        raise ValueError(f"the worker has no method {method!r}; it has {', '.join(sorted(CALLS))}")
    return CALLS[method](runner, *args, **kwargs)
