"""A Hugging Face causal language model: its configuration, and its halves, hidden states and logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.ipc.counts import check_counts
from pagewire.ipc.environment import env_flag
from pagewire.ipc.gguf.file import is_gguf
from pagewire.ipc.hub import read_configs
from pagewire.ipc.worker_messages import WorkerConfig
from pagewire.kernels.deltas import AdapterRows
from pagewire.kernels.kv_codes import DTYPE as KV_CODES
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError
from pagewire.workers.model.attention import RowsContext, StepContext
from pagewire.workers.model.invariant import Invariant
from pagewire.workers.model.overlay import embedding_size, laid_over
from pagewire.workers.model.stack import DecoderStack
from pagewire.workers.model.stage_cut import CutBase
from pagewire.workers.model.stages import Stage
from pagewire.workers.model.text_base import base_path, without_picture_layers
from pagewire.workers.model.transforms import LinearModule

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
KV_DTYPES = {
    "int8": KV_CODES,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def load_config(worker_config: WorkerConfig) -> Any:
    """The model's transformers configuration, built with `hf_overrides` merged in.

    Raises:
        LoadError: no config.json or GGUF file, an unknown model type, or one that is not a causal language model.
    """
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    is_file = is_gguf(worker_config.model_path)
    if not is_file and not (Path(worker_config.model_path) / "config.json").is_file():
        raise LoadError(f"{worker_config.model_path} holds no config.json: not a Hugging Face model folder")
    try:
        values = read_configs(Path(worker_config.model_path))[0] | worker_config.hf_overrides
        check_counts(values)
        if is_file:
            return CONFIG_MAPPING[values["model_type"]].from_dict(values)
        values = PretrainedConfig.get_config_dict(worker_config.model_path)[0] | worker_config.hf_overrides
        kind = values.get("model_type")
        if kind in CONFIG_MAPPING and not (worker_config.trust_remote_code and "auto_map" in values):
            return CONFIG_MAPPING[kind].from_dict(values)
        return AutoConfig.from_pretrained(
            worker_config.model_path,
            trust_remote_code=worker_config.trust_remote_code,
            **worker_config.hf_overrides,
        )
    except Exception as error:
        source = "the metadata" if is_file else "config.json"
        raise LoadError(f"{source} of {worker_config.model_path} cannot be used: {error}") from error


def checkpoint_dtype(config: Any) -> torch.dtype:
    """The dtype given in the checkpoint's configuration; float32 if there is none."""
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return DTYPES.get(str(dtype).removeprefix("torch."), torch.float32)


def resolve_dtype(name: str, config: Any) -> torch.dtype:
    """The dtype of weights and activations.

    Raises:
        LoadError: an unknown name.
    """
    if name == "auto":
        return checkpoint_dtype(config)
    if name not in DTYPES:
        raise LoadError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def resolve_kv_dtype(name: str, dtype: torch.dtype, device: Device) -> torch.dtype:
    """The dtype of the KV cache of a model of `dtype`.

    Raises:
        LoadError: an unknown name, or a dtype that the device does not support.
    """
    if name != "auto" and name not in KV_DTYPES:
        raise LoadError(f"kv_cache_dtype must be one of auto, {', '.join(KV_DTYPES)}, got {name!r}")
    kv_dtype = KV_DTYPES.get(name, dtype)
    if kv_dtype in device.kv_dtypes(dtype):
        return kv_dtype
    if kv_dtype == KV_CODES:
        raise LoadError(f"kv_cache_dtype 'int8' is for CPUs, not for {device.name}: 'fp8' has 8 bits there")
    instead = ": 'int8' has 8 bits there" if KV_CODES in device.kv_dtypes(dtype) else ""
    raise LoadError(
        f"kv_cache_dtype {name!r} needs a model in bfloat16 or float16 on a GPU, "
        f"not {dtype} on {device.name}{instead}"
    )


def resolve_max_model_len(requested: int | None, config: Any) -> int:
    """Maximum tokens of a request: `requested`, or else the model's own limit (2048 if it has none).

    Raises:
        LoadError: `requested` exceeds the model's limit, unless `PAGEWIRE_ALLOW_LONG_MAX_MODEL_LEN=1`.
    """
    text = config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
    model_limit = next(
        (n for name in names if isinstance(n := getattr(text, name, None), int) and n > 0), None
    )
    if requested is None:
        return model_limit or 2048
    if (
        model_limit is not None
        and requested > model_limit
        and not env_flag("PAGEWIRE_ALLOW_LONG_MAX_MODEL_LEN")
    ):
        raise LoadError(
            f"max_model_len {requested} exceeds the model's limit of {model_limit} positions; "
            "PAGEWIRE_ALLOW_LONG_MAX_MODEL_LEN=1 allows it"
        )
    return requested


class Model:
    """A causal language model in two halves: tokens to hidden states, and hidden states to logits.

    The second half is the causal module with its base replaced by a stub that passes hidden states through. So the
    module's own treatment of logits (scaling, soft caps) is kept.

    base, base_path: that of texts, and its name in the causal module.
    guarded: the base runs transformers' code, which must be made batch-invariant with `Invariant`.
    head: the output layer, where it is all of the second half.
    stage: the part of a pipeline that it is; None: it is whole. cut: of transformers' base, if it runs as a stage.
    """

    def __init__(self, causal: Any, batch_invariant: bool, stage: Stage | None = None) -> None:
        self.config = causal.config
        self.arithmetic = Invariant if batch_invariant else nullcontext
        self.base_path = base_path(causal)
        self.base: nn.Module = without_picture_layers(causal.get_submodule(self.base_path))
        self.causal = causal
        self.guarded = False
        self.head: Callable[[Tensor], Tensor] | None = None
        self.stage = stage
        self.cut: CutBase | None = None
        setattr(causal, causal.base_model_prefix, BaseStub())

    @property
    def makes_logits(self) -> bool:
        """False for a stage before the last."""
        return self.stage is None or self.stage.is_last

    def received(self, num_tokens: int) -> Tensor | None:
        """The hidden states [T, H] that the stage before has made of a step; None where the model begins.

        It waits for them.
        """
        return None if self.stage is None else self.stage.receive(num_tokens)

    def hidden_states(self, input_ids: Tensor, step: StepContext, received: Tensor | None = None) -> Tensor:
        """Final hidden states [T, H] of the tokens int64 [T] of a step; or those that go to the next stage.

        received: what `received` has returned for this step.
        """
        overlay = step.overlay if self.stage is None or self.stage.is_first else None
        with step, laid_over(self.base, overlay):
            states = self._base_states(input_ids, step, received)
            if self.stage is not None:  # the next stage waits, also where embeddings turn out not to be taken
                self.stage.send(states)
        return states

    def _base_states(self, input_ids: Tensor, step: StepContext, received: Tensor | None) -> Tensor:
        if isinstance(self.base, DecoderStack):
            return self.base(input_ids, step, received)  # type: ignore[no-any-return]

        def forward() -> Any:
            return self.base(input_ids=input_ids[None], position_ids=step.positions[None], use_cache=False)

        with self.arithmetic() if self.guarded else nullcontext():
            if self.cut is None:
                return forward()[0][0]  # type: ignore[no-any-return]
            return self.cut.run(forward, received)

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding that may take the place of a token's; 0: none may."""
        return embedding_size(self.base)

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Logits [n, V] of hidden states [n, H].

        adapters: those of the n rows. Where they bring tokens, there are as many logits more, which are -inf in
        rows without these tokens.
        """
        if adapters is None:
            return self._whole_logits(hidden) if self.head is None else self.head(hidden)
        with RowsContext(adapters):
            logits = self._whole_logits(hidden) if self.head is None else self.head(hidden)
        adapters.close(logits)
        return logits

    def shorten_logits(self) -> None:
        """Call the output layer alone where its product is all that the causal module does, to the bit.

        That is tried on states of all sizes, since a cap leaves small logits nearly alone, and a limit all of them.
        """
        linears = [child for child in self.causal.children() if isinstance(child, LinearModule)]
        if len(linears) != 1:
            return
        (linear,) = linears
        sizes = torch.logspace(-2, 4, 7)[:, None]
        states = sizes * torch.randn(
            len(sizes), linear.in_features, generator=torch.Generator().manual_seed(0)
        )
        own = next(chain(self.base.parameters(), self.base.buffers()))
        hidden = states.to(own.device, linear.weight.dtype)
        expected, short = self._whole_logits(hidden), linear.product(hidden)
        if short.dtype == expected.dtype and torch.equal(short, expected):
            self.head = linear.product

    def _whole_logits(self, hidden: Tensor) -> Tensor:
        with self.arithmetic():
            return self.causal(inputs_embeds=hidden[None], use_cache=False).logits[0]  # type: ignore[no-any-return]


class BaseStub(nn.Module):
    """Stands in for a base model, and returns the hidden states that it is given."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BaseStubOutput:
        """`inputs_embeds` in the form of a base model's output."""
        return BaseStubOutput((inputs_embeds,))

    @property
    def decoder(self) -> BaseStub:
        """This stub: some causal modules call their base's decoder directly."""
        return self


class BaseStubOutput(tuple[Tensor]):
    """A base model's output with hidden states only."""

    @property
    def last_hidden_state(self) -> Tensor:
        """Hidden states [1, T, H]."""
        return self[0]

    def __getattr__(self, name: str) -> None:
        """None for all other outputs: caches, attentions, router logits."""
        if name.startswith("__"):
            raise AttributeError(name)
