"""`pagewire inspect --device cuda`: how a GPU's memory would be shared out. The GPU need not be there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pagewire.cli.console.model_table import head, table
from pagewire.cli.console.parser import UsageError
from pagewire.ipc.sizes import size_in_bytes

if TYPE_CHECKING:
    from pagewire.ipc.options.engine_args import EngineArgs
    from pagewire.ipc.wire.worker_messages import WorkerConfig
    from pagewire.workers.estimate.figures import Footprint
    from pagewire.workers.estimate.gpu_fit import Gpu, GpuFit, GpuRemedy


@dataclass(frozen=True)
class GpuReport:
    """All that is known about a model on a GPU before it is loaded: by one worker, or by one of several.

    where: the GPU in words. num_workers: over which the model is divided; each has a GPU like this.
    """

    model: str
    where: str
    sizes: Footprint
    fit: GpuFit
    remedies: list[GpuRemedy]
    num_workers: int


def run(args: EngineArgs, gpu_memory: str | None, *, as_json: bool) -> int:
    """Print the report of a model. Returns 0 if it fits, else 1.

    gpu_memory: as on the command line; None: of the GPU that is here.

    Raises:
        UsageError: a bad size, an option that GPUs do not have, or no GPU and no size. ModelNotFoundError,
            LoadError: see `inspect.run`.
    """
    if gpu_memory is not None and args.device == "cpu":
        raise UsageError("--gpu-memory is about GPUs: leave it out, or give --device cuda")
    gpu, where = (named_gpu(gpu_memory), f"a GPU of {gpu_memory}") if gpu_memory else gpu_here(args.device)
    found = report(args, gpu, where)
    if as_json:
        print(json.dumps(in_plain_values(found), indent=2))
    else:
        print("\n".join(lines(found)))
    return 0 if found.fit.problem is None else 1


def named_gpu(size: str) -> Gpu:
    """A GPU with this memory, such as "80GiB", of which nothing is used.

    Raises:
        UsageError: it is no size.
    """
    from pagewire.workers.estimate.gpu_fit import Gpu

    try:
        return Gpu(size_in_bytes("--gpu-memory", size))
    except ValueError as error:
        raise UsageError(str(error)) from None


def gpu_here(device: str) -> tuple[Gpu, str]:
    """The GPU that a device of the options names, and its name.

    Raises:
        UsageError: it is not here.
    """
    from pagewire.workers.device.gpu_memory import CONTEXT_BYTES
    from pagewire.workers.estimate.gpu_fit import Gpu

    index = device.partition(":")[2] or "0"
    try:
        import torch

        if not index.isdecimal() or int(index) >= torch.cuda.device_count():
            raise RuntimeError(f"{device} is not here")
        free, total = torch.cuda.mem_get_info(int(index))
        properties = torch.cuda.get_device_properties(int(index))
    except (ImportError, RuntimeError) as error:
        lines = str(error).splitlines() or [""]
        raise UsageError(
            f"no GPU can be asked for its memory ({lines[0][:200]}): give --gpu-memory SIZE, such as 80GiB, or "
            "--device cpu"
        ) from None
    # This process has a context, too, in which the worker's is not counted.
    others = max(0, total - free - CONTEXT_BYTES)
    return Gpu(total, others, properties.multi_processor_count), f"{properties.name} (cuda:{index})"


def report(args: EngineArgs, gpu: Gpu, where: str) -> GpuReport:
    """The report of a model on a GPU.

    Raises:
        UsageError, ModelNotFoundError, LoadError: see `run`.
    """
    from pagewire.engine_core.config.config import EngineConfig
    from pagewire.workers.checkpoint.headers import read_headers
    from pagewire.workers.estimate.fit import largest_stage, sizes_of
    from pagewire.workers.estimate.gpu_fit import gpu_fit, gpu_remedies
    from pagewire.workers.estimate.gpu_layout import GPU

    config = EngineConfig.resolve(args).worker_config()
    headers = read_headers(config.model_path, config.hf_overrides, config.trust_remote_code)
    config = largest_stage(headers, config, GPU)
    sizes = sizes_of(headers, config, GPU)
    check_kv_dtype(config, sizes)
    fit = gpu_fit(sizes, config, gpu)
    return GpuReport(
        model=args.model,
        where=where,
        sizes=sizes,
        fit=fit,
        remedies=gpu_remedies(headers, config, gpu) if fit.problem else [],
        num_workers=config.parallel.size,
    )


def check_kv_dtype(config: WorkerConfig, sizes: Footprint) -> None:
    """Refuse types of keys and values that a worker on a GPU refuses.

    Raises:
        UsageError: says which.
    """
    name = config.kv_cache_dtype
    if name in ("int8", "int4"):
        raise UsageError(f"--kv-cache-dtype {name} is for CPUs: fp8 has 8 bits on GPUs")
    if name.startswith("fp8") and sizes.dtype == "float32":
        raise UsageError(
            f"--kv-cache-dtype {name} needs a model in bfloat16 or float16 on a GPU, not float32"
        )


def in_plain_values(found: GpuReport) -> dict[str, Any]:
    """The report in plain values; bytes and bits."""
    sizes, fit = found.sizes, found.fit
    totals = ("parameters", "file_bytes", "weight_bytes", "read_bytes")
    of_model = asdict(sizes)
    del of_model["loading_bytes"]  # of a CPU
    return {
        "model": found.model,
        "device": "cuda",
        **of_model,
        **{name: getattr(sizes, name) for name in totals},
        "num_workers": found.num_workers,
        "memory": asdict(fit.memory),
        "max_model_len": fit.max_model_len,
        "kv_tokens": fit.kv_tokens,
        "kv_request_bytes": fit.kv_request_bytes,
        "num_states": fit.num_states,
        "requests": {str(length): number for length, number in fit.requests.items()},
        "fits": fit.problem is None,
        "problem": fit.problem,
        "remedies": [{"options": remedy.options, **asdict(remedy.fit.memory)} for remedy in found.remedies],
    }


def lines(found: GpuReport) -> Iterator[str]:
    """The report for people."""
    from pagewire.workers.device.gpu_memory import OPTIONS
    from pagewire.workers.estimate.fit import amount

    sizes, fit = found.sizes, found.fit
    yield from head(sizes)
    if found.num_workers > 1:
        yield f"workers   {found.num_workers}, with a GPU each; memory is that of one"
    yield ""
    yield from table(sizes, "that of the embedding")
    yield ""
    yield f"memory    of {found.where}; activations, context and graphs are estimates:"
    for name, size in fit.memory.parts.items():
        if size:
            changed_by = f"  by {OPTIONS[name]}" if name in OPTIONS else ""
            yield f"          {name.replace('_', ' '):<12}{amount(size):>12}{changed_by}"
    yield (
        f"KV cache  {fit.kv_token_bytes / 1024:.1f} KiB a token; {fit.kv_tokens:,} tokens, a request of "
        f"{fit.max_model_len:,} takes {amount(fit.kv_request_bytes)}"
    )
    if fit.num_states:
        yield f"states    {amount(sizes.state_bytes)} a sequence; {fit.num_states:,} state slots"
    if fit.requests:
        numbers = ", ".join(f"{number:,} of {length:,} tokens" for length, number in fit.requests.items())
        yield f"requests  at a time: {numbers}"
    yield "fits      yes" if fit.problem is None else f"fits      no: {fit.problem}"
    for remedy in found.remedies:
        yield f"          it would with {remedy}"
