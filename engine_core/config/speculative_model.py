"""The drafter's model: where its files are, what kind it is, and how many tokens it proposes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pagewire.ipc.counts import check_counts
from pagewire.ipc.files.hub import model_folder
from pagewire.ipc.files.model_configs import read_configs
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.speculative import DEFAULT_DRAFTS, MAX_DRAFTS, SpeculativeConfig, draft_method

# Where a checkpoint says how many tokens it proposes at a time, by method: the first name, or those after it.
NUM_DRAFTS_KEYS = {
    "mlp_speculator": ("n_predict",),
    "mtp": ("num_nextn_predict_layers", "num_mtp_layers"),  # transformers 5 writes the second
}


def resolve_speculation(args: EngineArgs, served: Mapping[str, Any]) -> SpeculativeConfig | None:
    """The options of speculation with the folder and the kind of the drafter's model, which is downloaded.

    served: the content of config.json of the model that is served.

    Raises:
        ValueError: a bad option, a checkpoint that is not a model by itself, or one whose config.json does not give
            the number of tokens to propose.
        ModelNotFoundError: no such model.
    """
    config = args.resolved_speculation()
    if config is None or config.in_core:
        return config
    own = served
    if config.model is not None:
        path = model_folder(
            config.model,
            revision=config.revision,
            token=args.hf_token,
            cache_dir=args.download_dir,
            ignore_patterns=args.ignore_patterns,
        )
        own, _ = read_configs(path, args.trust_remote_code)
        check_counts(own)
        config = msgspec.structs.replace(config, model=str(path))
    if config.method == "auto":
        config = msgspec.structs.replace(config, method=draft_method(own))
        if config.method == "mtp":
            raise ValueError(
                f"{config.model} holds multi-token-prediction layers alone, which are not served: with the method "
                "'mtp', and without a model, those in the checkpoint of the model that is served are"
            )
    if config.num_speculative_tokens:
        return config
    return msgspec.structs.replace(config, num_speculative_tokens=num_drafts(config, own))


def num_drafts(config: SpeculativeConfig, own: Mapping[str, Any]) -> int:
    """The number of tokens to propose at a time where the options give none. own: the drafter's config.json.

    Raises:
        ValueError: its config.json does not give it either.
    """
    if config.method in DEFAULT_DRAFTS:
        return DEFAULT_DRAFTS[config.method]
    keys = NUM_DRAFTS_KEYS[config.method]
    key = next((key for key in keys if key in own), keys[0])
    number = own.get(key)
    if not isinstance(number, int) or not 1 <= number <= MAX_DRAFTS:
        raise ValueError(
            f"speculative method {config.method!r}: config.json has no {key} in [1, {MAX_DRAFTS}], the number of "
            "tokens to propose; give num_speculative_tokens"
        )
    return number
