"""Descriptions of models for Ollama's API: /api/tags, /api/ps and /api/show."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator

import msgspec

from pagewire.frontend.client import template_source
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
from pagewire.frontend.server.serving.service import ModelEntry, Service, Services
from pagewire.ipc.files.hub_names import quantisation_of

NEVER = "9999-12-31T23:59:59Z"
UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


def listed_models(services: Services) -> ListedModels:
    """Return all names of the served models, and their adapters; those that are not loaded come last."""
    models = [list_name(services, own, name) for own, name in listed_names(services)]
    loaded = {model.name for model in models}
    absent = [entry for entry in services.entries if entry.name not in loaded]
    return ListedModels(models + [describe_unloaded(services, entry) for entry in absent])


def describe_unloaded(services: Services, entry: ModelEntry) -> ListedModel:
    """Return the description of a model that is not loaded: what was pulled of it, else only its name."""
    details = ModelDetails("", "", "", [], "", "")
    if (pulled := services.pulled_model(entry.name)) is not None:
        details.format = "gguf" if pulled.tag else "safetensors"
        details.quantization_level = quantisation_of(pulled.files[0].name) or ""
    return describe_name(services, entry.name, entry.model, details)


def describe_name(services: Services, name: str, model: str, details: ModelDetails) -> ListedModel:
    """Return the description of a name, with what is known of its files.

    The digest stays while a model comes and goes.
    """
    pulled, created, size, content = services.pulled_model(name), services.created, 0, model
    if pulled is not None:
        created, size, content = pulled.pulled_at, pulled.num_bytes, pulled.content
    digest = hashlib.sha256(msgspec.json.encode((name, content))).hexdigest()
    return ListedModel(name, name, timestamp(created), size, digest, details)


def running_models(services: Services) -> RunningModels:
    """Return the names of the models in memory."""
    models = [list_running(services, own, name) for own, name in listed_names(services)]
    for model in models:
        if (seconds := services.seconds_left(model.name)) is not None:
            model.expires_at = timestamp(int(time.time() + seconds))
    return RunningModels(models)


def listed_names(services: Services) -> Iterator[tuple[Service, str]]:
    """Yield all names of the loaded models, each with the service of its model."""
    for own in services.all:
        for name in own.all_names:
            yield own, name


def list_name(services: Services, service: Service, name: str) -> ListedModel:
    """Return the description of one name."""
    figures = service.info.figures
    found = describe_name(services, name, service.info.model, details_of(service))
    if figures is not None and not found.size:
        found.size = figures.file_bytes
    return found


def list_running(services: Services, service: Service, name: str) -> RunningModel:
    """Return the description of one name with what it takes in memory."""
    figures, model = service.info.figures, list_name(services, service, name)
    on_gpu = 0 if figures is None or service.info.device == "cpu" else figures.weight_bytes
    return RunningModel(
        **msgspec.structs.asdict(model),
        expires_at=NEVER,
        size_vram=on_gpu,
        context_length=service.info.max_model_len,
    )


def show_model(service: Service, name: str | None) -> ShownModel:
    """Return what is known of a model.

    Raises:
        APIError: there is no model with that name.
    """
    if name is None:
        raise APIError(400, "model is required")
    service.check_known(name)
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
        capabilities=service.capabilities,
    )


def details_of(service: Service) -> ModelDetails:
    """Return what a model is made of."""
    info, figures = service.info, service.info.figures
    family = info.architecture
    if figures is None:
        return ModelDetails("", "", family, [family], "", info.dtype)
    quantization = figures.quantization or info.dtype
    return ModelDetails(
        "", figures.form, family, [family], write_num_weights(figures.parameters), quantization
    )


def write_num_weights(number: int) -> str:
    """Return a number of weights as people write it, such as "7.2B"."""
    unit, letter = next(((unit, letter) for unit, letter in UNITS if number >= unit), (1, ""))
    return f"{number / unit:.1f}{letter}"
