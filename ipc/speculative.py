"""Speculative decoding: which drafter proposes tokens, how many, and when; the options under both of their names.

`speculative_config` has the names of vLLM's dict. The flags `speculative_model`, `num_speculative_tokens`,
`ngram_prompt_lookup_max` and so on say the same, one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from pagewire.ipc.bounds import unknown_name
from pagewire.ipc.compatibility import OPTIONS, refuse_value, settle
from pagewire.ipc.quantization import quantization_name

Method: TypeAlias = Literal["auto", "ngram", "suffix", "draft_model", "mlp_speculator", "eagle3", "mtp"]
Acceptance: TypeAlias = Literal["rejection_sampler", "typical_acceptance_sampler"]
NGRAM = "[ngram]"  # as `speculative_model`: the method "ngram"
CORE_METHODS = ("ngram", "suffix")
"""Methods whose drafts the core finds in text that it knows; the others run a model in the worker."""
MAX_DRAFTS = 128
MAX_LOOKUP = 64
DEFAULT_DRAFTS = {"ngram": 16, "suffix": 32, "draft_model": 5, "eagle3": 5}
"""Drafts at most in a step, by method; of the other methods it is what the checkpoint's config.json says."""
DEFAULT_LOOKUP = (2, 5)
TYPICAL: Acceptance = "typical_acceptance_sampler"
DEFAULT_THRESHOLD = 0.09
"""Of typical acceptance; the default of alpha is its root."""
MAX_ALPHA = 1_000_000
"""More than any vocabulary has tokens: with so large a factor, the other threshold alone counts."""

Drafts: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_DRAFTS)]
Lookup: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_LOOKUP)]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]


class SpeculativeConfig(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """A resolved configuration of speculative decoding.

    method: where drafts come from. "auto", what a model by name is, stands in options only: the core replaces it by
        what the model's config.json says before a worker or a scheduler sees it.
    model: folder or GGUF file of the drafter's model; in options also an id of the hub. None for "ngram" and
        "suffix", and for "mtp", whose layers come with the model that is served.
    num_speculative_tokens: the most drafts of one row; in options 0 stands for the method's or the model's own.
    prompt_lookup_min, prompt_lookup_max: lengths of the n-grams that "ngram" looks up.
    disable_by_batch_size: no drafts while more sequences than this run or wait; None: no such limit.
    max_model_len: no drafts for a sequence beyond this many tokens; None: the drafter's own limit.
    quantization: of the drafter's model, as `EngineArgs.quantization`.
    revision: of the drafter's model on the hub.
    draft_tensor_parallel_size: workers over which the drafter's model is divided: all of them, or 1, so that each
        has the whole of it. None: all of them where it can be divided so, else 1.
    acceptance_method: "rejection_sampler": a draft counts if it is the token that is sampled in its place, so
        outputs are those without drafts. "typical_acceptance_sampler": also if its probability is at least
        min(posterior_threshold, posterior_alpha * exp(-entropy)), so outputs depend on what is proposed.
    """

    method: Method = "auto"
    model: str | None = None
    num_speculative_tokens: Drafts = 0
    prompt_lookup_min: Lookup = DEFAULT_LOOKUP[0]
    prompt_lookup_max: Lookup = DEFAULT_LOOKUP[1]
    disable_by_batch_size: Positive | None = None
    max_model_len: Positive | None = None
    quantization: str | None = None
    revision: str | None = None
    acceptance_method: Acceptance = "rejection_sampler"
    posterior_threshold: Annotated[float, Meta(ge=0, le=1)] = DEFAULT_THRESHOLD
    posterior_alpha: Annotated[float, Meta(ge=0, le=MAX_ALPHA)] = math.sqrt(DEFAULT_THRESHOLD)
    draft_tensor_parallel_size: Positive | None = None

    @property
    def in_core(self) -> bool:
        """True if the core finds the drafts, without a model."""
        return self.method in CORE_METHODS


# Flags, and the key of `speculative_config` that says the same.
FLAGS = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_model_quantization": "quantization",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "spec_decoding_acceptance_method": "acceptance_method",
    "typical_acceptance_sampler_posterior_threshold": "posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha": "posterior_alpha",
}
KEYS = SpeculativeConfig.__struct_fields__


def speculative_config(
    flags: Mapping[str, Any], values: Mapping[str, Any], num_ranks: int = 1
) -> SpeculativeConfig | None:
    """The checked options; None if nothing is to be proposed.

    flags: the options named in `FLAGS`, None where they are not given. values: `speculative_config`.
    num_ranks: workers over which each layer of the model that is served is divided.

    Raises:
        ValueError: an option is unknown, has a bad value, is given twice, contradicts another one, or is not
            served. TypeError: a value of a wrong type.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for flag, key in FLAGS.items():
        if flags.get(flag) is None:
            continue
        if key in given:
            raise ValueError(f"give {flag}, or {key!r} in speculative_config, not both")
        given[key] = flags[flag]
    disabled = given.pop("disable_logprobs", None)
    settle("disable_logprobs", disabled, OPTIONS["disable_logprobs_during_spec_decoding"])
    for name in given:
        if name not in KEYS:
            raise ValueError(f"speculative_config: {unknown_name('key', name, KEYS)}")
    if not given:
        return None
    if given.get("num_speculative_tokens") == 0:
        raise ValueError(
            "num_speculative_tokens must be at least 1: without speculation, leave its options out"
        )
    _name_method(given)
    _complete_lookup(given)
    _complete_thresholds(given)
    config = _checked(given)
    _check_draft_ranks(config, num_ranks)
    return config


def _check_draft_ranks(config: SpeculativeConfig, num_ranks: int) -> None:
    """Refuse numbers of workers over which the drafter's model is not divided."""
    size = config.draft_tensor_parallel_size
    if size is None or size == num_ranks or (size == 1 and config.method != "mtp"):
        return
    if config.method == "mtp":
        advice = "the layers are divided as the model is that they belong to: leave the option out"
    else:
        advice = f"give tensor_parallel_size, {num_ranks}, or 1, for the whole drafter in every worker"
    raise ValueError(f"speculative_draft_tensor_parallel_size={size} is not served: {advice}")


def _name_method(given: dict[str, Any]) -> None:
    """Bring `method` and `model` to their own fields: a model may stand for a method, and a method for a model."""
    model, method = given.get("model"), given.get("method", "auto")
    if isinstance(method, str):
        method = method.lower().removeprefix("[").removesuffix("]")
    if model in (NGRAM, "ngram", "[suffix]", "suffix"):
        if method not in ("auto", model.strip("[]")):
            raise ValueError(f"speculative_model={model!r} contradicts method={method!r}")
        method = model.strip("[]")
        del given["model"]
    refuse_value("speculative_method", method)
    if isinstance(method, str) and method.endswith("_mtp"):  # as vLLM names the layers of one family
        method = "mtp"
    methods = get_args(Method)
    if method not in methods:
        raise ValueError(
            f"{unknown_name('speculative method', method, methods)}; there are {', '.join(methods)}"
        )
    if method == "auto" and "model" not in given:
        raise ValueError(
            f"speculative_model is missing: a model that proposes tokens, or {NGRAM!r}; without one, name "
            "the method 'ngram', 'suffix' or 'mtp' in speculative_config"
        )
    given["method"] = method


def _complete_lookup(given: dict[str, Any]) -> None:
    """Where one end of the lengths of n-grams is given, let the other's default agree with it."""
    low, high = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    if isinstance(high, int) and low is None:
        given["prompt_lookup_min"] = min(DEFAULT_LOOKUP[0], high)
    if isinstance(low, int) and high is None:
        given["prompt_lookup_max"] = max(DEFAULT_LOOKUP[1], low)


def _complete_thresholds(given: dict[str, Any]) -> None:
    """Where the threshold alone is given, let alpha be its root, as the defaults are."""
    threshold = given.get("posterior_threshold")
    if isinstance(threshold, int | float) and threshold >= 0 and "posterior_alpha" not in given:
        given["posterior_alpha"] = math.sqrt(threshold)


def _checked(given: dict[str, Any]) -> SpeculativeConfig:
    """The configuration of checked keys, with what depends on several of them."""
    try:
        config = msgspec.convert(given, SpeculativeConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"speculative_config: {error}") from None
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ValueError(
            f"ngram_prompt_lookup_min={config.prompt_lookup_min} is over "
            f"ngram_prompt_lookup_max={config.prompt_lookup_max}"
        )
    if "prompt_lookup_max" in given and config.method != "ngram":
        raise ValueError(f"ngram_prompt_lookup_max and -min belong to {NGRAM!r}, not to {config.method!r}")
    if config.in_core or config.method == "mtp":
        what = "has no model" if config.in_core else "runs layers of the model that is served"
        for name in ("model", "quantization", "revision"):
            if name in given:
                raise ValueError(f"speculative method {config.method!r} {what}: leave {name} out")
    elif config.model is None:
        raise ValueError(f"speculative method {config.method!r} needs a model")
    if config.in_core and config.draft_tensor_parallel_size not in (None, 1):
        raise ValueError(
            f"speculative method {config.method!r} has no model: leave draft_tensor_parallel_size out"
        )
    if config.quantization is not None:
        quantization_name(config.quantization)
    for name in ("posterior_threshold", "posterior_alpha"):
        if name in given and config.acceptance_method != TYPICAL:
            raise ValueError(
                f"{name} belongs to acceptance_method {TYPICAL!r}, not to {config.acceptance_method!r}"
            )
    if not config.num_speculative_tokens and config.method in DEFAULT_DRAFTS:
        return msgspec.structs.replace(config, num_speculative_tokens=DEFAULT_DRAFTS[config.method])
    return config


def draft_method(config: Mapping[str, Any]) -> Method:
    """The kind of a model that proposes tokens, by its config.json. An ordinary model is a draft model."""
    kind, names = str(config.get("model_type", "")), " ".join(map(str, config.get("architectures") or []))
    if kind == "mlp_speculator" or "MLPSpeculator" in names:
        return "mlp_speculator"
    if kind == "eagle3" or "Eagle3" in names:
        return "eagle3"
    if kind.endswith("_mtp") or "MTP" in names:
        return "mtp"
    return "draft_model"
