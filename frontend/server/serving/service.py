"""State that all endpoints share: the engine, the options, and the requests in flight."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.api.slow_work import SlowWork
from pagewire.frontend.requests.defaults import default_sampling_params, local_sampling_params
from pagewire.frontend.requests.lora import LoRARequest
from pagewire.frontend.requests.prompt_adapters import PromptAdapterRequest
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.parsing.detection import reply_formats
from pagewire.frontend.server.serving.adapters import ServedAdapters, modules_of
from pagewire.frontend.server.serving.exchange import Exchange
from pagewire.frontend.text.chat_template import template_source
from pagewire.frontend.text.conversation import compile_template
from pagewire.frontend.text.render_process import NUM_PARALLEL, NUM_RESERVED
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.files.names import short_name
from pagewire.ipc.quoting import quoted, shortened

OF_THE_FIRST: dict[str, Any] = {
    "chat_template": None,
    "chat_template_content_format": "auto",
    "tool_call_parser": None,
    "reasoning_parser": None,
    "enable_auto_tool_choice": None,
    "lora_modules": [],
    "lora_root": None,
    "prompt_adapters": [],
}
"""Options that are for one model, and what further ones have in their place."""
LATEST = ":latest"  # the tag of Ollama's names that have no other
MAX_SERVED = 300  # characters of the names in an error
MAX_WAITING_TEMPLATES = 16  # templates from requests that may wait for others; each takes up to 2 s


class Service:
    """State of one server for one of its engines, as a rule the only one.

    Attributes:
        engine, options: the constructor's arguments. info: properties of the engine. others: of further engines.
        names: names of the model, the main one first. created: start of the server, in seconds since the epoch.
        adapters: those that are addressed as models.
        formats: how the model's replies are read. has_template: it has a chat template that can be used.
        defaults: sampling parameters from the model's generation config. local: those of the page and of /api.
        prompt_adapters: those of the server's options, by name.
        open: generation requests in flight, by id. request_templates: runs the chat templates of requests.
    """

    def __init__(self, engine: AsyncLLM, options: ServerOptions, others: Sequence[AsyncLLM] = ()) -> None:
        """Begin to serve engines.

        Raises:
            ValueError: two models have the same name, an adapter is bad, or calls are to be the model's choice and
                its dialect is unknown.
        """
        self.engine, self.options = engine, options
        self.info = engine.info
        self.names = engine.info.served_model_names or [short_name(engine.info.model)]
        self.created = int(time.time())
        template = self._template()
        self.has_template = bool(template)
        self.formats = reply_formats(
            template,
            engine.info.architecture,
            tools=options.tool_call_parser,
            reasoning=options.reasoning_parser,
            auto=options.enable_auto_tool_choice,
        )
        self.defaults = default_sampling_params(engine.info)
        self.local = local_sampling_params(engine.info)
        self.prompt_adapters = engine.session.prompt_adapters.named(options.prompt_adapters, self.names)
        self.open: dict[str, Exchange] = {}
        self.adapters = ServedAdapters(engine, [*self.names, *self.prompt_adapters], options.lora_root)
        self.adapters.start(modules_of(options.lora_modules))
        self.request_templates = SlowWork(
            "chat templates", NUM_PARALLEL, MAX_WAITING_TEMPLATES, num_reserved=NUM_RESERVED
        )
        self.others = [Service(other, dataclasses.replace(options, **OF_THE_FIRST)) for other in others]
        names = [name for service in self.all for name in (*service.names, *service.prompt_adapters)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"two models have the name {quoted(twice[0])}: give one another by --served-model-name; several "
                "cores of one model are served by `pagewire route`"
            )

    def _template(self) -> str:
        """Return the chat template of conversations with tools; "" if there is none."""
        tokenizer = self.engine.session.tokenizer
        if tokenizer is None or self.info.pooling is not None:
            return ""
        try:
            source = template_source(tokenizer, self.options.chat_template, with_tools=True)
            compile_template(source)
        except ValueError:  # `chat.routes` and requests for chat say so
            return ""
        return source

    @property
    def all(self) -> list[Service]:
        """This service, and those of further engines."""
        return [self, *self.others]

    def of(self, model: str | None) -> Service:
        """The service whose model or adapter has this name; this one for None, and for a name that none has."""
        return next((service for service in self.all if service.serves(model)), self)

    @property
    def all_names(self) -> list[str]:
        """The names of the model, and of its adapters."""
        return [*self.names, *(adapter.lora_name for adapter in self.adapters), *self.prompt_adapters]

    def serves(self, name: str | None) -> bool:
        """Return True for a name of the model or of an adapter."""
        return name is not None and self._has(self.listed(name))

    def _has(self, name: str) -> bool:
        return name in self.names or name in self.prompt_adapters or self.adapters.get(name) is not None

    def listed(self, name: str) -> str:
        """Return a name as it is listed: without Ollama's tag `:latest`; for the model's path, its main name.

        A name that is not served comes back as it is, or without the tag.
        """
        if self._has(name):
            return name
        return self.names[0] if name == self.info.model else name.removesuffix(LATEST)

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer.

        Raises:
            APIError: the engine has none.
        """
        return self.tokenizer_of(None)

    def tokenizer_of(self, name: str | None) -> Tokenizer:
        """Return the tokenizer of the model, or of the adapter with this name.

        Raises:
            APIError: there is none, or no model with that name.
        """
        if (tokenizer := self.optional_tokenizer(name)) is None:
            raise APIError(400, "this server has no tokenizer: use token ids for prompts and outputs")
        return tokenizer

    def optional_tokenizer(self, name: str | None) -> Tokenizer | None:
        """Return the tokenizer of the model, or of the adapter with this name; None if the engine has none.

        Raises:
            APIError: there is no model with that name.
        """
        return self.engine.session.tokenizer_for(self.adapter(name))

    def model(self, name: str | None) -> str:
        """Return the model's main name, which responses use, or the name of an adapter.

        name: any of its names, or an adapter's; None: the main one.

        Raises:
            APIError: there is no model with that name.
        """
        if name is None or (self.adapter(name) is None and self.prompt_adapter(name) is None):
            return self.names[0]
        return self.listed(name)

    def prompt_adapter(self, name: str | None) -> PromptAdapterRequest | None:
        """Return the prompt adapter with a name; None if there is none."""
        return None if name is None else self.prompt_adapters.get(self.listed(name))

    def adapter(self, name: str | None) -> LoRARequest | None:
        """Return the adapter (LoRA) with a name; None for a name of the model itself, or of a prompt adapter.

        Raises:
            APIError: there is no model with that name.
        """
        if name is None or (name := self.listed(name)) in self.names:
            return None
        if (adapter := self.adapters.get(name)) is not None:
            return adapter
        if name in self.prompt_adapters:
            return None
        served = shortened(", ".join(name for service in self.all for name in service.all_names), MAX_SERVED)
        message = f"there is no model {quoted(name)}; served: {served}"
        raise APIError(404, message, param="model", code="model_not_found")

    def abort(self, request_id: str) -> bool:
        """End a generation request with an error response; return False if there is none with this id."""
        if (exchange := self.open.get(request_id)) is None:
            return False
        exchange.stop(APIError(499, "the request was aborted", code="aborted"))
        return True


def service_of(request: Request) -> Service:
    """Return the service of the application that handles a request."""
    service: Service = request.app.state.service
    return service
