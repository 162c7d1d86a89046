"""`pagewire inspect`: what a model is, what it will take here, and how fast it should be, without loading it.

What it takes on a GPU, which need not be there, is in `inspect_gpu.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.model_table import head, table
from pagewire.cli.console.options import add_engine_options, engine_args
from pagewire.cli.console.parser import UsageError

if TYPE_CHECKING:
    from pagewire.ipc.options.engine_args import EngineArgs
    from pagewire.workers.estimate.figures import Footprint, Speed
    from pagewire.workers.estimate.fit import Fit, Remedy


@dataclass(frozen=True)
class ModelReport:
    """All that is known about a model before it is loaded: by one worker, or by one of several.

    num_workers: over which it is divided. num_local: those that share this machine, its memory and processors.
    num_threads: of one worker. road: how the layers should run, in a sentence; None: it was not asked for.
    """

    model: str
    sizes: Footprint
    fit: Fit
    remedies: list[Remedy]
    speed: Speed
    num_threads: int
    num_workers: int = 1
    num_local: int = 1
    road: str | None = None


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "inspect",
        help=SUMMARIES["inspect"],
        description="Read the headers of a checkpoint, and say what its parts take in memory on this CPU, whether "
        "it fits, what would make it fit, and how long a token should take."
        " For a GPU, which need not be there: how its memory is shared out, and how many tokens fit."
        " Exit status 0 if it fits, else 1.",
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="for a GPU with this memory, such as 80GiB or 81559MiB (as nvidia-smi has it); "
        "default with --device cuda: the GPU here",
    )
    parser.add_argument(
        "--road",
        action="store_true",
        help="say how the layers will run on a CPU, and why so: the model is built without weights, which takes "
        "PyTorch and some seconds",
    )
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report. Returns 0 if the model fits, else 1.

    Raises:
        UsageError: a bad option, or a GPU that is not there. ModelNotFoundError: no such model. LoadError: its
            headers cannot be read.
    """
    from pagewire.workers.checkpoint.headers import WITHOUT_HEADERS
    from pagewire.workers.device.machine import runs_on_cpu

    if options.model_tag is not None:
        if hasattr(options, "model"):
            raise UsageError("give MODEL or --model, not both")
        options.model = options.model_tag
    args = engine_args(options)
    if args.load_format in WITHOUT_HEADERS:
        raise UsageError(
            f"--load-format {args.load_format} has no headers to read: give safetensors or GGUF files"
        )
    if options.gpu_memory is not None or not runs_on_cpu(args.device):
        if options.road:
            raise UsageError("--road is about CPUs: leave it out, or give --device cpu without --gpu-memory")
        from pagewire.cli.commands import inspect_gpu

        return inspect_gpu.run(args, options.gpu_memory, as_json=options.json)
    found = report(args)
    if options.road:
        found = replace(found, road=road(args))
    if options.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        print("\n".join(lines(found)))
    return 0 if found.fit.problem is None else 1


def report(args: EngineArgs) -> ModelReport:
    """The report of a model on this CPU.

    Raises:
        ModelNotFoundError, LoadError: see `run`.
    """
    from msgspec import structs

    from pagewire.engine_core.config.config import EngineConfig
    from pagewire.kernels.cpu.library import expected_isa
    from pagewire.workers.checkpoint.headers import read_headers
    from pagewire.workers.device.machine import default_threads, machine_memory, read_rate
    from pagewire.workers.estimate.figures import expected_speed
    from pagewire.workers.estimate.fit import fit, kept_bytes, largest_stage, remedies, sizes_of

    config = EngineConfig.resolve(args).worker_config()
    num_local = config.parallel.size if starts_here(args) else 1
    headers, isa, memory = (
        read_headers(config.model_path, config.hf_overrides, config.trust_remote_code),
        expected_isa(),
        machine_memory(num_local),
    )
    # A token goes through all stages, one after the other.
    parallel = config.parallel
    alone = structs.replace(parallel, size=parallel.num_shards, stages=1, layers=())
    one_stage = structs.replace(config, parallel=alone)
    config = largest_stage(headers, config, isa)
    sizes, all_stages = sizes_of(headers, config, isa), sizes_of(headers, one_stage, isa)
    result = fit(sizes, config, *memory, kept_bytes(config, isa))
    local = structs.replace(config.parallel, local_size=num_local)
    num_threads = config.num_threads or default_threads(local)
    rate = read_rate(sizes.read_bytes * num_local, num_threads * num_local) / num_local
    return ModelReport(
        model=args.model,
        sizes=sizes,
        fit=result,
        remedies=remedies(headers, config, isa, *memory) if result.problem else [],
        speed=expected_speed(all_stages, rate),
        num_threads=num_threads,
        num_workers=config.parallel.size,
        num_local=num_local,
    )


def road(args: EngineArgs) -> str:
    """How the layers of a model should run in one worker on this CPU, in a sentence. Imports torch.

    Raises:
        UsageError: of several workers it is not known. LoadError: the model is not served; the text says why.
    """
    from pagewire.engine_core.config.config import EngineConfig
    from pagewire.workers.run.expected_road import expected_road

    config = EngineConfig.resolve(args).worker_config()
    if config.parallel.size > 1:
        raise UsageError("--road is about one worker: leave it out, or the options that divide the model")
    return expected_road(config).sentence


def starts_here(args: EngineArgs) -> bool:
    """True if the workers of an engine on CPUs share this machine; others are taken to have a machine each."""
    return not args.uses_ray and args.distributed_executor_backend in (None, "mp")


def layers_by_headers(sizes: Footprint) -> str:
    """How the layers of a model should run, as far as its headers say it: of encoders they do not."""
    from pagewire.workers.network.pooling_files import ENCODERS

    if sizes.is_stack:
        return "; the layers run as a stack"
    if sizes.dimensions.model_type in ENCODERS:
        return ""
    return "; the layers run as transformers' module (--road says why)"


def as_json(found: ModelReport) -> dict[str, Any]:
    """The report in plain values; bytes, seconds, and bits."""
    sizes, fit, speed = found.sizes, found.fit, found.speed
    totals = ("parameters", "file_bytes", "weight_bytes", "read_bytes")
    return {
        "model": found.model,
        **asdict(sizes),
        **{name: getattr(sizes, name) for name in totals},
        "num_threads": found.num_threads,
        "num_workers": found.num_workers,
        "num_local_workers": found.num_local,
        "memory": asdict(fit) | {"resident_bytes": fit.resident_bytes},
        "fits": fit.problem is None,
        "remedies": [{"options": remedy.options, "memory": asdict(remedy.fit)} for remedy in found.remedies],
        "speed": asdict(speed) | {"tokens_per_second": speed.tokens_per_second},
        "road": found.road,
    }


def lines(found: ModelReport) -> Iterator[str]:
    """The report for people."""
    from pagewire.workers.estimate.fit import amount

    sizes, fit, speed = found.sizes, found.fit, found.speed
    yield from head(sizes)
    if found.num_workers > 1:
        place = "share this machine" if found.num_local > 1 else "have a machine each"
        yield f"workers   {found.num_workers}, which {place}; memory, threads and bytes read are those of one"
    yield ""
    yield from table(sizes)
    yield ""
    if found.road is None:
        yield f"kernels   {sizes.isa}{layers_by_headers(sizes)}"
    else:
        yield from (f"kernels   {sizes.isa}", f"road      {found.road}")
    loading = f"loading takes {amount(fit.loading_bytes)} beside the weights"
    yield (
        f"memory    {amount(fit.weight_bytes)} of weights, {amount(fit.base_bytes + fit.table_bytes)} "
        f"for the worker, up to {amount(fit.step_bytes)} in steps; "
        f"{'its packed weights are kept, and will be read' if fit.is_kept else loading}"
    )
    yield (
        f"KV cache  {sizes.kv_token_bytes / 1024:.1f} KiB a token; {amount(fit.kv_bytes)} for "
        f"{fit.kv_tokens:,} tokens, {fit.kv_tokens / fit.max_model_len:.1f} requests of {fit.max_model_len:,}"
    )
    if fit.num_states:
        yield (
            f"states    {amount(sizes.state_bytes)} a sequence; {amount(fit.state_bytes)} for {fit.num_states:,} "
            "state slots: of running sequences, and of prefixes that are kept"
        )
    room = f"{amount(fit.available_bytes)} of {amount(fit.total_bytes)} are available"
    yield f"fits      yes: {room}" if fit.problem is None else f"fits      no: {fit.problem}; {room}"
    for remedy in found.remedies:
        yield f"          it would with {remedy}"
    yield (
        f"speed     {1000 * speed.token_seconds:.2f} ms a token ({speed.tokens_per_second:.0f} tokens/s) "
        f"for a request alone, {1000 * speed.context_seconds:.2f} ms more for each 1,000 tokens of context:"
    )
    yield (
        f"          {amount(sizes.read_bytes)} are read for a token, and {found.num_threads} threads read "
        f"{speed.read_rate / 1e9:.1f} GB/s now"
    )
