"""What Ollama's API says of models: /api/tags, /api/ps and /api/show."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import msgspec

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.timestamps import timestamp
from pagewire.frontend.server.ollama.protocol import (
    ListedModel,
    ListedModels,
    ModelDetails,
    RunningModel,
    RunningModels,
    ShownModel,
)
from pagewire.frontend.server.serving.service import Service
from pagewire.frontend.text.chat_template import template_source

NEVER = "9999-12-31T23:59:59Z"
UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


def listed_models(service: Service) -> ListedModels:
    """Return all names of the served models, and their adapters."""
    return ListedModels([listed(own, name) for own, name in names(service)])


def running_models(service: Service) -> RunningModels:
    """Return the same: they are all in memory."""
    return RunningModels([running(own, name) for own, name in names(service)])


def names(service: Service) -> Iterator[tuple[Service, str]]:
    """Yield all names, each with the service of its model."""
    for own in service.all:
        for name in own.all_names:
            yield own, name


def listed(service: Service, name: str) -> ListedModel:
    """Return the description of one name."""
    details, figures = details_of(service), service.info.figures
    digest = hashlib.sha256(msgspec.json.encode((name, service.info.model_path, details))).hexdigest()
    size = 0 if figures is None else figures.file_bytes
    return ListedModel(name, name, timestamp(service.created), size, digest, details)


def running(service: Service, name: str) -> RunningModel:
    """Return the description of one name with what it takes in memory."""
    figures, model = service.info.figures, listed(service, name)
    on_gpu = 0 if figures is None or service.info.device == "cpu" else figures.weight_bytes
    return RunningModel(
        **msgspec.structs.asdict(model),
        expires_at=NEVER,
        size_vram=on_gpu,
        context_length=service.info.max_model_len,
    )


def shown(service: Service, name: str | None) -> ShownModel:
    """Return what is known of a model.

    Raises:
        APIError: there is no model with that name.
    """
    if name is None:
        raise APIError(400, "model is required")
    service.model(name)
    info, options = service.info, service.options
    tokenizer, template = service.optional_tokenizer(name), ""
    if tokenizer is not None:
        with contextlib.suppress(ValueError):  # there is none
            template = template_source(tokenizer, options.chat_template, with_tools=False)
    model_info: dict[str, str | int] = {
        "general.architecture": info.architecture,
        f"{info.architecture}.context_length": info.max_model_len,
        f"{info.architecture}.vocab_size": info.vocab_size,
    }
    if info.figures is not None:
        model_info["general.parameter_count"] = info.figures.parameters
    if info.pooling is not None:
        model_info[f"{info.architecture}.embedding_length"] = info.pooling.size
    parameters = sorted(info.generation_config.items())
    return ShownModel(
        modified_at=timestamp(service.created),
        parameters="\n".join(f"{name} {value}" for name, value in parameters),
        template=template,
        details=details_of(service),
        model_info=model_info,
        capabilities=capabilities(service),
    )


def capabilities(service: Service) -> list[str]:
    """Return what clients may ask of a model."""
    if service.info.pooling is not None:
        return ["embedding"]
    formats, media = service.formats, service.info.media
    more = {
        "vision": media is not None and "image" in media.kinds,
        "tools": formats.auto,
        "thinking": formats.reasoning is not None,
    }
    return ["completion", *(name for name, able in more.items() if able)]


def details_of(service: Service) -> ModelDetails:
    """Return what a model is made of."""
    info, figures = service.info, service.info.figures
    family = info.architecture
    if figures is None:
        return ModelDetails("", "", family, [family], "", info.dtype)
    quantization = figures.quantization or info.dtype
    return ModelDetails("", figures.form, family, [family], sized(figures.parameters), quantization)


def sized(number: int) -> str:
    """Return a number of weights as people write it, such as "7.2B"."""
    unit, letter = next(((unit, letter) for unit, letter in UNITS if number >= unit), (1, ""))
    return f"{number / unit:.1f}{letter}"
