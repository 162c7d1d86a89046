"""Descriptions for OpenAI's API of the served models, and of their adapters."""

from __future__ import annotations

from msgspec import UNSET

from pagewire.frontend.server.openai.protocol import ModelCard
from pagewire.frontend.server.serving.service import Service, Services


def cards_of(services: Services) -> list[ModelCard]:
    """Return the descriptions of all models of a server, and of their adapters."""
    cards = [card(service, name) for service in services.all for name in service.all_names]
    loaded = {found.id: found for found in cards}
    for entry in services.entries:
        if (found := loaded.get(entry.name)) is None:
            problem = UNSET if entry.problem is None else entry.problem
            found = ModelCard(id=entry.name, created=services.created, root=entry.model, problem=problem)
            cards.append(found)
        found.state = entry.state
        found.fitted = UNSET if entry.fitted is None else entry.fitted
    return cards


def card(service: Service, name: str) -> ModelCard:
    """Return the description of the model under one of its names, or of an adapter.

    Raises:
        APIError: there is no model with that name.
    """
    service.check_known(name)
    name = service.listed(name)
    root, max_model_len = service.info.model, service.info.max_model_len
    if (adapter := service.adapter(name)) is not None:
        root = adapter.lora_path or name
    if (prompt_adapter := service.prompt_adapter(name)) is not None:
        root = prompt_adapter.prompt_adapter_local_path
        max_model_len -= prompt_adapter.prompt_adapter_num_virtual_tokens
    return ModelCard(
        id=name,
        created=service.created,
        root=root,
        parent=None if name in service.names else service.names[0],
        max_model_len=max_model_len,
        context_window=max_model_len,
        context_length=max_model_len,
        input_modalities=["text", *([] if service.info.media is None else sorted(service.info.media.kinds))],
        output_modalities=["text" if service.info.pooling is None else "embeddings"],
        capabilities=service.capabilities,
        tool_call_parser=service.formats.tools,
        reasoning_parser=service.formats.reasoning,
    )
