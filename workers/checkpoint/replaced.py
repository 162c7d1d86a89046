"""Files whose tensors take the place of a checkpoint's own, because a model was given other weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pagewire.ipc.files.model_configs import read_configs
from pagewire.ipc.files.weight_files import state_of
from pagewire.ipc.gguf.file import is_gguf
from pagewire.ipc.quantization import settings_of
from pagewire.ipc.wire.items import TensorForm, WeightFile
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.checkpoint.headers import FLOATS, WITHOUT_HEADERS, safetensors_header, weight_files
from pagewire.workers.errors import LoadError
from pagewire.workers.versions import runs_repository_code


def check_unchanged(files: Iterable[WeightFile]) -> None:
    """Check that files are those that the core has checked, with the same content.

    Raises:
        LoadError: one is not, or is gone.
    """
    for file in files:
        try:
            is_same = state_of(file.path) == file.state
        except OSError as error:
            raise LoadError(f"the file of new weights cannot be read: {error.strerror}") from error
        if not is_same:
            raise LoadError(
                "a file of weights was written to after update_weights read it: write each version to a new file"
            )


def files_of(config: WorkerConfig) -> list[Path] | None:
    """The files of a model's weights; a tensor is that of the last one that has it. None: the checkpoint's alone.

    Raises:
        LoadError: see `check_unchanged`.
    """
    if not config.weights:
        return None
    check_unchanged(config.weights)
    return [*weight_files(Path(config.model_path)), *(Path(file.path) for file in config.weights)]


def replaceable(config: WorkerConfig) -> list[TensorForm]:
    """The tensors of a checkpoint that others can replace.

    Raises:
        ValueError: none can; the text says why.
    """
    if (why := reason_against(config)) is not None:
        raise ValueError(f"update_weights: {why}")
    tensors = (
        tensor for path in weight_files(Path(config.model_path)) for tensor in safetensors_header(path)
    )
    return [
        TensorForm(tensor.name, tensor.dtype, list(tensor.shape))
        for tensor in tensors
        if tensor.dtype in FLOATS
    ]


def reason_against(config: WorkerConfig) -> str | None:
    """Why the weights of a model stay as they are; None if they can be replaced.

    It reads config.json and not transformers' configuration: a worker that has read packed weights has not imported
    transformers, and while it did all streams would stand still for seconds.
    """
    if is_gguf(config.model_path):
        return "a GGUF file names its weights otherwise; serve the model from safetensors files"
    if config.load_format in WITHOUT_HEADERS:
        return f"load_format {config.load_format!r} has no safetensors files whose tensors could be replaced"
    values = read_configs(Path(config.model_path), config.trust_remote_code)[0] | config.hf_overrides
    if settings_of(config.model_path, values) is not None:
        return "the checkpoint is quantised; serve the plain one, with the option quantization if need be"
    if runs_repository_code(values, config.trust_remote_code):
        return "transformers reads the weights of models with code of their own"
    if config.lora is not None:
        return "adapters that are in memory may be made of the present weights; start without enable_lora"
    if config.media:
        return (
            "what encodes pictures and sound is not read again; set limit_mm_per_prompt to 0 for each kind, and "
            "the model is served for text"
        )
    return None
