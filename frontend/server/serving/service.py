"""State that all endpoints share: the engine, the options, and the requests in flight."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request

from pagewire.frontend.client import (
    AsyncLLM,
    LoRARequest,
    PromptAdapterRequest,
    Tokenizer,
    check_template,
    template_threads,
)
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.http.warnings import warn_client
from pagewire.frontend.server.parsing.detection import reply_formats
from pagewire.frontend.server.serving.adapters import ServedAdapters, modules_of
from pagewire.frontend.server.serving.exchange import Exchange
from pagewire.frontend.server.serving.name_patterns import is_pattern, matches_any
from pagewire.ipc.files.names import short_name
from pagewire.ipc.quoting import quoted, shortened

if TYPE_CHECKING:
    from pagewire.ipc.files.pulled import PulledModel

OF_THE_FIRST: dict[str, Any] = {
    "chat_template": None,
    "chat_template_content_format": "auto",
    "tool_call_parser": None,
    "reasoning_parser": None,
    "enable_auto_tool_choice": None,
    "lora_modules": [],
    "lora_root": None,
    "prompt_adapters": [],
    "any_model_name": False,
}
"""Options that are for one model, and what further ones have in their place."""
LATEST = ":latest"  # the tag of Ollama's names that have no other
MAX_SERVED = 300  # characters of the names in an error
MAX_WAITING_TEMPLATES = 16  # templates from requests that may wait for others; each takes up to 2 s


class ModelEntry(msgspec.Struct, frozen=True):
    """A model of a server, loaded or not.

    model: folder or id. state: absent, starting, ready, idle or stopping. problem: why it did not start last.
    fitted: what `--fit` chose for it, when it was loaded last.
    """

    name: str
    model: str
    state: str
    problem: str | None = None
    fitted: str | None = None


class Services:
    """The models of a server, and what they share.

    Attributes:
        options: of the server. created: its start, in seconds since the epoch.
        open: generation requests in flight, by id.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.created = int(time.time())
        self.open: dict[str, Exchange] = {}

    @property
    def all(self) -> list[Service]:
        """The models that are loaded."""
        raise NotImplementedError

    @property
    def by_priority(self) -> bool:
        """True if an engine schedules requests by priority."""
        raise NotImplementedError

    @property
    def entries(self) -> list[ModelEntry]:
        """The models that are loaded on demand; none if all are loaded as long as the server runs."""
        return []

    def seconds_left(self, name: str) -> float | None:
        """Return for how many seconds a model stays loaded if it is not used; None: no such limit."""
        return None

    def pulled_model(self, name: str) -> PulledModel | None:
        """Return what was pulled under a listed name; None: that model was not pulled."""
        return None

    def unload(self, model: str | None) -> str | None:
        """End a model as soon as no request uses it; return its name. None: models stay as long as the server."""
        return None

    def of(self, model: str | None) -> Service:
        """Return the loaded model with this name, or whichever says that there is none."""
        raise NotImplementedError

    def use(
        self, model: str | None, keep_alive: float | str | None = None
    ) -> AbstractAsyncContextManager[Service]:
        """Use a model: it does not end meanwhile.

        keep_alive: Ollama's: for how long it stays loaded after that.

        Raises:
            APIError: there is no such model, or it cannot be loaded.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> bool:
        """End a generation request with an error response; return False if there is none with this id."""
        if (exchange := self.open.get(request_id)) is None:
            return False
        exchange.stop(APIError(499, "the request was aborted", code="aborted"))
        return True


class Service(Services):
    """State of one server for one of its engines, as a rule the only one.

    Attributes:
        engine, options: the constructor's arguments. info: properties of the engine. others: of further engines.
        names: names of the model, the main one first. patterns: of further ones.
        adapters: those that are addressed as models.
        formats: how the model's replies are read. has_template: it has a chat template that can be used.
        defaults: sampling parameters from the model's generation config. local: those of the page and of /api.
        prompt_adapters: those of the server's options, by name.
        request_templates: runs the chat templates of requests.
        hold: has the engine stay, beyond the request that calls it, until what it returns is called.
    """

    def __init__(self, engine: AsyncLLM, options: ServerOptions, others: Sequence[AsyncLLM] = ()) -> None:
        """Begin to serve engines.

        Raises:
            ValueError: two models have the same name, an adapter is bad, or calls are to be the model's choice and
                its dialect is unknown.
        """
        super().__init__(options)
        self.engine = engine
        self.info = engine.info
        self.hold: Callable[[], Callable[[Any], None]] = stays
        given = engine.info.served_model_names or [short_name(engine.info.model)]
        self.names = [given[0], *(name for name in given[1:] if not is_pattern(name))]
        self.patterns = [name for name in given[1:] if is_pattern(name)]
        template = self._template()
        self.has_template = bool(template)
        self.formats = reply_formats(
            template,
            engine.info.architecture,
            tools=options.tool_call_parser,
            reasoning=options.reasoning_parser,
            auto=options.enable_auto_tool_choice,
            response_template=self._response_template(),
        )
        self.defaults = engine.default_params
        self.local = engine.local_params
        self.prompt_adapters = engine.session.intake.prompt_adapters.named(
            options.prompt_adapters, self.names
        )
        self.adapters = ServedAdapters(engine, [*self.names, *self.prompt_adapters], options.lora_root)
        self.adapters.start(modules_of(options.lora_modules))
        self.request_templates = template_threads(MAX_WAITING_TEMPLATES)
        self.others = [Service(other, dataclasses.replace(options, **OF_THE_FIRST)) for other in others]
        names = [name for service in self.all for name in (*service.names, *service.prompt_adapters)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"two models have the name {quoted(twice[0])}: give one another by --served-model-name; several "
                "cores of one model are served by `pagewire route`"
            )

    def _template(self) -> str:
        """Return the chat template of conversations with tools; "" if there is none."""
        tokenizer = self.engine.session.intake.tokenizer
        if tokenizer is None or self.info.pooling is not None:
            return ""
        try:
            return check_template(tokenizer, self.options.chat_template, with_tools=True)
        except ValueError:  # `chat.routes` and requests for chat say so
            return ""

    def _response_template(self) -> Any:
        """Return what the checkpoint says of its replies; None if it says nothing, or does not chat."""
        tokenizer = self.engine.session.intake.tokenizer
        return None if tokenizer is None or not self.has_template else tokenizer.response_template

    @property
    def capabilities(self) -> list[str]:
        """The kinds of requests that the model takes, in Ollama's words."""
        if self.info.pooling is not None:
            return ["embedding"]
        media = self.info.media
        more = {
            "vision": media is not None and "image" in media.kinds,
            "tools": self.formats.auto,
            "thinking": self.formats.reasoning is not None,
        }
        return ["completion", *(name for name, able in more.items() if able)]

    @property
    def all(self) -> list[Service]:
        """This service, and those of further engines."""
        return [self, *self.others]

    def of(self, model: str | None) -> Service:
        """The service whose model or adapter has this name; this one for None, and for a name that none has."""
        return next((service for service in self.all if service.serves(model)), self)

    @property
    def by_priority(self) -> bool:
        """True if an engine schedules requests by priority."""
        return any(service.info.by_priority for service in self.all)

    @asynccontextmanager
    async def use(
        self, model: str | None, keep_alive: float | str | None = None
    ) -> AsyncGenerator[Service, None]:
        """Use the service of a model, which is there as long as the server."""
        if keep_alive is not None:
            warn_client(
                "keep_alive has no effect: the model stays loaded while the server runs, "
                "but for one that is started with --idle-sleep"
            )
        yield self.of(model)

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

        So it is for a name of one of the patterns. One that is not served comes back as it is, or without the tag.
        """
        if self._has(name):
            return name
        if name == self.info.model:
            return self.names[0]
        plain = name.removesuffix(LATEST)
        return self.names[0] if not self._has(plain) and matches_any(self.patterns, plain) else plain

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
        return self.engine.session.intake.tokenizer_for(self.adapter(name))

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

        So it is, with a warning, for an unknown name, if any may be given for this model.

        Raises:
            APIError: there is no model with that name.
        """
        if name is None or (name := self.listed(name)) in self.names:
            return None
        if (adapter := self.adapters.get(name)) is not None:
            return adapter
        if name in self.prompt_adapters:
            return None
        if self._takes_any_name:
            warn_client(
                f"there is no model {quoted(name)}: {self.names[0]}, the only one, answers (--no-any-model-name)"
            )
            return None
        raise self.unknown(name)

    @property
    def _takes_any_name(self) -> bool:
        """True if the model answers to unknown names: nothing else can be meant."""
        info, wanted = self.info, self.options.any_model_name
        alone = not self.others and info.lora is None and not self.prompt_adapters
        generates = info.pooling is None and info.source is None
        return alone and generates and (self.options.is_local() if wanted is None else wanted)

    def check_known(self, name: str | None) -> None:
        """Check that a name is one of a model or an adapter, where no other may be meant.

        Raises:
            APIError: there is no model with that name.
        """
        if name is not None and not self.serves(name):
            raise self.unknown(name)

    def unknown(self, name: str) -> APIError:
        """Return the error for a name that no model has."""
        names = (name for service in self.all for name in (*service.all_names, *service.patterns))
        message = f"there is no model {quoted(name)}; served: {shortened(', '.join(names), MAX_SERVED)}"
        return APIError(404, message, param="model", code="model_not_found")


def stays() -> Callable[[Any], None]:
    """Hold an engine that stays as long as the server."""
    return lambda _: None


def services_of(request: Request) -> Services:
    """Return the models of the application that handles a request."""
    services: Services = request.app.state.service
    return services
