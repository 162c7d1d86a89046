"""Names of vLLM that are absent: each is refused or warned of where it is used, with what to use instead."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import re
import typing
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest

import pagewire
from pagewire.cli.commands import build_parser
from pagewire.cli.compatibility import PATH, document
from pagewire.cli.console.options import engine_args
from pagewire.cli.console.parser import UsageError
from pagewire.frontend.core.metrics import MetricList
from pagewire.frontend.requests.lora import LoRARequest
from pagewire.frontend.server.anthropic import protocol as anthropic_protocol
from pagewire.frontend.server.http.body import Decoder
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.http.warnings import begin_warnings
from pagewire.frontend.server.ollama import protocol as ollama_protocol
from pagewire.frontend.server.openai import protocol as openai_protocol
from pagewire.frontend.server.responses import protocol as responses_protocol
from pagewire.ipc import compatibility, environment
from pagewire.ipc.compatibility import NAMES, OPTIONS, REQUEST_FIELDS, VALUES, VARIABLES, Absent
from pagewire.ipc.environment import FLAGS, INTERNAL, MAX_UNREAD, READ, check_environment, env_flag
from pagewire.ipc.options.command_line import flag
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.options.structured_outputs import StructuredOutputsConfig
from pagewire.ipc.wire.params import GuidedDecodingParams, SamplingParams

ROOT = Path(__file__).parents[2]
SAMPLES: dict[Any, Any] = {bool: True, int: 7, float: 0.5, str: "5m", dict: {"a": 1}, object: "x"}
parser = functools.cache(build_parser)


@pytest.fixture(autouse=True)
def as_a_new_process(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "_warned", set())
    caplog.set_level(logging.WARNING)


def warned_values(absent: Absent) -> list[Any]:
    """A value for each way of being accepted with a warning."""
    if isinstance(absent.warned, tuple):
        return list(absent.warned)
    return [SAMPLES[kind] for kind in get_args(absent.warned) or (absent.warned,)]


def from_command_line(name: str, value: Any) -> EngineArgs:
    switch = any(isinstance(silent, bool) for silent in OPTIONS[name].silent) and isinstance(value, bool)
    words = [flag(name if value else f"no_{name}")] if switch else [flag(name), text_of(value)]
    return engine_args(parser().parse_args(["core", *words]))


def from_file(name: str, value: Any, path: Path) -> EngineArgs:
    path.write_text(f"{name.replace('_', '-')}: {json.dumps(value)}\n")
    return engine_args(parser().parse_args(["core", "--config", str(path)]))


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_accepted_or_refused_wherever_it_is_given(
    name: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    absent = OPTIONS[name]
    ways: tuple[Callable[[str, Any], EngineArgs], ...] = (
        lambda name, value: EngineArgs.from_kwargs({name: value}),
        lambda name, value: EngineArgs(**{name: value}),
        from_command_line,
        lambda name, value: from_file(name, value, tmp_path / "engine.yaml"),
    )
    for way in ways:
        for value in absent.silent:
            assert way(name, value) == EngineArgs()
        assert EngineArgs(**{name: None}) == EngineArgs() and not caplog.messages
        for value in warned_values(absent):
            compatibility._warned.clear()
            for _ in range(2):
                assert way(name, value) == EngineArgs()
            (message,) = caplog.messages
            assert message.startswith(f"{name}={value!r} has no effect: ") and absent.instead in message
            caplog.clear()
    if absent.warned is object:
        return
    for way in ways[:2] if any(isinstance(silent, bool) for silent in absent.silent) else ways:
        with pytest.raises(ValueError, match="'something else' is not supported") as caught:
            way(name, "something else")
        assert absent.reason in str(caught.value) and absent.instead in str(caught.value)
        assert ("not supported yet" in str(caught.value)) == absent.pending


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_an_option_is_refused_with_the_alternative(name: str) -> None:
    option, value = name.split("=")
    if option == "speculative_method":
        given, words = {"speculative_config": {"method": value}}, json.dumps({"method": value})
    else:
        given, words = {option: value}, value  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=re.escape(f"{option}={value!r} is not supported")) as caught:
        EngineArgs.from_kwargs(given)
    assert str(caught.value).endswith(VALUES[name].instead)
    with pytest.raises(UsageError, match=re.escape(VALUES[name].instead)):
        engine_args(parser().parse_args(["core", flag(next(iter(given))), words]))


PROTOCOLS = (openai_protocol, anthropic_protocol, ollama_protocol, responses_protocol)
NEEDED: dict[str, Any] = {"messages": [], "input": "a", "max_tokens": 1}  # by the structs that have them
OF_TYPES: dict[str, Any] = {  # the first whose name is in a type fits it
    "list[dict": [{"a": 1}],
    "list[int": [1],
    "list": ["a"],
    "dict": {"a": 1},
    "bool": False,
    "int": 77,
    "float": 77.5,
}


@pytest.mark.parametrize("name", REQUEST_FIELDS)
def test_a_field_of_a_request_is_named_in_a_warning_or_refused(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind_name, field = name.split(".")
    kind = next(vars(protocol)[kind_name] for protocol in PROTOCOLS if kind_name in vars(protocol))
    decoder: Decoder[Any] = Decoder(kind)
    needed = {name: value for name, value in NEEDED.items() if name in kind.__struct_fields__}
    absent, begun = REQUEST_FIELDS[name], begin_warnings("id")
    for value in warned_values(absent):
        decoder.decode(json.dumps(needed | {field: value}).encode())
        assert begun.texts[-1] == absent.warning(field) and begun.texts[-1] in caplog.messages[-1]
    if isinstance(absent.warned, tuple) and True not in absent.warned:
        hint = str(typing.get_type_hints(kind)[field])
        value = next((value for name, value in OF_TYPES.items() if name in hint), "something else")
        with pytest.raises(ValueError, match=re.escape(absent.refusal(f"{field}={value!r}"))):
            decoder.decode(json.dumps(needed | {field: value}).encode())


ATTRIBUTES = [name for name in NAMES if "(" not in name]
STRUCTS = {kind.__name__: kind for kind in (SamplingParams, LoRARequest, EngineArgs, StructuredOutputsConfig)}
ARGUMENTS = [name for name in NAMES if name.partition("(")[0] in STRUCTS]
CONSTRUCTORS = [name for name in NAMES if name.partition("(")[0] in ("LLMEngine", "AsyncLLM")]


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_says_why_it_is_not_there(name: str) -> None:
    owner, _, attribute = name.rpartition(".")
    if owner.startswith("pagewire"):
        things: list[Any] = [import_module(owner)]
        with pytest.raises(ImportError, match=re.escape(NAMES[name].instead)):
            exec(f"from {owner} import {attribute}")
    else:
        kind = MetricList if owner == "MetricList" else getattr(pagewire, owner)
        things = [kind, kind.__new__(kind)]
    for thing in things:
        assert not hasattr(thing, attribute)
        with pytest.raises(AttributeError, match=f"{re.escape(name)} is not supported: ") as caught:
            getattr(thing, attribute)
        assert NAMES[name].instead in str(caught.value)
        with pytest.raises(AttributeError, match="has no attribute 'nothing_like_it'"):
            thing.nothing_like_it  # noqa: B018


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_says_what_to_write(name: str, caplog: pytest.LogCaptureFixture) -> None:
    owner, argument = name.removesuffix(")").split("(")
    make, absent = STRUCTS[owner], NAMES[name]
    for value in absent.silent:
        assert make(**{argument: value}) == make()
    for value in warned_values(absent):
        assert make(**{argument: value}) == make()
        assert absent.instead in caplog.messages[-1]
    with pytest.raises(ValueError, match=f"{argument}='x' is not supported") as caught:
        make(**{argument: "x"})
    assert absent.instead in str(caught.value)


def test_engines_are_made_from_options() -> None:
    for name in CONSTRUCTORS:
        owner, argument = name.removesuffix(")").split("(")
        with pytest.raises(
            TypeError, match=rf"{owner}\({argument}=\.\.\.\) is not supported: .*from_engine_args"
        ):
            getattr(pagewire, owner)(**{argument: None})


def test_functions_and_arguments_of_methods_say_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"hf_overrides=function is not supported: .*give a dict"):
        EngineArgs.from_kwargs({"hf_overrides": print})
    llm = pagewire.LLM.__new__(pagewire.LLM)
    with pytest.raises(TypeError, match=r"LLM\.apply_model is not supported: .*collective_rpc"):
        llm.apply_model(print)
    with pytest.raises(
        ValueError, match=r"tokenization_kwargs=.* is not supported: .*truncate_prompt_tokens"
    ):
        llm.encode("x", tokenization_kwargs={"max_length": 4})
    engine = pagewire.LLMEngine.__new__(pagewire.LLMEngine)
    with pytest.raises(
        ValueError, match=r"tokenization_kwargs=.* is not supported: .*truncate_prompt_tokens"
    ):
        engine.add_request("0", "x", SamplingParams(), None, None, {"max_length": 4})


def test_arguments_that_depend_on_others() -> None:
    with pytest.raises(TypeError, match=r"generate\(top_k=...\) is not supported: .*SamplingParams"):
        pagewire.LLM.generate(None, "x", top_k=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'tok_k'$"):
        pagewire.LLM.generate(None, "x", tok_k=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"guided_decoding_backend='other' is not supported: .* llguidance"):
        GuidedDecodingParams(regex="a", backend="other")


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_of_vllm_is_warned_of(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    spellings = [name]
    if name.startswith("VLLM_") and not name.startswith("VLLM_TEST_"):  # ours of that kind are our tests'
        spellings.append(name.replace("VLLM_", "PAGEWIRE_"))
    for spelling in spellings:
        monkeypatch.setenv(spelling, "1")
        for _ in range(2):
            check_environment()
        messages = [message for message in caplog.messages if message.startswith(f"{spelling} ")]
        assert len(messages) == name.startswith("VLLM_"), "others belong to other programs as well"
        assert all(VARIABLES[name].instead in message for message in messages)


@pytest.mark.parametrize(
    ("variables", "messages"),
    [
        ({"VLLM_LOGGING_LEVEL": "DEBUG", "PAGEWIRE_LOGGING_LEVEL": "DEBUG"}, []),
        (
            {"PAGEWIRE_CPU_KVCACHE_SPCE": "1"},
            [
                "PAGEWIRE_CPU_KVCACHE_SPCE has no effect: unknown environment variable "
                "'PAGEWIRE_CPU_KVCACHE_SPCE'; did you mean 'PAGEWIRE_CPU_KVCACHE_SPACE'?"
            ],
        ),
        (
            {"VLLM_CPU_KVCACHE": "1"},
            [
                "VLLM_CPU_KVCACHE has no effect: unknown environment variable 'PAGEWIRE_CPU_KVCACHE'; did you "
                "mean 'PAGEWIRE_CPU_KVCACHE_SPACE'?"
            ],
        ),
        ({"VLLM_SERVICE_HOST": "10.0.0.1", "VLLM_PORT": "tcp://10.0.0.1:80", "PAGEWIRE_TEST_X": "1"}, []),
        (
            {f"VLLM_{number:03}": "" for number in range(MAX_UNREAD + 2)},
            [f"VLLM_{number:03} has no effect: unknown environment variable" for number in range(MAX_UNREAD)]
            + ["2 more variables may have no effect"],
        ),
    ],
)
def test_variables_that_nothing_reads(
    variables: dict[str, str],
    messages: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_environment()
    assert len(caplog.messages) == len(messages)
    for got, wanted in zip(caplog.messages, messages, strict=True):
        assert got.startswith(wanted)


def test_variables_under_vllms_names_are_taken_over(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that pagewire reads, with one line; its own names go first, and Kubernetes' variables are no settings."""
    names = sorted(READ.keys() - INTERNAL)
    monkeypatch.setattr(os, "environ", {name.replace("PAGEWIRE_", "VLLM_"): "0" for name in names})
    os.environ |= {
        "VLLM_PORT": "tcp://10.0.0.1:80",
        "PAGEWIRE_API_KEY": "own",
        "VLLM_RAY_PLACEMENT_GROUP": "x",
    }
    monkeypatch.setattr(environment, "_adopted", set())
    for _ in range(2):
        check_environment()
    taken = [name for name in names if name not in ("PAGEWIRE_PORT", "PAGEWIRE_API_KEY")]
    assert {name: os.environ.get(name) for name in names} == {
        **dict.fromkeys(taken, "0"),
        "PAGEWIRE_PORT": None,
        "PAGEWIRE_API_KEY": "own",
    }
    line, group = caplog.messages
    assert line == "read in place of PAGEWIRE_*: " + ", ".join(
        name.replace("PAGEWIRE_", "VLLM_") for name in taken
    )
    assert group.startswith("VLLM_RAY_PLACEMENT_GROUP has no effect: ")


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_true_or_false(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, value in {"1": True, "true": True, "True": True, "0": False, "false": False}.items():
        monkeypatch.setenv(name, text)
        assert env_flag(name) is value
    for text in ("yes", "2"):
        monkeypatch.setenv(name, text)
        with pytest.raises(ValueError, match=f"{name} must be 0 or 1, got '{text}'"):
            check_environment()


def test_the_tables_say_what_there_is() -> None:
    options = {field.name for kind in (EngineArgs, ServerOptions) for field in dataclasses.fields(kind)}
    assert not options & OPTIONS.keys()
    assert not {name.replace("PAGEWIRE_", "VLLM_") for name in READ} & VARIABLES.keys()
    named = {
        name
        for folder in ("cli", "engine_core", "frontend", "ipc", "kernels", "workers")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r'"(PAGEWIRE_[A-Z0-9_]*[A-Z0-9])"', path.read_text(encoding="utf-8"))
    }
    assert named == READ.keys()
    assert PATH.read_text(encoding="utf-8") == document(), "run python -m pagewire.cli.compatibility"
