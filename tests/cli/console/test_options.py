"""Options: help for people, one definition for all, files behind the command line, mistakes reported in a line."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagewire.cli.commands import build_parser
from pagewire.cli.console.options import engine_args, sampling_fields
from pagewire.cli.console.parser import UsageError
from pagewire.cli.main import main
from pagewire.ipc.compatibility import OPTIONS
from pagewire.ipc.options.engine_args import EngineArgs

ENGINE_COMMANDS = (
    "generate",
    "chat",
    "embed",
    "rerank",
    "core",
    "inspect",
    "bench latency",
    "bench throughput",
)
FIELDS = dataclasses.fields(EngineArgs)


def parsers(parser: argparse.ArgumentParser | None = None) -> Iterator[argparse.ArgumentParser]:
    """The parser of `pagewire` and of every command."""
    parser = parser or build_parser()
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


def parsed(*arguments: str) -> EngineArgs:
    return engine_args(build_parser().parse_args(["core", *arguments]))


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str | bytes], list[str]]:
    """The arguments that name a file with this text."""

    def write(text: str | bytes) -> list[str]:
        path = tmp_path / "engine.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return ["--config", str(path)]

    return write


def test_every_option_says_what_it_is() -> None:
    names = [parser.prog for parser in parsers()]
    assert names == [
        "pagewire",
        *(f"pagewire {c}" for c in ("generate", "chat", "transcribe", "embed", "rerank", "serve", "core")),
        *("pagewire route", "pagewire top", "pagewire pull", "pagewire rm", "pagewire list", "pagewire ps"),
        "pagewire run-batch",
    ] + [
        *("pagewire bench", *(f"pagewire bench {kind}" for kind in ("latency", "throughput", "serve"))),
        *("pagewire inspect", "pagewire quantize", "pagewire worker", "pagewire keys", "pagewire kernels"),
        "pagewire kernels build",
        *("pagewire doctor", "pagewire completion", "pagewire collect-env"),
    ]
    for parser in parsers():
        for action in parser._actions:
            if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
                continue
            assert action.help and re.match(
                r"[a-z'0-9]|JSON|NAME|YAML|CURVE|TLS|CORS|API|URL", action.help
            ), action
            assert not action.help.rstrip().endswith("."), action
            assert not action.option_strings or action.nargs == 0 or action.metavar or action.choices, action


@pytest.mark.parametrize("command", ENGINE_COMMANDS)
def test_engine_options_stand_in_the_groups_of_their_definition(command: str) -> None:
    (parser,) = (p for p in parsers() if p.prog == f"pagewire {command}")
    text = parser.format_help()
    for field in FIELDS:
        section = re.search(rf"^{field.metadata['group']} options:\n((?: .*\n|\n(?= ))+)", text, re.MULTILINE)
        assert section and f"  --{field.name.replace('_', '-')}" in section[1], field.name
        assert " ".join(field.metadata["help"].split()[:3]) in " ".join(section[1].split()), field.name
    for name in OPTIONS:
        assert name.replace("_", "-") not in text


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--enforce-eager"], "enforce_eager", True),
        (["--disable-sliding-window"], "disable_sliding_window", True),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--no-weight-cache"], "weight_cache", False),
        (["--block-size", "32"], "block_size", 32),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--hf-overrides", '{"a": [1]}'], "hf_overrides", {"a": [1]}),
        (["--rope-scaling", '{"factor": 2.0}'], "rope_scaling", {"factor": 2.0}),
        (["--rope-theta", "1e6"], "rope_theta", 1e6),
        (["--served-model-name", "a", "b"], "served_model_name", ["a", "b"]),
        (["--hf-token", "hf_abc"], "hf_token", "hf_abc"),
        (["--hf-token", "True"], "hf_token", True),
        (["--max-model-len=77"], "max_model_len", 77),
        (["--gpu_memory_utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--max_model_len=77"], "max_model_len", 77),
        (["--enable-prefix-caching=False"], "enable_prefix_caching", False),
        (["--enable_prefix_caching", "false"], "enable_prefix_caching", False),
        (["--no-weight_cache", "--weight-cache=true"], "weight_cache", True),
        (["--tensor-parallel-size", "1", "--no-enable-lora", "--kv-cache-dtype", "auto"], "model", "demo"),
    ],
)
def test_options_arrive_as_what_they_are(arguments: list[str], name: str, value: object) -> None:
    assert parsed(*arguments) == dataclasses.replace(EngineArgs(), **{name: value})


def test_the_command_line_goes_before_the_file_and_the_file_before_defaults(
    config: Callable[[str], list[str]],
) -> None:
    text = "max-num-seqs: 7\nmax_model_len: 99\nenable-prefix-caching: false\nhf-overrides: {a: 1}\n"
    file = dataclasses.replace(
        EngineArgs(), max_num_seqs=7, max_model_len=99, enable_prefix_caching=False, hf_overrides={"a": 1}
    )
    assert parsed(*config(text)) == file
    given = ["--max-model-len", "50", "--enable-prefix-caching"]
    both = dataclasses.replace(file, max_model_len=50, enable_prefix_caching=True)
    assert parsed(*config(text), *given) == parsed(*given, *config(text)) == both
    assert parsed(*config("# nothing\n")) == EngineArgs()
    # an alias in the file is no way round the command line
    text = "num_gpu_blocks_override: 3\nnum-gpu-blocks: 4\ntensor-parallel-size: 1"
    assert parsed(*config(text)).num_gpu_blocks_override == 4
    assert parsed(*config(text), "--num-gpu-blocks-override", "5").num_gpu_blocks_override == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_modellen: 5", r"unknown option 'max_modellen'; did you mean 'max_model_len'\?"),
        ("temperature: 0", "unknown option 'temperature'"),
        ("- a list", "must hold a mapping"),
        ("0", "must hold a mapping"),
        ("a: [", "cannot read .*: while parsing"),
        (b"model: \xff\n", "cannot read .*: 'utf-8'"),
        ("max_num_seqs: many", "max_num_seqs"),
        ("fully-sharded-loras: true", "fully_sharded_loras=True is not supported: it would"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(
    text: str | bytes, message: str, config: Callable[[str | bytes], list[str]]
) -> None:
    arguments = config(text)
    with pytest.raises(UsageError, match=message) as caught:
        parsed(*arguments, "--max-num-seqs", "5")
    assert arguments[1] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generat x", "pagewire: unknown command 'generat'; did you mean 'generate'?"),
        ("--modle generate x", "pagewire: unknown option '--modle'"),
        ("generate x --max-modellen 5", "unknown option '--max-modellen'; did you mean '--max-model-len'?"),
        ("generate x --no-enforce-eagr", "'--no-enforce-eagr'; did you mean '--no-enforce-eager'?"),
        ("generate x --max-tokns=5", "did you mean '--max-tokens'?"),
        ("core --max-tokns 5", "unknown option '--max-tokns' (see"),
        ("generate x --prompts y", "unknown option '--prompts' (see"),
        ("bench latency --num-promts 5", "unknown option '--num-promts'; did you mean '--num-prompts'?"),
        ("bench latency --num-iters 0", "argument --num-runs/--num-iters: must be at least 1, got 0"),
        ("benchmark", "unknown command 'benchmark'; it is pagewire bench"),
        ("run demo", "unknown command 'run'; it is pagewire chat"),
        ("serv", "unknown command 'serv'; did you mean 'serve'?"),
        ("keys --modle a b", "pagewire keys: unknown option '--modle' (see pagewire keys --help)"),
        ("collect-env now", "pagewire collect-env: unexpected argument 'now'"),
        ("generate x --seed few", "argument --seed: invalid int value: 'few'"),
        ("generate x --hf-overrides [1]", "argument --hf-overrides: must be a JSON object"),
        ("generate x --hf-overrides {", "argument --hf-overrides: not valid JSON"),
        ("bench latency --num-runs 0", "argument --num-runs/--num-iters: must be at least 1, got 0"),
        ("bench throughput --input-len x", "argument --input-len: invalid positive value: 'x'"),
        ("core --drain-seconds -1", "argument --drain-seconds: must be 0 or more"),
        ("core --drain-seconds nan", "argument --drain-seconds: must be 0 or more"),
        ("core --curve-secret a", "pagewire core: CURVE needs both"),
        ("generate x -pp 0", "pipeline_parallel_size must be in [1, 1024], got 0"),
        ("generate x -tp 0", "tensor_parallel_size must be in [1, 1024], got 0"),
        ("core -tp 2 --join-key x", "join_key needs distributed_executor_backend='join'"),
        ("worker --join ipc:///x", "pagewire worker: --join takes tcp://HOST:PORT"),
        ("doctor --rank 1", "pagewire doctor: --at and --rank need --distributed"),
        ("doctor --distributed --ranks 1", "pagewire doctor: --ranks must be at least 2"),
        ("doctor --distributed --rank 1", "pagewire doctor: --at and --rank go together"),
        ("core --quantization qqq", "quantization='qqq' is not supported: its layout belongs to"),
        ("core -q awk", "unknown quantization 'awk'; those known are aqlm, auto-round, awq, awq_mar"),
        ("core --fully-sharded-loras", "fully_sharded_loras=True is not supported: it would"),
        ("generate x --temperature -1", "pagewire generate: temperature must be in"),
        ("chat --top-p 2", "pagewire chat: top_p must be in"),
        ("generate x --block-size 24", "generate: block_size must be one of 8, 16, 32, 64, 128, got 24"),
        ("generate x --attach ipc:///x --max-num-seqs 4", "--max-num-seqs has no effect with --attach"),
        ("chat --attach ipc:///x --config y", "--config has no effect with --attach"),
        ("bench latency --attach ipc:///x --enable-lora", "--enable-lora has no effect with --attach"),
        ("generate x --attach ipc:///x --curve-server y", "both --curve-secret and --curve-server"),
        ("generate x --curve-secret y --curve-server z", "need --attach"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_status_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(arguments.split())
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "") and message in err
    assert err.startswith("pagewire") and err.count("\n") == 1


def test_sampling_options_are_those_that_were_given() -> None:
    def fields(*arguments: str) -> dict[str, object]:
        return sampling_fields(build_parser().parse_args(["generate", "x", *arguments]))

    assert fields() == {"max_tokens": 256}
    given = ["--stop", "a", "--stop", "b", "--seed", "3", "--ignore-eos", "--top-k", "0", "--max-tokens", "5"]
    assert fields(*given) == {
        "max_tokens": 5,
        "stop": ["a", "b"],
        "seed": 3,
        "ignore_eos": True,
        "top_k": 0,
    }
