"""Sampling parameters of requests that give none: the model's own, and what a person at a local model expects."""

from __future__ import annotations

import msgspec

from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.params import SamplingParams

SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
"""The sampling parameters that a generation config may have, and their names there."""

USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""How llama.cpp samples where a model recommends nothing. Ollama differs in top_p 0.9, without min_p, and in a
repetition penalty of 1.1 over the last 64 tokens: ours would be over all of them, and longer answers suffer."""

USUAL_LENGTH = 4096
"""Most tokens of an answer if neither request nor model says. It is Ollama's default context, prompt included."""


def default_sampling_params(info: EngineInfo) -> SamplingParams:
    """Return the sampling parameters of the model's generation config, with pagewire's defaults for the rest."""
    names = SAMPLING | {"max_tokens": "max_new_tokens"}
    config = info.generation_config
    return SamplingParams(
        **{name: value for name, key in names.items() if (value := config.get(key)) is not None}
    )


def local_sampling_params(info: EngineInfo) -> SamplingParams:
    """Return the parameters where people talk to a model: in a terminal, on the page, and through Ollama's API.

    They are the model's own; one that recommends none of how to sample is sampled as llama.cpp does. An answer ends
    after `USUAL_LENGTH` tokens unless the model says another length.
    """
    config = info.generation_config
    recommends = any(config.get(key) is not None for key in SAMPLING.values())
    limit = config.get("max_new_tokens")
    return msgspec.structs.replace(
        default_sampling_params(info),
        **({} if recommends else USUAL),
        max_tokens=USUAL_LENGTH if limit is None else limit,
    )
