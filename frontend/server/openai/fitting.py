"""Conversations that are too long for the model, without their oldest turns."""

from __future__ import annotations

import msgspec

from pagewire.frontend.client import ContextLengthError, TokensPrompt
from pagewire.frontend.server.openai.prepared_chat import place_media, prompt_of
from pagewire.frontend.server.openai.protocol import ChatRequest
from pagewire.frontend.server.parsing.choice import ToolUse
from pagewire.frontend.server.serving.service import Service


async def fitting_prompt(
    service: Service, chat: ChatRequest, tools: ToolUse, room: int, counts: bool = False
) -> tuple[TokensPrompt, int]:
    """Return the prompt of a conversation from the first turn on with which it has at most `room` tokens.

    A turn begins with a message of the user. Messages of the system stay. If nothing fits, the last turn is taken.

    counts: its tokens are only counted.

    Returns:
        The prompt, and the number of messages that were left out.

    Raises:
        APIError, ValueError, TypeError: as `prompt_of`.
    """

    async def prompt_from(start: int) -> TokensPrompt:
        kept = [message for message in chat.messages[:start] if message["role"] == "system"]
        messages = kept + chat.messages[start:]
        return await prompt_of(service, msgspec.structs.replace(chat, messages=messages), tools, counts)

    async def fitting(start: int) -> TokensPrompt | None:
        try:
            prompt = await prompt_from(start)
            return prompt if len(await place_media(service, prompt)) <= room else None
        except ContextLengthError:
            return None

    if (prompt := await fitting(0)) is not None:
        return prompt, 0
    roles = [message["role"] for message in chat.messages]
    head = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    turns = [i for i, role in enumerate(roles) if role == "user" and i > head]
    best = None
    low, high = 0, len(turns)  # the first turn that fits is one of turns[low:high], or the last
    while low < high:
        middle = (low + high) // 2
        prompt = await fitting(turns[middle])
        if prompt is None:
            low = middle + 1
        else:
            high, best = middle, prompt
    start = turns[min(low, len(turns) - 1)] if turns else 0
    left_out = start - roles[:start].count("system")
    return (await prompt_from(start) if best is None else best), left_out
