"""Opens the drafter that the configuration names."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import msgspec

from pagewire.ipc.files.model_configs import read_configs
from pagewire.ipc.speculative import SpeculativeConfig
from pagewire.ipc.wire.worker_messages import Parallel, WorkerConfig
from pagewire.workers.batch.slots import Slots
from pagewire.workers.device.interface import Device, TokenSampler
from pagewire.workers.errors import LoadError
from pagewire.workers.estimate.dimensions import Dimensions
from pagewire.workers.network.loaded import LoadedModel, Phases
from pagewire.workers.ranks.agreement import own_turn
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.speculation.draft_model import DraftModel
from pagewire.workers.speculation.eagle3 import Eagle3
from pagewire.workers.speculation.interface import Drafter
from pagewire.workers.speculation.mlp_speculator import MlpSpeculator
from pagewire.workers.speculation.mtp import Mtp
from pagewire.workers.speculation.ranks import over_ranks
from pagewire.workers.speculation.state_drafter import StateDrafter
from pagewire.workers.speculation.vocabulary import MAX_SHARE, share_of_others

logger = logging.getLogger("pagewire.worker")

WITHOUT_MODEL = "; the methods 'ngram' and 'suffix' need no model and work with any"
SERVED = ("draft_model", "mlp_speculator", "eagle3", "mtp")


def open_drafter(
    config: WorkerConfig,
    target: LoadedModel,
    slots: Slots,
    phases: Phases,
    device: Device,
    sampler: TokenSampler,
    collective: Collective,
) -> Drafter:
    """The drafter that the configuration has in the worker, for a model that is loaded.

    slots, sampler: of the model. collective: of the ranks that run it.

    Raises:
        LoadError: it cannot be loaded, does not fit the model, or is not served; the text says why.
    """
    speculative = config.speculative
    assert speculative is not None, "the configuration names a drafter"
    check_target(speculative, target, config.parallel.stages)
    path, num_drafts = speculative.model, speculative.num_speculative_tokens
    quantization = speculative.quantization
    shared = (slots, device, sampler)

    def make(ranks: Collective) -> Drafter:
        """The drafter, divided over these ranks."""
        if speculative.method == "mtp":
            return StateDrafter(Mtp(config, target, device, ranks), config, num_drafts, *shared)
        if path is None:
            raise LoadError(f"the speculative method {speculative.method!r} needs a model{WITHOUT_MODEL}")
        if speculative.method == "mlp_speculator":
            speculator = MlpSpeculator(path, quantization, slots, target, device, sampler, ranks)
            check_mlp(speculator, speculative, config)
            return speculator
        if speculative.method == "eagle3":
            head = Eagle3(config, target, path, quantization, device, ranks)
            return StateDrafter(head, config, num_drafts, *shared)
        own = draft_config(config, speculative, path, target)
        if ranks.size == collective.size:
            return DraftModel(own, target, num_drafts, *shared, ranks)
        turn = partial(own_turn, collective, config.parallel)
        own = msgspec.structs.replace(own, parallel=Parallel())
        return DraftModel(own, target, num_drafts, *shared, ranks, turn)

    drafter = over_ranks(speculative.draft_tensor_parallel_size, collective, make)
    phases.end("drafter")
    logger.info("drafts come from %s (%s)", drafter.name, path or config.model_path)
    return drafter


def check_target(speculative: SpeculativeConfig, target: LoadedModel, num_stages: int) -> None:
    """Check that the worker serves the drafter's method, and that the model can be drafted for.

    num_stages: of the pipeline that runs the model.

    Raises:
        LoadError: it cannot be drafted for; the text says why, and what works instead.
    """
    method = speculative.method
    if method not in SERVED:
        raise LoadError(f"the worker knows no speculative method {method!r}{WITHOUT_MODEL}")
    if target.pooler is not None:
        raise LoadError(
            f"the speculative method {method!r} is for models that generate, and {target.architecture} pools: "
            "leave the speculative options out"
        )
    if num_stages > 1:
        raise LoadError(
            f"the speculative method {method!r} needs pipeline_parallel_size 1, not {num_stages}{WITHOUT_MODEL}"
        )


def draft_config(
    config: WorkerConfig, speculative: SpeculativeConfig, path: str, target: LoadedModel
) -> WorkerConfig:
    """The configuration of a draft model, in the model's dtype and up to its length, or as long as it can.

    Raises:
        LoadError: it has another vocabulary, or its configuration cannot be read.
    """
    try:
        sizes = Dimensions.of(read_configs(Path(path), config.trust_remote_code)[0], ())
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise LoadError(f"the configuration of the draft model {path} cannot be used: {error}") from error
    if sizes.vocab_size and sizes.vocab_size != target.vocab_size:
        raise LoadError(
            f"the draft model {path} has a vocabulary of {sizes.vocab_size} tokens, and the model one of "
            f"{target.vocab_size}: a draft model must have the model's vocabulary{WITHOUT_MODEL}"
        )
    if (share := share_of_others(config.model_path, path)) > MAX_SHARE:
        raise LoadError(
            f"in the draft model {path}, {share:.0%} of the token ids stand for other tokens than in the model: a "
            f"draft model must have the model's vocabulary{WITHOUT_MODEL}"
        )
    lengths = (target.max_model_len, sizes.max_positions, speculative.max_model_len or target.max_model_len)
    return msgspec.structs.replace(
        config,
        model_path=path,
        dtype=str(target.dtype).removeprefix("torch."),
        quantization=speculative.quantization,
        load_format="auto",
        hf_overrides={},
        max_model_len=min(lengths),
        kv_scales=[],
        runner="generate",
        convert="auto",
        pooler_config=None,
        speculative=None,
        lora=None,
        media=False,
        weights=[],
    )


def check_mlp(drafter: MlpSpeculator, speculative: SpeculativeConfig, config: WorkerConfig) -> None:
    """Refuse an MLP speculator of another model, or for more drafts than it makes.

    Raises:
        LoadError: says why.
    """
    settings = drafter.settings
    values = read_configs(Path(config.model_path), config.trust_remote_code)[0] | config.hf_overrides
    hidden_size = Dimensions.of(values, ()).hidden_size
    if hidden_size and hidden_size != settings.emb_dim:
        raise LoadError(
            f"the MLP speculator {speculative.model} is for hidden states of {settings.emb_dim} numbers, and those "
            f"of the model have {hidden_size}: it was made for another model"
        )
    if speculative.num_speculative_tokens > settings.n_predict:
        raise LoadError(
            f"num_speculative_tokens is {speculative.num_speculative_tokens}, but the MLP speculator "
            f"{speculative.model} predicts {settings.n_predict} tokens"
        )
