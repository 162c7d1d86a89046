"""The parameters of a request: validated when they are made, and so again wherever they are decoded."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pagewire.ipc import beams
from pagewire.ipc.bounds import (
    MAX_PROCESSORS,
    check_fields,
    check_float,
    check_integer,
    check_text,
    meta_of,
    unknown_name,
)
from pagewire.ipc.compatibility import OPTIONS, KnowsArguments, settle
from pagewire.ipc.errors import Field, FieldTypeError, FieldValueError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.timestamps import TimestampRules
from pagewire.ipc.wire.budget import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORD_SPELLINGS,
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_CHARS,
    MAX_CHOICES,
    MAX_EXTRA_BYTES,
    MAX_LOGIT_EDITS,
    MAX_NAME_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_STRUCTURE_CHARS,
    MAX_TOKENS_OF_VOCABULARY,
)
from pagewire.ipc.wire.json_schema import check_is_schema
from pagewire.ipc.wire.thinking import ThinkingMarks

MAX_SPELLING = 6  # characters of JSON, or bytes in UTF-8, for a character that it stands for
MAX_JSON_DEPTH = 100
JSON_STRUCTURES = ("json", "json_object", "structural_tag")
JSON_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class SamplingType(IntEnum):
    """How the next token is chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RequestOutputKind(Enum):
    """The part of an output that each `RequestOutput` of a stream has."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def max_n() -> int:
    """The maximum of `n`, sequences per request (`PAGEWIRE_MAX_N_SEQUENCES`, default 64)."""
    return int(os.environ.get("PAGEWIRE_MAX_N_SEQUENCES", "64"))


# Numbers, strings and lists with bounds, which JSON schemas give, too.
NumSequences: TypeAlias = Annotated[int, Meta(ge=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepetitionPenalty: TypeAlias = Annotated[float, Meta(gt=0.0)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0.0)]
TopP: TypeAlias = Annotated[float, Meta(gt=0.0, le=1.0)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1)]
MinP: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
MaxTokens: TypeAlias = Annotated[int, Meta(ge=1)]
NumTokens: TypeAlias = Annotated[int, Meta(ge=0)]
NumLogprobs: TypeAlias = Annotated[int, Meta(ge=-1)]
TruncatedLength: TypeAlias = Annotated[int, Meta(ge=-1)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
# At most 16: length ** 16 is a float even for a length of 2**63, and so is its inverse.
LengthPenalty: TypeAlias = Annotated[float, Meta(ge=-16.0, le=16.0)]
Priority: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31)]
# At most a week: older requests are mistakes, and in sums of times they would outweigh all others.
Age: TypeAlias = Annotated[float, Meta(ge=0.0, le=7 * 86400.0)]
LogitBias: TypeAlias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Name: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
StopString: TypeAlias = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
Stop: TypeAlias = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
StopTokenIds: TypeAlias = Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)]
BadWord: TypeAlias = Annotated[str, Meta(max_length=MAX_BAD_WORD_CHARS)]
BadWords: TypeAlias = Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)]
TokenSequence: TypeAlias = Annotated[list[TokenId], Meta(max_length=4 * MAX_BAD_WORD_CHARS)]
AllowedTokenIds: TypeAlias = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS_OF_VOCABULARY)]
Structure: TypeAlias = Annotated[str, Meta(max_length=MAX_STRUCTURE_CHARS)]
ProcessorNames: TypeAlias = Annotated[list[Name], Meta(max_length=MAX_PROCESSORS)]
Choices: TypeAlias = Annotated[list[str], Meta(max_length=MAX_CHOICES)]


def check_turn(priority: int, age: float) -> None:
    """Check what decides a request's turn: its priority, and the seconds since it arrived.

    Raises:
        TypeError: something else than numbers. ValueError: one is out of its bounds.
    """
    check_integer("priority", priority, meta_of(Priority))
    check_float("age", age, meta_of(Age))


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The form that the output must have: exactly one of the first six is set.

    The engine generates nothing that does not fit, and ends when the output is complete. `max_tokens` may cut
    it short: only an output that ends with the finish reason "stop" is sure to be complete.

    Attributes:
        json: a JSON schema: a dict, its JSON text, or a pydantic model class; kept as text.
        regex: the whole output matches this regular expression (of Rust: no look-around, no back-references).
        choice: the output is one of these strings.
        grammar: a context-free grammar, as Lark or llama.cpp (GBNF, EBNF) write it.
        json_object: the output is a JSON object of any content.
        structural_tag: free text with parts between tags that follow schemas: `{"structures": [{"begin": ...,
            "schema": {...}, "end": ...}], "triggers": [...]}`, or formats composed of others: `{"format": {"type":
            "sequence", "elements": [...]}}` (const_string, json_schema, regex, grammar, any_text, sequence, or,
            tag, triggered_tags, tags_with_separator, as in XGrammar). A dict or its JSON text; kept as text.
        whitespace_pattern: what may stand between the tokens of JSON, a regular expression; "": nothing. Default: a
            space, or a line break with some indentation, so that no model can go on with whitespace for ever.
        disable_any_whitespace: no whitespace between the tokens of JSON.
        disable_additional_properties: objects have no properties but those that the schema names.
        optional: the output is free if the grammar cannot be compiled; without it, the request is refused.
        disable_fallback: accepted, without effect: there is nothing to fall back to.

    Raises:
        ValueError: not exactly one kind; a value that is too large, too deep or not JSON.
        TypeError: a value of the wrong type.
    """

    json: Structure | dict[str, Any] | None = None
    regex: Structure | None = None
    choice: Choices | None = None
    grammar: Structure | None = None
    json_object: bool | None = None
    structural_tag: Structure | dict[str, Any] | None = None
    whitespace_pattern: Structure | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    disable_fallback: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        self.json_object = self.json_object or None
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured outputs need exactly one of {', '.join(STRUCTURES)}; "
                f"got {' and '.join(given) or 'none'}"
            )
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ValueError("give whitespace_pattern or disable_any_whitespace, not both")
        if given[0] not in JSON_STRUCTURES and (
            unused := [name for name in JSON_OPTIONS if getattr(self, name) not in (None, False)]
        ):
            raise FieldValueError(
                unused[0], f"is for JSON ({', '.join(JSON_STRUCTURES)}), not for a {given[0]}"
            )
        self._check_kind(given[0])

    @property
    def kind(self) -> str:
        """Which of the six is set."""
        return next(name for name in STRUCTURES if getattr(self, name) is not None)

    @classmethod
    def read(cls, value: Any) -> Any:
        """Parameters from a dict of them; anything else is given back.

        Raises:
            ValueError: an unknown name. And as the class.
        """
        if not isinstance(value, dict):
            return value
        unknown = [name for name in value if name not in cls.__struct_fields__]
        if unknown:
            raise ValueError(unknown_name("field of structured outputs", unknown[0], cls.__struct_fields__))
        return cls(**value)

    def _check_kind(self, kind: str) -> None:
        if kind in ("json", "structural_tag"):
            setattr(self, kind, json_object_text(kind, getattr(self, kind)))
        size = len(getattr(self, kind)) if isinstance(getattr(self, kind), str) else 0
        if self.choice is not None:
            if not self.choice:
                raise FieldValueError("choice", "must not be empty: nothing could be generated")
            size = sum(len(text) + 1 for text in self.choice)
        if size + len(self.whitespace_pattern or "") > MAX_STRUCTURE_CHARS:
            raise FieldValueError(kind, f"must have at most {MAX_STRUCTURE_CHARS} characters, it has {size}")


class GuidedDecodingParams(StructuredOutputsParams):
    """The older form of `StructuredOutputsParams`. backend: has no effect, see `OPTIONS` of `ipc.compatibility`."""

    backend: Name | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        settle("guided_decoding_backend", self.backend, OPTIONS["guided_decoding_backend"])


def check_structure_size(name: str, value: str | dict[str, Any]) -> None:
    """Refuse a JSON object that is far too long as text, also with the longest spelling of its characters.

    Python's encoder and decoder take ten times as long, and the interpreter's lock meanwhile.

    Raises:
        ValueError: it is.
    """
    try:
        size = len(value) if isinstance(value, str) else len(msgspec.json.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return  # Python's encoder says what is wrong
    if size > MAX_SPELLING * MAX_STRUCTURE_CHARS:
        raise FieldValueError(name, f"must have at most {MAX_STRUCTURE_CHARS} characters, it has {size}")


def json_object_text(name: str, value: Any) -> str:
    """A JSON object (a dict, its text, or the schema of a pydantic model class) as compact JSON text.

    Raises:
        ValueError: it is not JSON, no object, too deep, or as "json" no schema. TypeError: a value of another type.
    """
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if not isinstance(value, (str, dict)):
        raise FieldTypeError(name, f"must be a JSON object or its text, got {quoted(value)}")
    check_structure_size(name, value)
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise FieldValueError(name, f"must be at most {MAX_JSON_DEPTH} levels deep") from None
    except (ValueError, TypeError) as error:
        raise FieldValueError(name, f"is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise FieldValueError(name, f"must be a JSON object, got {text:.80}")
    level: list[Any] = [parsed]
    depth = 0
    while level:
        depth += 1
        inner = (v for part in level for v in (part.values() if isinstance(part, dict) else part))
        level = [value for value in inner if isinstance(value, (dict, list, tuple))]
    if depth > MAX_JSON_DEPTH:
        raise FieldValueError(name, f"must be at most {MAX_JSON_DEPTH} levels deep, it has {depth}")
    check_text(name, text)
    if name == "json":
        check_is_schema(name, parsed)
    return text


class SamplingParams(
    msgspec.Struct, metaclass=KnowsArguments, omit_defaults=True, forbid_unknown_fields=True, tag="sampling"
):
    """How to sample, when to stop and what to return; the names follow OpenAI's completion API.

    Attributes:
        n: sequences to return (1 to `PAGEWIRE_MAX_N_SEQUENCES`, 64); the prompt is computed once for all.
        best_of: sequences to generate, at least n (the default): the n with the highest log probability per token
            are returned, best first, once all have ended, with the log probabilities of their tokens. With
            `use_beam_search`, the number of beams.
        use_beam_search: return the best beams (`BeamSearchParams`) in place of samples, once the search has ended.
            Temperatures 0 and 1 are the same. Penalties, bias, allowed tokens and bad words count; top_p, top_k,
            min_p, seed, stop, logprobs and structured_outputs are refused.
        thinking_token_budget: most tokens of reasoning, between the model's marks: then the closing mark is
            generated, and the answer follows. None: no limit but `max_tokens`.
        thinking: the marks; None: <think> and </think>. The HTTP server fills them in by the model's format.
        length_penalty, early_stopping: those of `BeamSearchParams`; they need `use_beam_search`.
        presence_penalty: subtracted from the logit of each token already generated, in [-2, 2].
        frequency_penalty: subtracted once per earlier occurrence in the output, in [-2, 2].
        repetition_penalty: divides positive, multiplies negative logits of tokens of prompt and output; > 0.
        temperature: divides the logits; 0 is greedy (and then top_p, top_k and min_p do nothing).
        top_p: smallest set of tokens with this much probability, in (0, 1].
        top_k: sample from the k most likely tokens only; 0 and -1 mean all.
        min_p: only tokens at least this likely, relative to the most likely one; in [0, 1].
        seed: 64-bit; the same seed gives the same tokens, whatever else runs (but for typical acceptance of drafts:
            `EngineArgs.spec_decoding_acceptance_method`). None: the engine draws a seed.
        stop: strings that end the output; not part of it unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the output.
        bad_words: strings that must not be generated.
        ignore_eos: generate past the end-of-sequence token.
        max_tokens: most tokens to generate; None: up to the model's length.
        min_tokens: least number of tokens before an end of sequence or a stop token.
        logprobs: number of most likely tokens to report per output token (-1: all), beside the sampled one.
        prompt_logprobs: the same per prompt token.
        flat_logprobs: return logprobs as one `FlatLogprobs` rather than a list of dicts.
        detokenize: give text; without it, only token ids (and `stop` is refused).
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: put spaces between special tokens in the text.
        logits_processors: names of logits processors that the engine was started with. Code never crosses a
            socket, so functions are refused.
        include_stop_str_in_output: keep the stop string in the text.
        truncate_prompt_tokens: keep only this many tokens at the end of the prompt; -1: what fits the model.
        output_kind: CUMULATIVE, DELTA or FINAL_ONLY.
        structured_outputs: what the output must look like: `StructuredOutputsParams`, or a dict of its fields.
        guided_decoding: the older name of `structured_outputs`; moved there.
        logit_bias: token id to a bias in [-100, 100] added to its logit.
        allowed_token_ids: only these tokens may be generated.
        timestamps: tokens of a model that hears which are times; transcriptions have it.
        extra_args: for logits processors, which get these parameters; nothing else reads them.

    Raises:
        ValueError: a value out of its range, or of a name in `NAMES` of `ipc.compatibility`.
        TypeError: a value of the wrong type.
    """

    n: NumSequences = 1
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    seed: int | None = None
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    bad_words: BadWords | None = None
    ignore_eos: bool = False
    max_tokens: MaxTokens | None = 16
    min_tokens: NumTokens = 0
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: ProcessorNames | None = None
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: TruncatedLength | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: GuidedDecodingParams | None = None
    logit_bias: Annotated[dict[TokenId, LogitBias], Meta(max_length=MAX_TOKENS_OF_VOCABULARY)] | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    extra_args: dict[str, Any] | None = None
    best_of: NumSequences | None = None
    use_beam_search: bool = False
    length_penalty: LengthPenalty = 1.0
    early_stopping: bool | Literal["never"] = False
    thinking_token_budget: NumTokens | None = None
    thinking: ThinkingMarks | None = None
    # Token sequences of `bad_words`, filled in by the frontend, which has the tokenizer.
    bad_words_token_ids: Annotated[list[TokenSequence], Meta(max_length=MAX_BAD_WORD_SPELLINGS)] | None = None
    # How many of the n outputs the client gets, filled in by the server for `best_of`; metrics report it.
    num_returned: NumSequences | None = None
    # For a step of beam search, which generates one token: report log probabilities of the logits that tokens are
    # sampled from, with all edits and the temperature, rather than of the model's. With `timestamps`, for any
    # number of tokens, without the temperature.
    processed_logprobs: bool = False
    timestamps: TimestampRules | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_structure()
        check_fields(self)
        self._check_values()
        self._check_together()

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """Build from fields where None stands for the default; max_tokens keeps None."""
        return cls(**{k: v for k, v in fields.items() if v is not None or k == "max_tokens"})

    @property
    def sampling_type(self) -> SamplingType:
        """Greedy, random, or random with a seed of its own."""
        if self.temperature == 0.0:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def num_logit_edits(self) -> int:
        """The tokens in the parameters that change logits or end an output, of each of the n sequences."""
        lists: list[Any] = [self.logit_bias, self.allowed_token_ids, self.stop_token_ids]
        lists += self.bad_words_token_ids or [self.bad_words]  # words until the frontend has tokenized them
        return sum(map(len, filter(None, lists)))

    def clone(self) -> SamplingParams:
        """A deep copy."""
        return copy.deepcopy(self)

    def update_from_generation_config(
        self, generation_config: dict[str, Any], model_eos_token_id: int | None = None
    ) -> None:
        """Take a generation config's further end-of-sequence ids as stop tokens (unless `ignore_eos`)."""
        ids = generation_config.get("eos_token_id")
        if ids is None or self.ignore_eos:
            return
        extra = set(ids if isinstance(ids, list) else [ids]) - {model_eos_token_id}
        if extra:
            self.stop_token_ids = sorted(extra | set(self.stop_token_ids or []))

    def _normalise(self) -> None:
        if self.top_k == -1:
            self.top_k = 0
        if self.seed == -1:
            self.seed = None
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        if isinstance(self.logits_processors, list) and any(map(callable, self.logits_processors)):
            raise FieldValueError(
                "logits_processors",
                "takes names, since code never crosses a socket: start the engine with "
                "logits_processors=['NAME=module:Class'], and give the name",
            )
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if isinstance(value, Sequence) and not isinstance(value, (str, list)):
                setattr(self, name, list(value))
        if isinstance(self.logit_bias, dict):
            try:  # JSON objects have string keys
                self.logit_bias = {int(token_id): bias for token_id, bias in self.logit_bias.items()}
            except (TypeError, ValueError):
                raise FieldTypeError("keys of logit_bias", "must be token ids") from None

    def _check_structure(self) -> None:
        structure = StructuredOutputsParams.read(self.structured_outputs)
        guided = GuidedDecodingParams.read(self.guided_decoding)
        if structure is not None and guided is not None:
            raise FieldValueError("structured_outputs", "and guided_decoding are the same: give one")
        for name, value in (("structured_outputs", structure), ("guided_decoding", guided)):
            if value is not None and not isinstance(value, StructuredOutputsParams):
                raise FieldTypeError(name, f"must be StructuredOutputsParams, got {quoted(value)}")
        if isinstance(guided, GuidedDecodingParams):
            fields = StructuredOutputsParams.__struct_fields__
            guided = StructuredOutputsParams(**{name: getattr(guided, name) for name in fields})
        self.structured_outputs, self.guided_decoding = structure or guided, None

    def _check_values(self) -> None:
        """Check what the bounds of single fields cannot say."""
        if self.n > 1 and self.n > max_n():
            raise FieldValueError(
                "n", f"must be at most {max_n()}, got {self.n}; PAGEWIRE_MAX_N_SEQUENCES raises it"
            )
        if self.truncate_prompt_tokens == 0:
            raise FieldValueError("truncate_prompt_tokens", "must be -1 or at least 1, got 0")
        for name, texts in (("stop", self.stop_strings), ("bad_words", self.bad_words)):
            if texts and "" in texts:
                raise FieldValueError(name, "must not contain an empty string")
        if (size := sum(map(len, self.bad_words or ()))) > MAX_BAD_WORDS_CHARS:
            raise FieldValueError(
                "bad_words", f"must have at most {MAX_BAD_WORDS_CHARS} characters together, they have {size}"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise FieldValueError("allowed_token_ids", "must not be empty: no token could be generated")
        if self.extra_args is not None:
            self._check_extra_args()

    def _check_extra_args(self) -> None:
        if not isinstance(self.extra_args, dict) or not all(isinstance(k, str) for k in self.extra_args):
            raise FieldTypeError("extra_args", f"must map strings to values, got {quoted(self.extra_args)}")
        try:
            size = len(msgspec.msgpack.encode(self.extra_args))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise FieldValueError("extra_args", f"must hold what msgpack can carry: {error}") from None
        if size > MAX_EXTRA_BYTES:
            raise FieldValueError(
                "extra_args", f"must have at most {MAX_EXTRA_BYTES} bytes (msgpack), it has {size}"
            )

    def _check_together(self) -> None:
        if not isinstance(self.output_kind, RequestOutputKind):
            raise FieldTypeError(
                "output_kind", f"must be a RequestOutputKind, got {quoted(self.output_kind)}"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise FieldValueError(
                "min_tokens",
                "must be at most ",
                Field("max_tokens"),
                f"={self.max_tokens}, got {self.min_tokens}",
            )
        check_logit_edits(self.n, self.num_logit_edits)
        if self.num_returned is not None and self.num_returned > self.n:
            raise FieldValueError("num_returned", f"must be at most n={self.n}, got {self.num_returned}")
        if self.best_of is not None and not self.n <= self.best_of <= max_n():
            raise FieldValueError("best_of", f"must be from n={self.n} to {max_n()}, got {self.best_of}")
        self._check_beams()
        if self.thinking is not None and not isinstance(self.thinking, ThinkingMarks):
            raise FieldTypeError("thinking", f"must be ThinkingMarks, got {quoted(self.thinking)}")
        if self.timestamps is not None and not isinstance(self.timestamps, TimestampRules):
            raise FieldTypeError("timestamps", f"must be TimestampRules, got {quoted(self.timestamps)}")
        if self.thinking is not None and self.thinking_token_budget is None:
            raise FieldValueError(
                "thinking", "has the marks of reasoning, for a budget: give thinking_token_budget"
            )
        if self.stop_strings and not self.detokenize:
            raise FieldValueError("stop", "strings need detokenize=True: they are looked for in the text")
        if self.temperature == 0.0:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0

    def _check_beams(self) -> None:
        check_early_stopping(self.early_stopping)
        if (refused := beams.beam_refusal(self, self.use_beam_search)) is not None:
            raise refused
        if self.use_beam_search and self.structured_outputs is not None:
            raise FieldValueError(
                "structured_outputs",
                "are not supported with use_beam_search: beams are extended by tokens, without "
                "a grammar; sample with best_of instead",
            )


def check_logit_edits(num_sequences: int, num_edits: int) -> None:
    """Refuse parameters whose lists of tokens are too long for the number of sequences.

    num_edits: `SamplingParams.num_logit_edits`.

    Raises:
        ValueError: their product is over `MAX_LOGIT_EDITS`.
    """
    if num_sequences * num_edits > MAX_LOGIT_EDITS:
        raise FieldValueError(
            "logit_bias",
            f", allowed_token_ids, stop_token_ids and bad_words have {num_edits} entries for each of "
            f"{num_sequences} sequences, which makes {num_sequences * num_edits}; at most {MAX_LOGIT_EDITS} are "
            "allowed: give fewer, or ask for fewer sequences at a time",
        )


def check_early_stopping(value: Any) -> None:
    """Refuse another value than True, False or "never"; raises ValueError or TypeError."""
    if not isinstance(value, bool) and value != "never":
        kind = FieldValueError if isinstance(value, str) else FieldTypeError
        raise kind("early_stopping", f"must be True, False or 'never', got {quoted(value)}")


class BeamSearchParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Parameters of `LLM.beam_search`.

    Attributes:
        beam_width: beams kept per step, at least 1.
        max_tokens: largest number of tokens per beam, at least 1.
        ignore_eos: beams go on past end-of-sequence tokens.
        temperature: divides the logits before scores are taken.
        length_penalty: a beam's score is its log probability divided by length ** length_penalty; in [-16, 16].
        include_stop_str_in_output: keep the text of the token that ended a beam.
        early_stopping: when to end the search, once `beam_width` beams have ended. True: at once. False: when the
            best running beam, scored at its present length, is no better than the worst of them. "never": when no
            running beam can become better.
        min_tokens: no beam ends before it has this number of tokens.
        stop_token_ids: tokens that end a beam, in addition to the end-of-sequence tokens.

    Raises:
        ValueError, TypeError: as `SamplingParams`.
    """

    beam_width: NumSequences
    max_tokens: MaxTokens
    ignore_eos: bool = False
    temperature: Temperature = 0.0
    length_penalty: LengthPenalty = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | Literal["never"] = False
    min_tokens: NumTokens = 0
    stop_token_ids: StopTokenIds | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_early_stopping(self.early_stopping)
        if self.min_tokens > self.max_tokens:
            raise FieldValueError(
                "min_tokens",
                "must be at most ",
                Field("max_tokens"),
                f"={self.max_tokens}, got {self.min_tokens}",
            )
