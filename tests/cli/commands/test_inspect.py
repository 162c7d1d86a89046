"""`pagewire inspect`: figures for people and for programs, at once, and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pagewire.cli.main import main
from pagewire.workers.device.gpu_memory import CONTEXT_BYTES, attention_scratch
from pagewire.workers.device.machine import GPU_DRIVER
from tests.workers import pooled
from tests.workers.architectures import SERVED
from tests.workers.huge import write_huge

TABLE = ("embedding", "attention", "feed-forward", "output", "norms")
CPU = ("--device", "cpu")
GPU = ("--gpu-memory", "24GiB")


def test_figures_are_given_without_torch() -> None:
    program = """if True:
        import sys
        from pagewire.cli.main import main
        status = main(["inspect", "demo", "--device", "cpu", "--json"])
        assert not {"torch", "transformers", "numpy"} & sys.modules.keys()
        sys.exit(status)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["model"], found["form"], found["dtype"], found["fits"]) == (
        *("demo", "safetensors", "bfloat16", True),
    )
    assert found["parameters"] == sum(part["parameters"] for part in found["parts"]) == 4_000_000
    assert found["file_bytes"] == 8_000_000
    assert found["kv_token_bytes"] == 2 * found["dimensions"]["kv_elements"]
    assert found["memory"]["resident_bytes"] > found["memory"]["weight_bytes"] + found["memory"]["kv_bytes"]
    assert found["speed"]["read_rate"] > 1e8 and found["speed"]["token_seconds"] > 0


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "demo", *CPU, "--max-model-len", "512", "--num-threads", "1"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines() if line.startswith(TABLE)] == list(TABLE)
    assert "4,000,000 parameters, not quantised; run in bfloat16" in text
    assert "256.0 requests of 512" in text and "and 1 threads read" in text
    assert "fits      yes: " in text


def test_how_the_layers_will_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "demo", *CPU]) == 0
    assert "; the layers run as a stack\n" in capsys.readouterr().out
    assert main(["inspect", "demo", *CPU, "--road"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("road"))
    assert line.startswith("road      the layers run as a stack; steps that only decode are ")
    assert main(["inspect", "demo", *CPU, "--road", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["road"] == line.removeprefix("road").strip()
    assert main(["inspect", "demo", *CPU, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["road"] is None


@pytest.mark.parametrize(("name", "says"), [("diffllama", True), ("bert", False)])
def test_headers_do_not_say_how_an_encoder_runs(
    name: str, says: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = SERVED[name].write(tmp_path) if says else pooled.write(tmp_path, name)
    assert main(["inspect", str(folder), *CPU]) == 0
    text = capsys.readouterr().out
    assert ("; the layers run as transformers' module (--road says why)" in text) == says
    assert ("the layers run" in text) == says


def test_workers_that_share_a_machine_share_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    def total(*options: str) -> int:
        assert main(["inspect", "demo", *CPU, "--num-threads", "1", "--json", *options]) == 0
        return int(json.loads(capsys.readouterr().out)["memory"]["total_bytes"])

    alone = total()
    assert total("-tp", "2") == alone // 2
    assert total("-tp", "2", "--distributed-executor-backend", "join") == alone
    assert main(["inspect", "demo", *CPU, "-tp", "2"]) == 0
    assert "workers   2, which share this machine" in capsys.readouterr().out


def test_a_model_that_does_not_fit_has_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_huge(tmp_path))
    assert main(["inspect", folder, *CPU]) == 1
    assert "fits      no: its weights take 1536" in capsys.readouterr().out
    assert main(["inspect", folder, *CPU, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("demo", "--model", "demo"), 2, "give MODEL or --model, not both"),
        (("demo", "--gpu-memory", "80GiB", *CPU), 2, "--gpu-memory is about GPUs"),
        (("demo", "--road", *GPU), 2, "--road is about CPUs"),
        (("demo", "--road", "-tp", "2", *CPU), 2, "--road is about one worker"),
        (("demo", "--gpu-memory", "80"), 2, "must be a size such as 80GiB, 81559MiB or 24GB, up to 16384GiB"),
        (("demo", "--gpu-memory", "0GiB"), 2, "must be a size such as 80GiB"),
        (("demo", "--gpu-memory", "9" * 400), 2, f"got '{'9' * 40}'"),
        (("demo", *GPU, "--load-format", "dummy"), 2, "has no headers to read"),
        (("demo", *GPU, "--kv-cache-dtype", "int8"), 2, "int8 is for CPUs: fp8 has 8 bits on GPUs"),
        (("demo", *GPU, "--kv-cache-dtype", "int4"), 2, "int4 is for CPUs: fp8 has 8 bits on GPUs"),
        (("demo", *GPU, "--kv-cache-dtype", "fp8", "--dtype", "float32"), 2, "not float32"),
        (("/nowhere", *GPU), 1, "no model folder /nowhere"),
        (("demo", "--load-format", "dummy", *CPU), 2, "has no headers to read"),
        (("/nowhere", *CPU), 1, "no model folder /nowhere"),
    ],
)
def test_what_cannot_be_inspected_is_said(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, message: str
) -> None:
    assert main(["inspect", *arguments]) == status
    assert message in capsys.readouterr().err


def test_a_folder_without_weights_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["inspect", str(tmp_path), *CPU]) == 1
    assert "holds neither model.safetensors" in capsys.readouterr().err


def test_a_gpu_need_not_be_there_and_torch_is_not_imported() -> None:
    program = """if True:
        import sys
        from pagewire.cli.main import main
        status = main(["inspect", "demo", "--device", "cuda", "--gpu-memory", "24GiB", "--json"])
        assert not {"torch", "transformers", "numpy"} & sys.modules.keys()
        sys.exit(status)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["device"], found["fits"], found["is_stack"]) == ("cuda", True, True)
    memory, total = found["memory"], 24 << 30
    assert memory.pop("total") == total == sum(memory.values())
    assert memory["weights"] == found["weight_bytes"] == 2 * 4_000_000
    assert found["requests"] == {"1024": 256}


def test_how_the_memory_of_a_gpu_is_shared_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "demo", *GPU, "-tp", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "workers   2, with a GPU each; memory is that of one" in lines
    assert "memory    of a GPU of 24GiB; activations, context and graphs are estimates:" in lines
    parts = [line.split() for line in lines if line.startswith(" " * 10)]
    names = ["reserve", "context", "weights", "tables", "scratch", "activations", "graphs", "kv"]
    assert [part[0] for part in parts] == names
    assert ["reserve", "2.40", "GiB", "by", "gpu_memory_utilization"] in parts
    assert "requests  at a time: 256 of 1,024 tokens" in lines and lines[-1] == "fits      yes"
    [output] = [line for line in lines if line.startswith("output")]
    assert output.endswith("bfloat16, that of the embedding")


def test_a_model_that_no_gpu_has_room_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_huge(tmp_path))
    assert main(["inspect", folder, "--gpu-memory", "1000GiB"]) == 1
    out = capsys.readouterr().out
    assert "fits      no: the parts take 639" in out and "it would with --tensor-parallel-size 2 (768" in out
    assert main(["inspect", folder, *GPU, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and "more than there is" in found["problem"]


@pytest.mark.skipif(GPU_DRIVER.exists(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_without_a_gpu_its_memory_must_be_given(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "demo", "--device", device]) == 2
    message = capsys.readouterr().err
    assert f"({device} is not here): give --gpu-memory SIZE, such as 80GiB, or --device cpu" in message


def test_the_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By what PyTorch says of it: also what other processes hold."""
    gib = 1 << 30
    properties = SimpleNamespace(name="NVIDIA Test", multi_processor_count=10)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((10 + index) * gib, 24 * gib))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert main(["inspect", "demo", "--device", "cuda:1", "--json"]) == 0
    here = json.loads(capsys.readouterr().out)["memory"]
    assert main(["inspect", "demo", *GPU, "--json"]) == 0
    named = json.loads(capsys.readouterr().out)["memory"]
    assert here["others"] == 13 * gib - CONTEXT_BYTES and here["total"] == named["total"]
    assert here["scratch"] - named["scratch"] == attention_scratch(10) - attention_scratch(132)
    assert main(["inspect", "demo", "--device", "cuda"]) == 0
    assert "memory    of NVIDIA Test (cuda:0); activations" in capsys.readouterr().out
