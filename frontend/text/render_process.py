"""Renders conversations with chat templates that came with requests, in processes that may be lost.

Jinja's sandbox keeps such a template from everything but its data; limits of time, memory and stack keep it from
stalling or filling the frontend, whatever it computes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from pagewire.frontend.text.conversation import Conversation, Rendered
from pagewire.frontend.text.tool_prompts import render_prompted
from pagewire.ipc.host.confined import Confined, JobKilledError, Limits
from pagewire.ipc.host.job_server import Handler, serve
from pagewire.ipc.tenants import current_tenant

SECONDS = 10.0  # of wall-clock time for one rendering
CPU_SECONDS = 2.0  # of processor time for one rendering
MEMORY_BYTES = 256 << 20
STACK_BYTES = 8 << 20
NUM_PARALLEL = 3  # renderings at the same time; others wait, tenants in turn
NUM_RESERVED = 1  # of these, for a tenant of which nothing is rendered

SMALL_TEMPLATE = "{% for message in messages %}{{ message.content | trim }}{% endfor %}"


class Rendering(msgspec.Struct):
    """A template, and what it is rendered with."""

    source: str
    special_tokens: dict[str, Any]
    conversation: Conversation


def render_confined(source: str, special_tokens: Mapping[str, Any], conversation: Conversation) -> Rendered:
    """Render one conversation, as `render_prompted` does. Blocks for up to `SECONDS`, in any thread.

    Raises:
        ValueError: as `render_prompted`; or the template exceeds a limit.
        TypeError: messages, tools or variables are not plain data.
        EngineBusyError: other templates take too long. EngineStalledError: it got too little of a processor.
    """
    try:
        job = msgspec.msgpack.encode(Rendering(source, dict(special_tokens), conversation))
    except OverflowError:
        raise ValueError("messages, tools and variables must not have integers of over 64 bits") from None
    limits = Limits(SECONDS, CPU_SECONDS, MEMORY_BYTES, STACK_BYTES, computes=True)
    try:
        return msgspec.msgpack.decode(
            render_processes().run(job, limits, current_tenant.get()), type=Rendered
        )
    except JobKilledError as error:
        raise ValueError(f"the chat template fails on the conversation: {error}") from None


@cache
def render_processes() -> Confined:
    """The processes of this frontend that render; the first rendering starts them."""
    return Confined(__name__, num_parallel=NUM_PARALLEL, num_reserved=NUM_RESERVED)


def renderer() -> Handler:
    """The function that renders one conversation, in a process forked for this."""

    def render(job: bytes) -> bytes:
        rendering = msgspec.msgpack.decode(job, type=Rendering)
        rendered = render_prompted(rendering.source, rendering.special_tokens, rendering.conversation)
        return msgspec.msgpack.encode(rendered)

    return render


def warm_up_renderers(render: Handler) -> None:
    """Render a small template, so that the memory which all templates use is there."""
    conversation = Conversation([{"role": "user", "content": "a"}], None, {}, "auto", True, False)
    render(msgspec.msgpack.encode(Rendering(SMALL_TEMPLATE, {}, conversation)))


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(
        description="pagewire process that renders templates (started by a frontend)"
    )
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    options = parser.parse_args()
    serve(options.control, options.lifeline, renderer, warm_up_renderers)


if __name__ == "__main__":
    main()
