"""What OpenAI's API says of the served models, and of their adapters."""

from __future__ import annotations

from pagewire.frontend.server.openai.protocol import ModelCard
from pagewire.frontend.server.serving.service import Service


def card(service: Service, name: str) -> ModelCard:
    """Return the description of the model under one of its names, or of an adapter.

    Raises:
        APIError: there is no model with that name.
    """
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
    )
