"""The worker's side of `ipc.calls`. Each function takes the runner, and returns what msgpack can hold."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pagewire.ipc.errors import error_text
from pagewire.ipc.host.heap import freeze_heap
from pagewire.ipc.wire.calls import CALLS, RunsIn
from pagewire.ipc.wire.items import TensorForm, WeightFile
from pagewire.workers.checkpoint import replaced
from pagewire.workers.errors import LoadError, LostRankError
from pagewire.workers.network import sharded_state
from pagewire.workers.ranks.agreement import all_have
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.run.runner import Runner


def ping(runner: Runner) -> str:
    """Answer, as a sign that the worker is alive."""
    return "pong"


def memory(runner: Runner) -> dict[str, int]:
    """Bytes of memory: of the device, of this process, of weights and KV cache."""
    return runner.memory()


def model_info(runner: Runner) -> dict[str, Any]:
    """The loaded model: its architecture and dtype, and the sizes of the model and of its KV cache."""
    loaded = runner.model
    return {
        "architecture": loaded.architecture,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "num_layers": len(loaded.kv_shapes),
        "vocab_size": loaded.vocab_size,
        "max_model_len": loaded.max_model_len,
        "weight_bytes": loaded.weight_bytes,
        "num_blocks": runner.num_blocks,
        "num_states": runner.num_states,
        "num_threads": runner.device.num_threads,
        "forward": loaded.model.base.name,
        "drafter": runner.drafter.name,
    }


def sleep(runner: Runner, level: int = 1, tags: Sequence[str] | None = None) -> None:
    """Give the memory of the KV cache back, and that of the weights unless `tags` names the cache alone.

    Forgets every request. level: at 2 the core ends this process next.

    Raises:
        ValueError: an unknown tag.
    """
    check_tags("sleep", tags)
    runner.free()
    if tags is None or "weights" in tags:
        runner.drop_weights()
    gc.unfreeze()  # what was garbage when the start froze the heap may hold the weights that it read meanwhile
    freeze_heap()
    runner.device.give_back()


def wake_up(runner: Runner, tags: Sequence[str] | None) -> None:
    """Load the weights if they were dropped, and allocate the KV cache unless `tags` leaves "kv_cache" out.

    Raises:
        ValueError: an unknown tag. RuntimeError: the model cannot be loaded, or there is too little memory now.
        LostRankError: see `together`.
    """
    check_tags("wake_up", tags)
    try:
        with together(runner.collective):
            runner.load_weights()
        if not runner.kv.is_taken and (tags is None or "kv_cache" in tags):
            allocate_kv(runner)
            with together(runner.collective):
                runner.warm_up()
    except LoadError as error:  # not the caller's mistake, as a ValueError would be
        raise RuntimeError(str(error)) from error


def check_tags(method: str, tags: Sequence[str] | None) -> None:
    """Check what names parts of a worker's memory.

    Raises:
        ValueError: an unknown tag.
    """
    if unknown := set(tags or ()) - {"weights", "kv_cache"}:
        raise ValueError(f"{method} knows the tags weights and kv_cache, not {', '.join(sorted(unknown))}")


def weight_tensors(runner: Runner) -> list[TensorForm]:
    """The tensors of the checkpoint that `load_weights` can replace; see `replaced.replaceable`."""
    return replaced.replaceable(runner.config)


def load_weights(runner: Runner, files: Sequence[WeightFile]) -> None:
    """Load the model anew, with the tensors of these files in place of its own. Forgets every request.

    If it fails, the worker has no weights.

    Raises:
        RuntimeError: they cannot be loaded, or there is too little memory now. LostRankError: see `together`.
    """
    sleep(runner)
    runner.use_weights(files)
    wake_up(runner, None)


@contextmanager
def together(collective: Collective) -> Iterator[None]:
    """A context of work in which the ranks of a group wait for each other, so that none can fail alone and go on.

    Raises:
        LostRankError: it fails in a group of several ranks.
    """
    try:
        yield
    except Exception as error:
        if collective.size == 1:
            raise
        raise LostRankError(error_text(error)) from error


def allocate_kv(runner: Runner) -> None:
    """Allocate the KV cache of every rank, or of none.

    Raises:
        LoadError: a rank of the group has too little memory.
    """
    shortage = None
    try:
        runner.allocate_kv()
    except LoadError as error:
        shortage = error
    if not all_have(shortage is None, runner.collective, runner.device.torch_device):
        runner.free()
        raise shortage or LoadError("another rank of the group has too little memory for its KV cache")


def save_sharded_state(runner: Runner, path: str, pattern: str | None, max_size: int) -> None:
    """Write this rank's part of the weights: see `sharded_state.save_sharded_state`."""
    length = runner.model.max_model_len
    sharded_state.save_sharded_state(
        runner.config,
        runner.device,
        runner.collective,
        length,
        sharded_state.allowed_folder(path, runner.config.allowed_save_path),
        pattern or sharded_state.PATTERN,
        max_size,
        runner.model.model.stage,
    )


def start_profile(runner: Runner) -> None:
    """Start PyTorch's profiler.

    Raises:
        RuntimeError: a recording is going on.
    """
    runner.profiler.start()


def stop_profile(runner: Runner) -> str:
    """Stop PyTorch's profiler. Returns the path of a trace in Chrome's format, in `$PAGEWIRE_TORCH_PROFILER_DIR`.

    Raises:
        RuntimeError: nothing is being recorded.
    """
    return runner.profiler.stop()


METHODS: dict[str, Callable[..., Any]] = {
    name: globals()[name] for name, entry in CALLS.items() if entry.runs_in is not RunsIn.CORE
}


def call(runner: Runner, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Check the arguments of one of `METHODS`, and run it; or run one of the operator's (`run/extension.py`).

    Raises:
        ValueError: no such method, or an argument out of its bounds. TypeError: wrong arguments. Others: whatever
            the method raises.
    """
    if name in runner.extension.names:
        return runner.extension.call(name, args, kwargs)
    if name not in METHODS:
        own = sorted([*METHODS, *runner.extension.names])
        raise ValueError(f"the worker has no method {name!r}; it has {', '.join(own)}")
    return METHODS[name](runner, **CALLS[name].receive(args, kwargs))
