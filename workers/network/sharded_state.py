"""A model as the parts of its ranks: each rank's weights are in files of its own; its next start reads no others.

The files of a rank are safetensors. A matrix is stored as it is to be packed, under its name in the module:
quantised ones as their parts, and stacks of experts one by one. The manifest of a rank says what its matrices are.
`REFERENCE` has the logits of the whole model's dry run, with which every start compares its own (`proof.py`).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.data.integers import Integers
from pagewire.kernels.data.weight import DENSE, Weight, dense_weight
from pagewire.workers.checkpoint.source import Checkpoint
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError, first_line
from pagewire.workers.module.configuration import load_config, resolve_dtype
from pagewire.workers.module.matrices import is_linear, is_stack
from pagewire.workers.module.shards import Shards
from pagewire.workers.module.stage_cut import cut_down
from pagewire.workers.module.weights import CheckpointWeights, Weights, tied_names
from pagewire.workers.network.build_module import build_module, module_on_meta
from pagewire.workers.network.reference import DryRun, Expected, reference_logits
from pagewire.workers.ranks.cut import Cut
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.ranks.single import shards_of
from pagewire.workers.ranks.stages import Stage

logger = logging.getLogger("pagewire.worker")

MANIFEST, REFERENCE = "sharded_state-{rank}-of-{size}.json", "sharded_state-reference.safetensors"
PATTERN = "model-rank-{rank}-part-{part}.safetensors"
NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
PARTS = ("codes", "scales", "offsets")


class Manifest(msgspec.Struct):
    """The files of a rank, and what they hold.

    dtype: of products' inputs and outputs. quantization: the option with which the model was loaded.
    files: names in the same folder. schemes: of quantised matrices, by name. stacks: numbers of matrices, by name.
    offsets: positions of the first tokens of the dry run's requests.
    stages: of the pipeline. layers: the first layer of the rank's stage and the one behind its last; empty for all.
    """

    dtype: str
    quantization: str | None
    offsets: list[int]
    files: list[str] = []
    schemes: dict[str, Integers] = {}
    stacks: dict[str, int] = {}
    format: int = 1
    stages: int = 1
    layers: list[int] = []


def allowed_folder(path: str, allowed: str) -> Path:
    """Return the folder that a path names, without symbolic links. allowed: `WorkerConfig.allowed_save_path`.

    Raises:
        PermissionError: it is not below the allowed one, or has links in it, through which files would be written.
    """
    if not allowed:
        raise PermissionError(
            "save_sharded_state may write nowhere: start the core with "
            "--allowed-save-path FOLDER, and it may write below that folder"
        )
    folder, root = Path(path).resolve(), Path(allowed).resolve()
    if not folder.is_relative_to(root):
        raise PermissionError(f"{quoted(path)} is not below {allowed}, the core's --allowed-save-path")
    if folder.is_dir() and any(child.is_symlink() for child in folder.iterdir()):
        raise PermissionError(f"{quoted(path)} has symbolic links in it: save to a folder of its own")
    return folder


def save_sharded_state(
    config: WorkerConfig,
    device: Device,
    collective: Collective,
    max_model_len: int,
    folder: Path,
    pattern: str = PATTERN,
    max_bytes: int = 1 << 30,
    stage: Stage | None = None,
) -> None:
    """Write this rank's part of the model that `config` names; rank 0 also writes what all ranks need.

    stage: of a pipeline that this rank is in.

    The checkpoint is read anew, a weight at a time. A file has at most `max_bytes` or one tensor, and is in memory
    while it is written.

    Raises:
        ValueError: the pattern names no file for each rank and part, the model is no folder of safetensors files,
            or the folder holds this rank's part of a model already.
    """
    source = Path(config.model_path)
    if not source.is_dir() or config.load_format == "sharded_state":
        raise ValueError(f"{source} is no checkpoint of safetensors files that could be divided and saved")
    names = {pattern.replace("{rank}", r).replace("{part}", p) for r in "01" for p in "01"}
    if len(names) < 4 or any(Path(name).name != name or not name.endswith(".safetensors") for name in names):
        raise ValueError(f"a pattern such as {PATTERN!r} expected, got {pattern!r}")
    manifest_path = folder / MANIFEST.format(rank=collective.rank, size=collective.size)
    folder.mkdir(parents=True, exist_ok=True)
    if manifest_path.exists():
        raise ValueError(f"{manifest_path} exists: save to a folder of its own")
    model_config = load_config(config)
    dtype = resolve_dtype(config, model_config)
    weights = build_module(config, model_config, dtype, device, integers_only=True)
    run = DryRun.make(model_config.get_text_config().vocab_size, max_model_len)
    manifest = Manifest(str(dtype).removeprefix("torch."), config.quantization, run.offsets)
    manifest.stages, manifest.layers = config.parallel.stages, ends(stage)
    if collective.rank == 0:
        _write_reference(weights, run, folder / REFERENCE)
        _copy_others(source, folder)
    shards = shards_of(collective, config.parallel)
    if shards.size > 1:
        weights.divide(Shards(weights.causal, shards))
    _write(
        _stored(weights, manifest, stage),
        manifest,
        folder,
        pattern.replace("{rank}", str(collective.rank)),
        max_bytes,
    )
    manifest_path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def _write_reference(weights: Weights, run: DryRun, path: Path) -> None:
    from safetensors.torch import save_file

    logits, echoes = reference_logits(weights, run)
    tensors = {f"logits.{i}": own.contiguous() for i, own in enumerate(logits)}
    tensors |= {f"echoes.{i}": own.contiguous() for i, own in enumerate(echoes)}
    save_file(tensors | {f"token_ids.{i}": ids for i, ids in enumerate(run.token_ids)}, path)


def _copy_others(source: Path, folder: Path) -> None:
    """Copy configuration, tokenizer and the like."""
    for child in source.iterdir():
        if child.is_file() and child.suffix not in NOT_COPIED and not child.name.endswith(".index.json"):
            shutil.copyfile(child, folder / child.name)


def ends(stage: Stage | None) -> list[int]:
    """`Manifest.layers` of a stage."""
    return [] if stage is None else [stage.layers.start, stage.layers.stop]


def _stored(weights: Weights, manifest: Manifest, stage: Stage | None) -> Iterator[tuple[str, Tensor]]:
    """All tensors of this rank's part, one by one; fills in the manifest.

    stage: to which the module is cut down.
    """
    causal = weights.causal
    tied = tied_names(causal)
    if stage is not None:
        cut_down(causal, stage)
    modules: dict[str, Any] = dict(causal.named_modules())
    names = causal.state_dict().keys()
    for place in names:
        name = tied.get(place, place)
        owner, _, leaf = place.rpartition(".")
        module = modules[owner]
        if name != place and name in names:
            continue
        if is_stack(module, leaf):
            count = 0
            for count, matrix in enumerate(weights.stacked(module, leaf), 1):
                yield from _tensors(f"{name}.{count - 1}", matrix, manifest)
            manifest.stacks[name] = count
        elif leaf == "weight" and (is_linear(module) or isinstance(module, nn.Embedding)):
            yield from _tensors(name, weights.matrix(module), manifest)
        elif (tensor := weights.part(module, leaf)) is not None:
            yield name, tensor
        weights.let_go()


def _tensors(name: str, weight: Weight, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    if weight.scheme is DENSE:
        yield name, weight.dense()
        return
    assert isinstance(weight.scheme, Integers)
    manifest.schemes[name] = weight.scheme
    for kind, part in zip(PARTS, weight.parts, strict=False):
        yield f"{name}.{kind}", part


def _write(
    tensors: Iterator[tuple[str, Tensor]], manifest: Manifest, folder: Path, pattern: str, max_bytes: int
) -> None:
    """Write tensors into files of at most `max_bytes`, or of one tensor, and note their names."""
    from safetensors.torch import save_file

    part: dict[str, Tensor] = {}

    def flush() -> None:
        name = pattern.replace("{part}", str(len(manifest.files)))
        save_file(part, folder / name, {"format": "pt"})
        manifest.files.append(name)
        part.clear()

    for name, tensor in tensors:
        if part and sum(held.nbytes for held in part.values()) + tensor.nbytes > max_bytes:
            flush()
        part[name] = tensor.clone(memory_format=torch.contiguous_format)
    flush()


class ShardedState:
    """A rank's part of a model as `save_sharded_state` has written it."""

    def __init__(
        self, config: WorkerConfig, model_config: Any, collective: Collective, stage: Stage | None = None
    ) -> None:
        """Read the rank's manifest. stage: of a pipeline that this rank is in.

        Raises:
            LoadError: the folder holds no such model, one for another number of ranks, or one with other options.
        """
        self._folder = Path(config.model_path)
        path = self._folder / MANIFEST.format(rank=collective.rank, size=collective.size)
        if not path.is_file():
            sizes = sorted(
                {int(p.stem.rpartition("-")[2]) for p in self._folder.glob("sharded_state-*-of-*.json")}
            )
            others = f"of {', '.join(map(str, sizes))} ranks" if sizes else "of none"
            raise LoadError(
                f"{self._folder} holds no part for rank {collective.rank} of {collective.size}, but parts "
                f"{others}: load_format='sharded_state' takes what as many ranks have written"
            )
        try:
            self.manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except (msgspec.DecodeError, OSError) as error:
            raise LoadError(f"cannot load {path}: {first_line(error)}") from error
        for name in self.manifest.files:
            if Path(name).name != name:
                raise LoadError(f"cannot load {path}: {name!r} is not the name of a file in its folder")
        dtype = str(resolve_dtype(config, model_config)).removeprefix("torch.")
        saved = self.manifest.quantization
        self._check("dtype", dtype, self.manifest.dtype)
        self._check("quantization", config.quantization or saved, saved)
        self._check("pipeline_parallel_size", config.parallel.stages, self.manifest.stages)
        if self.manifest.layers != ends(stage):
            raise LoadError(
                f"{self._folder} was saved with other layers in the stage of rank {collective.rank}: set "
                "PAGEWIRE_PP_LAYER_PARTITION as it was, or save it anew"
            )
        self._config, self._model_config = config, model_config
        self._shards, self._stage = shards_of(collective, config.parallel), stage

    def _check(self, option: str, own: object, saved: object) -> None:
        if own != saved:
            raise LoadError(f"{self._folder} was saved with {option}={saved!r}, not {own!r}: save it anew")

    def weights(self, dtype: torch.dtype) -> ShardedWeights:
        """The module on the meta device, and this rank's weights.

        Raises:
            LoadError: files are missing or broken, or hold another model.
        """
        vars(self._model_config).pop("quantization_config", None)
        causal = own = module_on_meta(self._config, self._model_config, dtype)
        shards = Shards(causal, self._shards) if self._shards.size > 1 else None
        if self._stage is not None:
            cut_down(own := module_on_meta(self._config, self._model_config, dtype), self._stage)
        source = Checkpoint(self._folder, [self._folder / name for name in self.manifest.files])
        return ShardedWeights(causal, source, self.manifest, shards, own.state_dict().keys())

    def reference(self) -> tuple[DryRun, Expected]:
        """The dry run with which the model was saved, and the logits that the whole model had in it.

        Raises:
            LoadError: they are missing or broken.
        """
        source = Checkpoint(self._folder, [self._folder / REFERENCE])
        requests = range(len(self.manifest.offsets))
        token_ids = [source.read(f"token_ids.{i}").clone() for i in requests]
        run = DryRun(token_ids, self.manifest.offsets)
        logits = [source.read(f"logits.{i}").clone() for i in requests]
        echoes = [source.read(name).clone() for name in sorted(source.names) if name.startswith("echoes.")]
        return run, Expected(logits, [], echoes)


class ShardedWeights(CheckpointWeights):
    """This rank's part of a module's weights, from files that hold nothing else."""

    def __init__(
        self,
        causal: Any,
        source: Checkpoint,
        manifest: Manifest,
        shards: Shards | None,
        own_names: Iterable[str],
    ) -> None:
        """Find the tensors of each weight, and make the buffers that no checkpoint holds.

        own_names: the weights of this rank's stage.

        Raises:
            LoadError: weights are missing.
        """
        Weights.__init__(self, causal)
        self.shards = shards
        self._source: Checkpoint = source
        self._manifest = manifest
        self._ties = tied_names(causal)
        stored = set(source.names) | manifest.stacks.keys() | manifest.schemes.keys()
        without_part = (
            set() if shards is None else {n for n, cut in shards.cuts.items() if cut.is_added_elsewhere}
        )
        own = {self._ties.get(name, name) for name in own_names}
        if missing := own - stored - without_part:
            raise LoadError(f"the saved parts lack {len(missing)} weights, such as {min(missing)}")
        self._initialize(set())

    def _read(self, module: nn.Module, name: str) -> Tensor | None:
        own = getattr(module, name)
        if own is None or own.device.type != "meta":
            return Weights._read(self, module, name)
        full = self._stored_name(module, name)
        return self._source.read(full) if full in self._source.names else None

    def _matrix(self, module: nn.Module) -> Weight:
        dtype: torch.dtype = module.weight.dtype  # type: ignore[assignment]
        return self._weight(self._stored_name(module, "weight"), dtype)

    def _stacked(self, module: nn.Module, name: str) -> Iterator[Weight]:
        full = self._stored_name(module, name)
        for index in range(self._manifest.stacks[full]):
            yield self._weight(f"{full}.{index}", getattr(module, name).dtype)

    def _weight(self, name: str, dtype: torch.dtype) -> Weight:
        if (scheme := self._manifest.schemes.get(name)) is None:
            return dense_weight(self._source.read(name), dtype)
        codes, *others = (
            self._source.read(f"{name}.{kind}") for kind in PARTS if f"{name}.{kind}" in self._source.names
        )
        shape = len(codes), codes.shape[1] * scheme.per_byte
        return Weight(scheme, (codes, *others), shape, dtype)

    def _part(self, matrix: Weight, name: str | None, cut: Cut | None) -> Weight:
        return matrix

    def part(self, module: nn.Module, name: str) -> Tensor | None:
        """See `Weights.part`."""
        return self.read(module, name)

    def _stored_name(self, module: nn.Module, name: str) -> str:
        full = self._full(module, name)
        return self._ties.get(full, full)
