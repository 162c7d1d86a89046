"""Loads a model: reads the checkpoint, replaces modules by faster ones, and proves the result.

All models take this way, whether they generate, embed, classify or encode:

    configuration -> module without weights -> what it computes of a few requests -> network, or module with our
    attention -> the same of it, compared -> head, classifier and pooler
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagewire.ipc.host.heap import release_spare_memory
from pagewire.ipc.quantization import QUANTISED_LOAD_FORMATS, settings_of
from pagewire.ipc.wire.sources import SOUND, SourceInfo, num_filled_tokens
from pagewire.ipc.wire.worker_messages import Parallel, WorkerConfig
from pagewire.kernels.cpu.memory import forget_mapped_files
from pagewire.kernels.data.paging import KVScales
from pagewire.kernels.data.weight import UnpackedLinear
from pagewire.kernels.output import CappedOutput
from pagewire.workers.caches.sources import Features
from pagewire.workers.checkpoint.kv_scales import kv_scales
from pagewire.workers.checkpoint.replaced import check_unchanged
from pagewire.workers.device.interface import Device, KernelNeeds
from pagewire.workers.errors import DisprovenError, LoadError, first_line
from pagewire.workers.families.structures import OtherStructureError, require
from pagewire.workers.module import attention
from pagewire.workers.module.configuration import (
    check_kv_heads,
    end_of_sequence,
    has_experts,
    head_dims,
    indexed_latents,
    latent_sizes,
    load_config,
    log_code,
    log_dtype,
    num_decoder_layers,
    resolve_dtype,
    resolve_kv_dtype,
    state_layers,
)
from pagewire.workers.module.parallel_layers import fit_modules
from pagewire.workers.module.refusals import refuse
from pagewire.workers.module.shards import Shards
from pagewire.workers.module.stage_cut import check_cuts
from pagewire.workers.module.text_base import (
    base_path,
    position_offset,
    takes_more_than_text,
    without_picture_layers,
)
from pagewire.workers.module.transforms import LinearModule, short_length, tabulate_rotary
from pagewire.workers.module.weights import Weights
from pagewire.workers.network.build import build_network
from pagewire.workers.network.build_module import build_module
from pagewire.workers.network.encoder_decoder import EncoderDecoder
from pagewire.workers.network.encoder_layers import compile_layers
from pagewire.workers.network.expected import network_options, parts_on_meta, refuse_options, refusing_modules
from pagewire.workers.network.hybrids import HYBRIDS
from pagewire.workers.network.loaded import LoadedModel, Phases
from pagewire.workers.network.model import Head, Model, ModelBase
from pagewire.workers.network.module_base import (
    ModuleBase,
    ModuleHead,
    ModuleScores,
    arithmetic,
    linear_of,
)
from pagewire.workers.network.network import Network
from pagewire.workers.network.parts import module_bytes, transform_parts
from pagewire.workers.network.pooler import Pooler
from pagewire.workers.network.pooling_heads import load_dense, load_head
from pagewire.workers.network.pooling_info import max_length, max_prompt, module_class, pooling_info, spec_of
from pagewire.workers.network.pooling_spec import PoolingSpec
from pagewire.workers.network.proof import (
    MemoryShapes,
    check_config,
    check_scores,
    permitted_by,
    permitted_difference,
    prove,
)
from pagewire.workers.network.reference import DryRun, Expected
from pagewire.workers.network.sharded_state import ShardedState
from pagewire.workers.ranks.agreement import all_have, own_turn
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.ranks.shares import stage_layers
from pagewire.workers.ranks.single import shards_of
from pagewire.workers.ranks.stages import Stage
from pagewire.workers.seq2seq.lengths import check_served as check_seq2seq
from pagewire.workers.seq2seq.lengths import sound_features, source_info
from pagewire.workers.versions import name_attention

logger = logging.getLogger("pagewire.worker")

QUANTISING = (*QUANTISED_LOAD_FORMATS, "sharded_state")  # load formats that may bring quantised weights


@dataclass(frozen=True)
class ModelSettings:
    """What a model is to be, as far as its configuration says.

    spec: how it pools; None: it generates. scales: see `kv_scales`. max_len: tokens of a request; 0 for an encoder,
    whose module has its positions. source: of an encoder-decoder; None: it is another model. packed: weights may
    stay quantised.
    """

    config: Any
    spec: PoolingSpec | None
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scales: list[KVScales]
    max_len: int
    source: SourceInfo | None = None
    packed: bool = True

    @classmethod
    def of(cls, worker_config: WorkerConfig, device: Device) -> ModelSettings:
        """Those of a worker.

        Raises:
            LoadError: the model is not supported, or options contradict it; the text says why.
        """
        spec = spec_of(worker_config)
        config = load_config(worker_config)
        log_code(worker_config, config)
        check_config(config)
        dtype = resolve_dtype(worker_config, config)
        log_dtype(worker_config, config, dtype)
        kv_dtype = resolve_kv_dtype(worker_config.kv_cache_dtype, dtype, device)
        check_kv_heads(kv_dtype, config)
        packed = may_be_packed(worker_config, config)
        if spec is not None and spec.encoder:
            return cls(config, spec, dtype, kv_dtype, [], 0, packed=packed)
        if spec is None and takes_more_than_text(config) and not worker_config.media:
            logger.info(
                "%s is served for text only: pictures, videos and sound are not taken", config.model_type
            )
        is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
        if is_encoder_decoder:
            check_seq2seq(worker_config, config)
        scales = kv_scales(worker_config, kv_dtype, num_decoder_layers(config))
        if is_encoder_decoder:
            source = source_info(worker_config, config)
            max_len = (
                num_filled_tokens(source.max_tokens, worker_config.block_size) + source.max_target_tokens
            )
            return cls(config, spec, dtype, kv_dtype, scales, max_len, source, packed)
        max_len = max_length(worker_config, config, spec)
        return cls(config, spec, dtype, kv_dtype, scales, max_len, packed=packed)

    @property
    def encodes(self) -> bool:
        """True if tokens attend to later ones, too."""
        return self.spec is not None and self.spec.encoder

    @property
    def kernel_needs(self) -> KernelNeeds:
        """What the model asks of the kernels."""
        return KernelNeeds(
            self.dtype,
            self.kv_dtype,
            head_dims(self.config),
            encodes=self.encodes,
            recurrent=bool(state_layers(self.config)),
            mixture=has_experts(self.config),
            packed=self.packed,
            latents=latent_sizes(self.config),
            indexed=indexed_latents(self.config, self.max_len),
        )


@torch.inference_mode()
def load_model(
    worker_config: WorkerConfig, phases: Phases, device: Device, collective: Collective
) -> LoadedModel:
    """Load, transform and prove the model of `worker_config`, or this rank's part.

    All ranks call this together, since the proof needs their parts.

    Raises:
        LoadError: the model cannot be loaded or is not supported; the text says why.
    """
    import transformers.modeling_utils  # noqa: F401 - slow, so imported within this phase

    phases.end("import")
    settings = ModelSettings.of(worker_config, device)
    check_invariant(worker_config, device)
    config, spec, dtype = settings.config, settings.spec, settings.dtype
    if (options := network_options(worker_config)) and settings.source is None:
        with refusing_modules(config, options):
            parts_on_meta(worker_config)
    phases.end("config")
    parallel = worker_config.parallel
    stage = own_stage(parallel, collective, config, dtype, device)
    weights, saved = source_of_weights(worker_config, settings, device, collective, stage)
    device.prepare(settings.kernel_needs)
    module = weights.causal
    base = module.get_submodule(base_path(module))
    shards = weights.shards or own_shards(module, collective, parallel)
    phases.end("weights")
    if settings.encodes or position_offset(base):
        settings = replace(settings, max_len=max_prompt(worker_config, config, spec, base))
    hears = settings.source is not None and settings.source.kind == SOUND
    features = sound_features(worker_config, config)[0] if hears else None
    run, expected = reference(settings, weights, base, device, collective, saved, features)
    vocab_size = vocabulary_size(module, expected, spec)
    forget_mapped_files(worker_config.model_path)  # packing reads them again
    phases.end("reference")
    if shards is not None:
        weights.divide(shards)
    turn = partial(own_turn, collective, parallel)
    parts = Transformation(
        options, weights, spec, run, expected, settings.max_len, device, collective, stage, turn, features
    )
    model, shapes = parts.proven_model()
    if worker_config.batch_invariant and device.asynchronous:
        check_sums(model)
    num_bytes = weight_bytes(model, parts.scores)
    forget_mapped_files(worker_config.model_path)
    release_spare_memory()
    for note, count in weights.notes.items():
        logger.info("weights of %d products: %s", count, note)
    check_unchanged(worker_config.weights)
    phases.end("transform")
    return LoadedModel(
        model=model,
        architecture=type(module).__name__,
        dtype=dtype,
        vocab_size=vocab_size,
        max_model_len=settings.max_len,
        short_length=run.short_length,
        eos_token_id=end_of_sequence(config),
        kv_shapes=[replace(shape, dtype=settings.kv_dtype) for shape in shapes.kv],
        state_shapes=shapes.states,
        kv_scales=settings.scales,
        weight_bytes=num_bytes,
        pooler=None
        if spec is None
        else make_pooler(worker_config, settings, spec, base, parts.scores, device),
        source=settings.source,
        cuts={} if shards is None else shards.cuts,
    )


def source_of_weights(
    worker_config: WorkerConfig,
    settings: ModelSettings,
    device: Device,
    collective: Collective,
    stage: Stage | None,
) -> tuple[Weights, ShardedState | None]:
    """The weights of a model, which are read as they are needed, and the saved state that they come from, if any.

    Raises:
        LoadError: see `build_module` and `ShardedState`.
    """
    config, spec, dtype = settings.config, settings.spec, settings.dtype
    if spec is None and worker_config.load_format == "sharded_state":
        saved = ShardedState(worker_config, config, collective, stage)
        return saved.weights(dtype), saved
    kind = module_class(spec, settings.source)
    return build_module(worker_config, config, dtype, device, kind), None


def check_invariant(worker_config: WorkerConfig, device: Device) -> None:
    """Refuse options that make bits of a GPU's outputs depend on the batch. Those of a CPU never do.

    Raises:
        LoadError: names the option.
    """
    if not (worker_config.batch_invariant and device.asynchronous):
        return
    if worker_config.lora is not None:
        raise depends_on_batch("PyTorch may add adapters, and its sums depend on the batch (enable_lora)")
    if worker_config.parallel.num_shards > 1:
        raise depends_on_batch("NCCL's sums over several GPUs depend on the batch (tensor_parallel_size)")


def check_sums(model: Model) -> None:
    """Refuse a model with sums that PyTorch computes on a GPU, whose bits may depend on the batch.

    Raises:
        LoadError: names them.
    """
    if model.network is None:
        raise depends_on_batch(
            "layers of this model run as modules of transformers, whose sums may depend on it"
        )
    mixtures = ((layer.mixture, layer.dtype) for layer in model.network.stack.layers)
    if any(mixture is not None and mixture.router.linear.dtype != dtype for mixture, dtype in mixtures):
        raise depends_on_batch("its routers compute in float32, in which PyTorch's sums may depend on it")


def depends_on_batch(reason: str) -> LoadError:
    """The error for a model that cannot be batch-invariant on this device."""
    return LoadError(f"batch_invariant: {reason}; leave it out, or use device='cpu'")


def may_be_packed(worker_config: WorkerConfig, config: Any) -> bool:
    """True if weights may be quantised, in the checkpoint or while they are read."""
    quantises = worker_config.quantization is not None or worker_config.load_format in QUANTISING
    return quantises or settings_of(worker_config.model_path, vars(config)) is not None


def own_stage(
    parallel: Parallel, collective: Collective, config: Any, dtype: torch.dtype, device: Device
) -> Stage | None:
    """The stage of a rank in a pipeline; None if there is one stage only.

    Raises:
        LoadError: the layers cannot be divided so.
    """
    if parallel.stages == 1:
        return None
    text = config.get_text_config()
    check_cuts(config)
    layers = stage_layers(text.num_hidden_layers, parallel)
    return Stage(
        layers, parallel.stage, parallel.stages, collective, text.hidden_size, dtype, device.torch_device
    )


def own_shards(causal: Any, collective: Collective, parallel: Parallel) -> Shards | None:
    """The rank's part of each layer of its stage; None if it has whole layers.

    Raises:
        LoadError: the layers cannot be divided so.
    """
    return None if parallel.num_shards == 1 else Shards(causal, shards_of(collective, parallel))


def reference(
    settings: ModelSettings,
    weights: Weights,
    base: Any,
    device: Device,
    collective: Collective,
    saved: ShardedState | None,
    features: Features | None,
) -> tuple[DryRun, Expected]:
    """The requests by which a model is proven, and what its module makes of them before anything is replaced.

    Replaces rotary modules by tables afterwards. saved: the parts of ranks, which hold both already.

    Raises:
        LoadError: the module's forward pass fails, or it is not served in this way.
    """
    module = weights.causal
    if saved is not None:
        run, expected = saved.reference()
    else:
        check_served(module, settings, collective)
        run = dry_run(module.config, settings)
    num_positions = max(settings.max_len, run.end)
    if not settings.encodes:
        run = replace(run, short_length=short_length(module, num_positions))
    if saved is None:
        pools = settings.spec is not None
        expected = Expected.of(weights, run, device, collective, pools=pools, features=features)
    tabulate_rotary(module, num_positions, run.short_length)
    return run, expected


def dry_run(config: Any, settings: ModelSettings) -> DryRun:
    """The requests by which a model is proven."""
    if settings.source is not None:
        return DryRun.with_sources(config.vocab_size, settings.source, settings.max_len)
    if settings.encodes:
        return DryRun.whole(config.vocab_size, settings.max_len)
    return DryRun.make(config.get_text_config().vocab_size, settings.max_len)


def check_served(module: Any, settings: ModelSettings, collective: Collective) -> None:
    """Refuse an encoder that is a decoder here, and logits of several ranks that no output layer makes.

    Raises:
        LoadError: says which.
    """
    if settings.encodes and getattr(module.config, "is_decoder", False):
        raise refuse(module.config, "is_decoder is set: as a decoder it is not served")
    if settings.spec is None and collective.size > 1 and module.get_output_embeddings() is None:
        raise refuse(module.config, "it has no output layer that could be divided over several ranks")


def vocabulary_size(module: Any, expected: Expected, spec: PoolingSpec | None) -> int:
    """The number of a model's logits; that of its tokens, if it pools."""
    if spec is not None:
        return int(module.config.get_text_config().vocab_size)
    output = module.get_output_embeddings()
    return expected.results[0].shape[-1] if output is None else output.weight.shape[0]


def make_pooler(
    worker_config: WorkerConfig,
    settings: ModelSettings,
    spec: PoolingSpec,
    base: Any,
    scores: ModuleScores | None,
    device: Device,
) -> Pooler:
    """The pooler of a model. base: the original one. scores: its classifier, transformed.

    Raises:
        LoadError: files of what lies behind the pooling are missing or broken.
    """
    config, dtype, folder = settings.config, settings.dtype, Path(worker_config.model_path)
    size = config.get_text_config().hidden_size if spec.kind == "embed" else config.num_labels
    dense = load_dense(spec, dtype, device) or load_head(spec, folder, dtype, device)
    if dense:
        size = dense[-1].product.out_features
    info = pooling_info(spec, config, worker_config.pooler_config, base, size)
    # Adapters find the layers of a classifier by their names.
    is_short = device.torch_device.type == "cpu" and worker_config.lora is None
    classifier = scores.shortened() if scores is not None and is_short else scores
    return Pooler(replace(spec, dense=()), info, dense, classifier, dtype)


@dataclass
class Transformation:
    """Makes a model of a module, which it takes apart, and proves it.

    options: those that a network alone has, see `network_options`. weights, run, expected: the module's, and what
    it computes. stage: of a pipeline. turn: a context for packing, which takes memory. features: of an
    encoder-decoder that hears.

    scores: the classifier behind the base, which is proven with the model; None: there is none.
    """

    options: list[str]
    weights: Weights
    spec: PoolingSpec | None
    run: DryRun
    expected: Expected
    max_model_len: int
    device: Device
    collective: Collective
    stage: Stage | None
    turn: Callable[[], AbstractContextManager[None]]
    features: Features | None = None
    scores: ModuleScores | None = None
    _head: ModuleHead | None = None
    _coders: tuple[Any, Any] | None = None
    _why_module: str = ""
    _path: str = field(init=False)
    _base: Any = field(init=False)
    _dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        module = self.weights.causal
        self._path, self._dtype = base_path(module), module.dtype  # its logits may be of another one
        self._base = without_picture_layers(module.get_submodule(self._path))
        self._arithmetic = arithmetic(self.device.batch_invariant)
        attention.register()
        # Prompts of an encoder with attention of its own run one by one.
        self._packed = not self._encodes or replaces_attention(self._base)
        if self._packed:
            name_attention(module, attention.NAME)
        if getattr(self.weights.causal.config, "is_encoder_decoder", False):
            self._coders = self._base.encoder, self._base.decoder
        if self.spec is None:
            self._head = ModuleHead(module, self._arithmetic)
        elif self._base is not module and hasattr(module, module.base_model_prefix):
            self.scores = ModuleScores(module, self._base, self._arithmetic)

    @property
    def _encodes(self) -> bool:
        return self.spec is not None and self.spec.encoder

    @property
    def _is_last(self) -> bool:
        return self.stage is None or self.stage.is_last

    @property
    def _behind(self) -> Any:
        """The module of what is behind the base; None if there is nothing."""
        behind = self._head or self.scores
        return None if behind is None else behind.module

    def proven_model(self) -> tuple[Model, MemoryShapes]:
        """The model with a network, if that is possible, else with the module's own forward; and its shapes.

        Raises:
            LoadError: the proof fails.
        """
        parts = {} if self._behind is None else dict(self._behind.named_children())
        network = None
        with self._module_runs_after(LoadError), self.turn():
            network = self._network()
        # What one rank cannot pack, such as groups of columns that only its part cuts, none runs as a network.
        if all_have(network is not None, self.collective, self.device.torch_device):
            assert network is not None
            # An error of one rank alone ends the group, for others wait for what this one would send.
            with self._module_runs_after(LoadError if self.collective.size == 1 else DisprovenError):
                return self._proven(network)
        if self._coders is None:
            refuse_options(self.weights.causal.config, self.options, self._why_module)
        for name, child in parts.items():
            setattr(self._behind, name, child)
        with self.turn():
            base = self._module_base()
            self._transform_behind()
        return self._proven(base)

    @contextmanager
    def _module_runs_after(self, kind: type[LoadError]) -> Iterator[None]:
        """A context in which such an error, or another structure, is why the layers run as transformers' module."""
        try:
            yield
        except (kind, OtherStructureError) as error:
            self._why_module = first_line(error)
            logger.debug("the layers are no stack: %s", self._why_module)

    def _network(self) -> Network:
        """The network, with what is behind it transformed.

        Raises:
            OtherStructureError: the module has another structure.
            LoadError: a packed product is wrong.
        """
        device = self.device.torch_device
        require(self._coders is None, "an encoder-decoder is no single stack")
        if self.weights.shards is not None and self._base.config.model_type in HYBRIDS:
            fit_modules(self._base, self._path, self.weights.shards)
        network = build_network(self._base, self.weights, device, self.stage, encodes=self._encodes)
        self._transform_behind()
        return network

    def _module_base(self) -> ModelBase:
        """The base, transformed module by module."""
        if self._coders is not None:
            compile_layers(self._coders[0], self.weights, self.device.torch_device)
            for module in self._coders:
                transform_parts(module, self.weights, self.device.torch_device)
            return EncoderDecoder(*self._coders, self._arithmetic, self.features)
        transform_parts(self._base, self.weights, self.device.torch_device)
        return ModuleBase(
            self._base,
            self._arithmetic,
            encodes=self._encodes,
            packed=self._packed,
            why=self._why_module,
        )

    def _transform_behind(self) -> None:
        """Transform what makes logits or scores of hidden states; a stage before the last drops it."""
        if (behind := self._behind) is None:
            return
        if self._is_last:
            transform_parts(behind, self.weights, self.device.torch_device)
            return
        for name, _ in list(behind.named_children()):
            setattr(behind, name, nn.Identity())

    def _proven(self, base: ModelBase) -> tuple[Model, MemoryShapes]:
        """A model with this base, and the shapes of what its layers keep.

        Raises:
            LoadError: the proof fails.
        """
        device, config = self.device, self.weights.causal.config
        head: Head | None = None
        output = ""
        if self._head is not None and self._is_last:
            # From here on the ranks of a group wait for each other.
            head, output = self._head.shortened(device.torch_device, self._dtype)
        first = position_offset(self._base) if self._encodes else 0
        model = Model(base, head, self._path, output, self.stage, self._encodes, first)
        permitted = permitted_by(self.expected, permitted_difference(self._dtype, self.weights.schemes))
        shapes = prove(
            model,
            config,
            self.run,
            self.expected.results,
            permitted,
            self.max_model_len,
            device,
            self.collective,
        )
        if self.scores is not None:
            assert self.spec is not None
            check_scores(self.scores, self.spec, self.expected, permitted, device)
        return model, shapes


def replaces_attention(base: Any) -> bool:
    """True if transformers lets the attention of a base be replaced."""
    return bool(getattr(base, "_supports_sdpa", False) or getattr(base, "_supports_attention_backend", False))


def tied_bytes(model: Model) -> int:
    """Bytes of the dense output layer whose memory is that of the embedding; 0 if it has its own."""
    head, words = model.head, getattr(model.base.words, "weight", None)
    children = [] if not isinstance(head, ModuleHead) else head.module.children()
    head = head.linear if isinstance(head, CappedOutput) else head
    products = [head, *(child.product for child in children if isinstance(child, LinearModule))]
    dense = [product.weight for product in products if isinstance(product, UnpackedLinear)]
    return sum(x.nbytes for x in dense if words is not None and x.data_ptr() == words.data_ptr())


def weight_bytes(model: Model, scores: ModuleScores | None) -> int:
    """Bytes of all weights of a model and its classifier, including packed ones; memory of two counts once."""
    network, head = model.network, model.head
    modules: list[nn.Module] = list(model.base.tables)
    total = (0 if network is None else network.num_bytes) - tied_bytes(model)
    if isinstance(head, ModuleHead):
        modules.append(head.module)
    elif (linear := linear_of(head)) is not None:
        total += linear.num_bytes
    if scores is not None:
        modules.append(scores.module)
    return total + module_bytes(modules)
