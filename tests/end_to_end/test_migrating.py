"""Programs as vLLM's documents write them run once `vllm` is `pagewire` (tests/programs, docs/migrating.md).

Each program's options are checked as it gives them; its engine is then one of three that run already, of the demo.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import pagewire.demo
from pagewire import LLM
from pagewire.frontend.core import open_session
from pagewire.frontend.core.session import Session
from pagewire.ipc.options.engine_args import EngineArgs
from tests.end_to_end.conftest import SMALL_CORE, Daemon
from tests.end_to_end.http_server import Server

PROGRAMS = Path(__file__).parents[1] / "programs"
DEMO = Path(pagewire.demo.__file__).parent
OFFLINE = {  # program: its arguments
    "aqlm_example": ["-m", "some/model", "-t", "2"],
    "async_streaming": [],
    "llm_class": [],
    "llm_engine_example": [
        "--model",
        "TheBloke/Llama-2-7b-Chat-AWQ",
        "--quantization",
        "awq",
        "--max_model_len",
        "64",
    ],
    "multilora_inference": [],
    "offline_inference": [],
    "offline_inference_chat": [],
    "offline_inference_embedding": [],
    "offline_inference_with_prefix": [],
    "quantization": [],
    "save_sharded_state": ["--model", str(DEMO), "--quantization", "int8", "-o"],
    "speculation": [],
}
ONLINE = ("api_client", "openai_clients")


@pytest.fixture(scope="module")
def cores(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses of three engines, by what they do."""
    folder = tmp_path_factory.mktemp("cores")
    options = {
        "adapters": ("--enable-lora", "--max-lora-rank", "8"),
        "embeddings": ("--runner", "pooling", "--convert", "embed"),
    }
    daemons = [Daemon(f"ipc://{folder}/{name}.sock", *more) for name, more in options.items()]
    yield {"generation": address} | {
        name: daemon.address for name, daemon in zip(options, daemons, strict=True)
    }
    assert [daemon.stop() for daemon in daemons] == [0, 0]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A LoRA adapter of the demo model."""
    config = json.loads((DEMO / "config.json").read_text())
    size = config["num_attention_heads"] * config["head_dim"]
    shapes = {"lora_A": (4, config["hidden_size"]), "lora_B": (size, 4)}
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.{name}.weight": torch.full(shape, 0.01)
        for layer in range(config["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a program as a script, with `vllm` renamed in its imports."""
    path = PROGRAMS / f"{name}.py"
    source = re.sub(r"^from vllm\b", "from pagewire", path.read_text(), flags=re.MULTILINE)
    assert "import vllm" not in source
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    exec(compile(source, str(path), "exec"), {"__name__": "__main__"})


def test_there_is_a_row_for_every_program() -> None:
    names = {path.stem for path in PROGRAMS.glob("*.py")} - {"__init__"}
    assert names == {*OFFLINE, *ONLINE}
    text = (PROGRAMS.parents[1] / "docs" / "migrating.md").read_text()
    assert names == set(re.findall(r"`tests/programs/(\w+)\.py`", text))


@pytest.mark.parametrize("name", OFFLINE)
def test_a_program_runs(
    name: str, cores: dict[str, str], adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned = 0

    def spawn(args: EngineArgs, restarts: int = 0, stat_loggers: Any = None) -> Session:
        nonlocal spawned
        spawned += 1
        args.check()
        kind = "adapters" if args.enable_lora else "embeddings" if "e5" in args.model else "generation"
        return open_session.attach(cores[kind])

    monkeypatch.setattr(open_session, "spawn", spawn)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo_id: str(adapter))
    arguments = OFFLINE[name]
    run(name, *arguments, *[str(tmp_path / "out")] * (arguments[-1:] == ["-o"]), monkeypatch=monkeypatch)
    assert spawned
    if name == "save_sharded_state":
        assert list((tmp_path / "out").glob("*.safetensors"))
        with LLM.attach(cores["generation"]) as llm:
            for path in ("/", str(tmp_path / ".." / ".." / ".." / ".." / "elsewhere")):
                with pytest.raises(PermissionError, match="is not below"):
                    llm.collective_rpc("save_sharded_state", args=(path,))


def test_programs_run_against_the_server(
    start_server: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command line is that of the manual's draft model, with another proposer."""
    server = start_server(
        *("--host", "127.0.0.1", "--port", "0", "--model", "demo", "--seed", "42", "-tp", "1"),
        *("--speculative_model", "[ngram]", "--use-v2-block-manager", "--num_speculative_tokens", "5"),
        *("--gpu_memory_utilization", "0.8", *SMALL_CORE),
        module="pagewire.entrypoints.openai.api_server",
        environment={"VLLM_HEALTH_TIMEOUT_S": "20", "VLLM_USE_TRITON_AWQ": "1"},
    )
    run("openai_clients", server.url, monkeypatch=monkeypatch)
    run("api_client", "--host", "127.0.0.1", "--port", str(server.port), monkeypatch=monkeypatch)
    assert server.log.count("read in place of PAGEWIRE_*: VLLM_HEALTH_TIMEOUT_S") == 1
    assert "VLLM_USE_TRITON_AWQ has no effect: Triton is not used" in server.log
    status, body = server.request("POST", "/generate", {"prompt": "a", "echo": True})
    assert status == 400 and "use /v1/completions" in body["error"]["message"]
    monkeypatch.setattr(sys, "argv", ["api_server", "--help"])
    monkeypatch.delitem(sys.modules, "pagewire.entrypoints.api_server", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("pagewire.entrypoints.api_server", run_name="__main__")
    assert ended.value.code == 0 and "usage: pagewire serve" in capsys.readouterr().out
