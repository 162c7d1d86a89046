"""Validation and tokenization of prompts and parameters, which become requests for the core.

    prompt, SamplingParams --Intake.prepare--> Request

Everything that the core would refuse is refused here, so that the exception is raised in the caller's stack.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pagewire.frontend import wiring
from pagewire.frontend.media.keys import KEYS as MEDIA_KEYS
from pagewire.frontend.media.keys import NOT_TAKEN, has_media
from pagewire.frontend.requests.checked_params import (
    CheckedParams,
    check_params,
    check_vocabulary,
    fit_params,
    truncate_tokens,
)
from pagewire.frontend.requests.embeds import EMBEDS_KEY, NO_TOKENS, check_embeds_params, embeddings_of
from pagewire.frontend.requests.lora import LoRARequest, UsedAdapter
from pagewire.frontend.requests.prompt_adapters import PromptAdapter, PromptAdapterRequest
from pagewire.frontend.requests.retention import KEY as RETENTION_KEY
from pagewire.frontend.requests.retention import retention_of
from pagewire.frontend.requests.sources import SourcedPrompt, SourceText, is_explicit, make_sourced
from pagewire.frontend.text.length import ContextLengthError, encode_within
from pagewire.frontend.text.prompts import PromptType
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.bounds import check_string, meta_of, unknown_name
from pagewire.ipc.compatibility import NAMES
from pagewire.ipc.errors import FieldTypeError, FieldValueError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.budget import MAX_TOKENS
from pagewire.ipc.wire.embeddings import PLACEHOLDER, check_encoded, check_media, media_of
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import EngineInfo, Request
from pagewire.ipc.wire.params import Name, SamplingParams, check_turn
from pagewire.ipc.wire.sources import NO_PROMPT_LOGPROBS, SourceInfo

if TYPE_CHECKING:
    from pagewire.frontend.media.items import Decoded
    from pagewire.ipc.wire.items import Media
    from pagewire.ipc.wire.media import MediaInfo

MASK = 2**64 - 1  # for the 64-bit arithmetic of seeds
NAME = meta_of(Name)


GENERATED = "generated_token_ids"  # tokens of the output so far, which a step of beam search goes on with
KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", RETENTION_KEY, GENERATED)
NOT_SUPPORTED = {
    **dict.fromkeys(("data", "data_format"), NAMES["LLM.encode(DataPrompt)"].refusal("a DataPrompt")),
    "encoder_prompt": "this model is no encoder-decoder: give the prompt alone",
    "decoder_prompt": "this model is no encoder-decoder: give the prompt alone",
    "token_type_ids": "models that generate have no token types; models that pool take them with token ids",
}


def is_tokens_prompt(prompt: Any) -> bool:
    """Return True for a dict with `prompt_token_ids` (and no embeddings)."""
    return isinstance(prompt, Mapping) and "prompt_token_ids" in prompt and "prompt_embeds" not in prompt


def is_embeds_prompt(prompt: Any) -> bool:
    """Return True for a dict with `prompt_embeds` (and no token ids)."""
    return isinstance(prompt, Mapping) and "prompt_embeds" in prompt and "prompt_token_ids" not in prompt


class MediaPlacer(Protocol):
    """Puts pictures and sounds into prompts; `media.intake` has one. info: what the engine takes."""

    info: MediaInfo

    def place(
        self, token_ids: Sequence[int], prompt: Mapping[str, Any], salt: str | None
    ) -> tuple[list[int], list[Media]]:
        """As `MediaIntake.place`."""

    def contents(self, prompt: Mapping[str, Any], salt: str | None) -> list[Decoded]:
        """As `MediaIntake.contents`."""

    def clear(self) -> None:
        """As `MediaIntake.clear`."""


class Prepared(msgspec.Struct, frozen=True):
    """A request to be sent to the core, the text of its prompt, if known, and its adapter, if it has one.

    tokenizer: makes text of its output; None: nothing does.
    num_virtual_tokens: tokens of a prompt adapter or a source before the prompt, which outputs do not show.
    source: what the encoder of an encoder-decoder reads.
    """

    request: Request
    prompt_text: str | None
    tokenizer: Tokenizer | None = None
    adapter: UsedAdapter | None = None
    num_virtual_tokens: int = 0
    source: SourceText | None = None


def check_request_place(info: EngineInfo, request_id: str, priority: int, age: float) -> None:
    """Check what a request of any kind has beside its prompt and its parameters.

    Raises:
        TypeError: a value of another type. ValueError: it is out of its bounds, or has no effect on this engine.
    """
    check_string("request_id", request_id, NAME)
    check_turn(priority, age)
    if priority and not info.by_priority:
        raise FieldValueError(
            "priority",
            f"={priority} has no effect: requests are scheduled in order of arrival; "
            "start the engine with --scheduling-policy priority",
        )


class Intake:
    """Converts prompts and parameters to requests for the core. Thread-safe.

    Args:
        info: properties of the engine.
        tokenizer: may be replaced later; None: prompts must be token ids.
        salt: makes this frontend's default seeds differ from those of others on the same engine. With the same
            engine seed and salt, the same requests in the same order get the same seeds.
        media: puts pictures and sounds into prompts; None: the engine takes none.
        hub: token and cache folder, with which adapters are downloaded.
    """

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        salt: int = 0,
        media: MediaPlacer | None = None,
        hub: tuple[Any, Any] = (None, None),
    ) -> None:
        self.info, self.tokenizer, self.media = info, tokenizer, media
        self._salt, self._hub = salt, hub
        self._num_seeds = itertools.count()
        self._keys = itertools.count()

    def prepare(
        self,
        prompt: PromptType,
        params: SamplingParams | CheckedParams | None,
        request_id: str,
        priority: int = 0,
        age: float = 0.0,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
    ) -> Prepared:
        """Check one prompt and its parameters (None: the model's defaults), and make the request.

        age: seconds since the request arrived. lora_request: the adapter that it runs with.
        prompt_adapter_request: embeddings to put before the prompt.

        The parameters are copied, but for checked ones, which requests may share. `max_tokens` is limited to the
        room that the prompt leaves in `max_model_len`.

        Raises:
            ValueError, TypeError: the prompt, a parameter or an adapter is invalid or not supported.
        """
        adapter, prompt_adapter = (
            self.find_adapter(lora_request),
            self._prompt_adapter(prompt_adapter_request),
        )
        check_request_place(self.info, request_id, priority, age)
        checked = params if isinstance(params, CheckedParams) else self.check(params)
        params = checked.params
        source: SourceText | None = None
        num_virtual_tokens = 0 if prompt_adapter is None else prompt_adapter.num_virtual_tokens
        if self.info.source is not None:
            own = self._sourced(prompt, params, self.info.source)
            content, text, source, num_virtual_tokens = (
                own.prompt,
                own.text,
                own.source,
                own.num_source_tokens,
            )
        else:
            content, text = self._content(prompt, params, adapter)
        if prompt_adapter is not None:
            content = prompt_adapter.before(content)
        params = fit_params(params, content, self.info)
        return Prepared(
            Request(
                key=self.next_key(),
                request_id=request_id,
                prompt=content,
                task=params,
                seed=self._seed() if params.seed is None else params.seed,
                eos_token_id=self.eos_token_id,
                priority=priority,
                age=age,
                adapter=None if adapter is None else adapter.source,
                output_token_ids=generated_tokens(prompt),
                retention=retention_of(prompt),
            ),
            text,
            self._tokenizer_of(adapter),
            adapter,
            num_virtual_tokens,
            source,
        )

    def _sourced(self, prompt: PromptType, params: SamplingParams, info: SourceInfo) -> SourcedPrompt:
        """A prompt of an encoder-decoder."""
        if params.truncate_prompt_tokens is not None:
            raise FieldValueError(
                "truncate_prompt_tokens", ": cut the encoder's prompt and the decoder's yourself"
            )
        if params.prompt_logprobs is not None:
            raise FieldValueError("prompt_logprobs", NO_PROMPT_LOGPROBS)
        salt = None if is_explicit(prompt) else salt_of(prompt)
        return make_sourced(prompt, info, self.info.block_size, self._part, partial(self._hear, salt), salt)

    def _hear(self, salt: str | None, prompt: Mapping[str, Any]) -> list[Decoded]:
        assert self.media is not None  # an engine that hears takes sounds
        return self.media.contents(prompt, salt)

    def _part(self, prompt: PromptType, special: bool) -> tuple[list[int], str | None]:
        """Token ids and text of a part of such a prompt; special: with the tokens that stand around a text."""
        return self.tokenize(prompt, special=special)

    def _content(
        self, prompt: PromptType, params: SamplingParams, adapter: UsedAdapter | None
    ) -> tuple[Prompt, str | None]:
        """A prompt as the core gets it, and its text, if known."""
        if (embeds := self.embeds(prompt)) is not None:
            check_embeds_params(params.prompt_logprobs, params.truncate_prompt_tokens)
            return embeds, None
        token_ids, text = self.tokenize(prompt, params.truncate_prompt_tokens is not None, adapter)
        if has_media(prompt):
            if params.truncate_prompt_tokens is not None:
                raise FieldValueError(
                    "truncate_prompt_tokens", "does not go with pictures and sounds, which are whole"
                )
            return self.with_media(token_ids, prompt), text
        token_ids = truncate_tokens(token_ids, params, self.info.max_model_len)
        content = Prompt(token_ids, cache_salt=salt_of(prompt))
        if self.media is not None:
            check_encoded(content, self.media.info)  # no place of a picture without one
        return content, text

    def with_media(self, token_ids: list[int], prompt: Any) -> Prompt:
        """A prompt with its pictures and sounds as the core gets it. Blocks while they are fetched and decoded.

        token_ids: those of the prompt's text.

        Raises:
            ContextLengthError: it has more tokens than the model takes. And as `MediaPlacer.place`.
        """
        assert self.media is not None  # `check_keys` has refused media else
        salt = salt_of(prompt)
        token_ids, media = self.media.place(token_ids, prompt, salt)
        if (number := len(token_ids)) > self.info.max_model_len:
            raise ContextLengthError(
                self.info.max_model_len, f"the prompt with its pictures and sounds has {number} tokens"
            )
        content = Prompt(token_ids, media, cache_salt=salt)
        check_media(content, self.info.embeddings, self.info.media)
        return content

    def embeds(self, prompt: Any) -> Prompt | None:
        """A prompt of embeddings as the core gets it; None if it is another one. Raises as `embeddings_of`."""
        if (embeddings := embeddings_of(prompt, self.info)) is None:
            return None
        check_keys(prompt)
        token_ids = [PLACEHOLDER] * embeddings.shape[0]
        return Prompt(token_ids, media_of(embeddings), cache_salt=salt_of(prompt))

    def tokenize(
        self,
        prompt: PromptType,
        truncates: bool = False,
        adapter: UsedAdapter | None = None,
        special: bool = True,
    ) -> tuple[list[int], str | None]:
        """Return the token ids of one prompt, checked but not truncated, and its text, if known.

        truncates: they will be, so there may be more than the model takes. adapter: whose tokenizer counts.
        special: with the tokens that it puts around a text.

        Raises:
            ContextLengthError: the prompt is longer than the model's context length.
            ValueError, TypeError: the prompt is invalid or not supported.
        """
        text: Any = None
        token_ids: Any = None
        if isinstance(prompt, Mapping):
            check_keys(prompt, takes_media=self.media is not None)
            if prompt.get(EMBEDS_KEY) is not None:
                raise FieldValueError(
                    EMBEDS_KEY, f": {NO_TOKENS}, which are needed here: give it as text or token ids"
                )
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if text is None and token_ids is None:
                raise ValueError("a prompt needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'")
        elif isinstance(prompt, str):
            text = prompt
        else:
            token_ids = prompt
        if text is not None and not isinstance(text, str):
            raise TypeError(f"the text of a prompt must be a string, got {type(text).__name__}")
        if token_ids is None and text is not None:
            token_ids = self._encode(text, truncates, adapter, special, salt_of(prompt))
        return self._checked(token_ids, truncates, adapter), text

    def _encode(
        self, text: str, truncates: bool, adapter: UsedAdapter | None, special: bool, salt: str | None
    ) -> list[int]:
        tokenizer = self._tokenizer_of(adapter)
        if tokenizer is None:
            raise ValueError("there is no tokenizer (skip_tokenizer_init): give the prompt as token ids")
        try:
            return encode_within(tokenizer, text, self.info.max_model_len, special, truncates, salt)
        except (TypeError, UnicodeError) as error:  # such as an unpaired surrogate
            raise ValueError(f"the prompt is not valid Unicode text: {error}") from error

    def _checked(self, token_ids: Any, truncates: bool, adapter: UsedAdapter | None) -> list[int]:
        if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Iterable):
            raise TypeError(f"a prompt is a string, token ids or a dict, got {type(token_ids).__name__}")
        ids = list(token_ids)
        if not ids:
            raise ValueError("the prompt is empty")
        if len(ids) > (MAX_TOKENS if truncates else self.info.max_model_len):
            raise ContextLengthError(self.info.max_model_len, f"the prompt has {len(ids)} tokens")
        if set(map(type, ids)) != {int}:
            ids = [as_int(token_id) for token_id in ids]
        num_extra = 0 if adapter is None else adapter.num_extra_tokens
        check_vocabulary("the prompt", ids, self.info.vocab_size + num_extra)
        return ids

    def check(self, params: SamplingParams | None) -> CheckedParams:
        """Check parameters (None: the model's defaults) once for many prompts; see `check_params`."""
        return check_params(params, self.info, self.tokenizer, self.eos_token_id)

    # -------------------------------------------------------------- tokenizers and adapters

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer, of pagewire or of transformers, for new requests.

        Raises:
            TypeError: `tokenizer` is not a tokenizer.
        """
        self.tokenizer = wiring.from_programs(tokenizer)

    def tokenizer_for(self, lora_request: LoRARequest | None) -> Tokenizer | None:
        """The tokenizer of an adapter, which is the model's if it has none of its own.

        Raises:
            ValueError, TypeError: no such adapter.
        """
        return self._tokenizer_of(self.find_adapter(lora_request))

    def token_ids(
        self, prompt: PromptType, truncates: bool = False, lora_request: LoRARequest | None = None
    ) -> list[int]:
        """The token ids of a prompt. truncates: it will be truncated, so it may be longer than the model takes.

        Raises:
            ValueError, TypeError: a bad prompt, or no such adapter.
        """
        return self.tokenize(prompt, truncates, self.find_adapter(lora_request))[0]

    def find_adapter(self, lora_request: LoRARequest | None) -> UsedAdapter | None:
        """The adapter of a request, as `AdapterBook.use`; None for none."""
        used: UsedAdapter | None = None if lora_request is None else self.adapters.use(lora_request)
        return used

    def knows_adapter(self, lora_request: LoRARequest | None) -> bool:
        """True if `find_adapter` has nothing to download or load."""
        return lora_request is None or bool(self.adapters.knows(lora_request))

    @cached_property
    def adapters(self) -> Any:
        """The `AdapterBook` of the session, opened with the first adapter."""
        return wiring.AdapterBook(self.info, *self._hub)

    @cached_property
    def prompt_adapters(self) -> Any:
        """The prompt adapters that were read: `PromptAdapters`, opened with the first one."""
        return wiring.PromptAdapters(self.info.embeddings)

    def _prompt_adapter(self, request: PromptAdapterRequest | None) -> PromptAdapter | None:
        found: PromptAdapter | None = None if request is None else self.prompt_adapters.get(request)
        return found

    def _tokenizer_of(self, adapter: UsedAdapter | None) -> Tokenizer | None:
        return self.tokenizer if adapter is None else adapter.tokenizer or self.tokenizer

    def next_key(self) -> int:
        """The key of the next request of this session."""
        return next(self._keys)

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token of the model's config or else of the tokenizer; None if neither has one."""
        if self.info.eos_token_id is not None or self.tokenizer is None:
            return self.info.eos_token_id
        return self.tokenizer.eos_token_id

    def _seed(self) -> int:
        """Return the next default seed, in [0, 2**63)."""
        state = 0
        for part in (self.info.seed, self._salt, next(self._num_seeds)):
            state = splitmix64(state ^ (part & MASK))
        return state >> 1


def prompts_of(prompts: Any) -> list[PromptType]:
    """Return a list of prompts, given one prompt (a string, a dict or a list of ints) or several.

    Raises:
        TypeError: the argument is neither.
    """
    prompt: Any = prompts
    if isinstance(prompts, (str, Mapping)):
        return [prompt]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise FieldTypeError(
            "prompts", f"must be a prompt or a list of prompts, got {type(prompts).__name__}"
        )
    parts: list[Any] = list(prompts)
    if parts and all(is_int(part) for part in parts):
        return [parts]
    for part in parts:
        if isinstance(part, bytes) or not isinstance(part, (str, Mapping, Iterable)):
            raise TypeError(f"a prompt is a string, token ids or a dict, got {type(part).__name__}")
    return parts


def check_keys(prompt: Mapping[str, Any], takes_media: bool = False) -> None:
    """Check the keys of a prompt; those of features that are not supported may hold None or an empty value.

    takes_media: the prompt may have pictures and sounds.

    Raises:
        ValueError: a key is unknown (the text suggests a similar one), or its feature is not supported.
    """
    for name, value in prompt.items():
        if name in KEYS or (takes_media and name in MEDIA_KEYS):
            continue
        reason = NOT_TAKEN if name in MEDIA_KEYS else NOT_SUPPORTED.get(name)
        if reason is None:
            raise ValueError(unknown_name("key of a prompt", name, (*KEYS, *MEDIA_KEYS, *NOT_SUPPORTED)))
        if value is not None and not (isinstance(value, (Mapping, list)) and not value):
            raise FieldValueError(name, f": {reason}")


def generated_tokens(prompt: Any) -> list[list[int]] | None:
    """The tokens that a prompt's output goes on with, as a request has them; None if it begins."""
    token_ids = prompt.get(GENERATED) if isinstance(prompt, Mapping) else None
    return None if token_ids is None else [list(token_ids)]


def salt_of(prompt: PromptType) -> str | None:
    """Return the prompt's `cache_salt`; None if it has none.

    Raises:
        TypeError, ValueError: the salt is not a string, or empty.
    """
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt == "":
        raise FieldValueError("cache_salt", "must not be empty")
    return None if salt is None else check_string("cache_salt", salt, NAME)


def is_int(value: Any) -> bool:
    """Return True for integers, including those of array libraries, but not for bools."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def as_int(value: Any) -> int:
    """Convert an integer of any type to int.

    Raises:
        TypeError: the value is not an integer.
    """
    if not is_int(value):
        raise TypeError(f"token ids must be integers, got {quoted(value)}")
    return operator.index(value)


def splitmix64(value: int) -> int:
    """Hash a 64-bit integer (SplitMix64): a bijection whose outputs for similar inputs are unrelated."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
