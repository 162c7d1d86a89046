"""Whether a model's layers are a network, by its module on the meta device: no weights are read.

The module is taken apart as `build.py` does it, up to where the values of weights decide: whether norms and
products compute what the kernels do. There the proof has the last word (`proof.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.errors import IndivisibleError, LoadError
from pagewire.workers.families.structures import LayerParts, OtherStructureError
from pagewire.workers.module.configuration import load_config, resolve_dtype
from pagewire.workers.module.text_base import base_path, without_picture_layers
from pagewire.workers.module.transforms import tabulate_rotary
from pagewire.workers.module.weights import Weights
from pagewire.workers.network.build import layers_of
from pagewire.workers.network.build_module import module_on_meta, quantisation
from pagewire.workers.network.pooling_info import module_class, spec_of

NUM_POSITIONS = 1  # rows of the tables of angles: only their shape matters here
TENSOR_PARALLEL = "tensor_parallel_size"


def parts_on_meta(worker_config: WorkerConfig) -> tuple[Any, list[LayerParts]]:
    """The module of a model on the meta device, and the parts of the layers of its network.

    Raises:
        OtherStructureError: it is no network; the text says why.
        LoadError: it is not served.
    """
    config, spec = load_config(worker_config), spec_of(worker_config)
    quantisation(worker_config, config)  # takes its settings out of the configuration
    dtype = resolve_dtype(worker_config, config)
    module = module_on_meta(worker_config, config, dtype, module_class(spec))
    base = without_picture_layers(module.get_submodule(base_path(module)))
    tabulate_rotary(module, NUM_POSITIONS)
    return module, layers_of(base, Weights(module), encodes=spec is not None and spec.encoder)


def network_options(worker_config: WorkerConfig) -> list[str]:
    """The options of a worker that a network alone has."""
    parallel, speculative = worker_config.parallel, worker_config.speculative
    options = {
        TENSOR_PARALLEL: parallel.num_shards > 1,
        "pipeline_parallel_size": parallel.stages > 1,
        "enable_lora": worker_config.lora is not None,
        "speculative_config (the methods ngram and suffix work)": speculative is not None
        and not speculative.in_core,
    }
    return [name for name, is_set in options.items() if is_set]


def refuse_options(config: Any, options: Sequence[str], why: str) -> None:
    """Refuse a model without a network that was asked for what networks alone have.

    why: it has none; empty where another rank knows.

    Raises:
        LoadError: there are such options.
    """
    if not options:
        return
    kind = IndivisibleError if TENSOR_PARALLEL in options else LoadError
    raise kind(
        f"{config.get_text_config().model_type} is served without {', '.join(options)}: its layers run as "
        f"transformers' module ({why or 'the log of another worker says why'}), for text on one device alone; "
        "leave that out, or describe its layers (docs/own_models.md)"
    )


@contextmanager
def refusing_modules(config: Any, options: Sequence[str]) -> Iterator[None]:
    """A context in which a model without a network is refused, see `refuse_options`."""
    try:
        yield
    except OtherStructureError as error:
        refuse_options(config, options, str(error))
