"""KV blocks on disk: engines that end, are killed, or run out of memory find their prefixes again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pagewire import LLM, SamplingParams
from pagewire.ipc.options.engine_args import EngineArgs

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
PROMPTS = [[Random(number).randrange(300, 2000) for _ in range(330)] for number in range(4)]
CACHED = 320  # whole blocks, without the last token's
TINY = {"num_gpu_blocks_override": 64, "max_model_len": 1024}  # room for two of the prompts, or a little more


def engine(folder: Path | None, **options: Any) -> LLM:
    where = {} if folder is None else {"kv_cache_dir": str(folder)}
    return LLM("demo", device="cpu", dtype="float32", num_threads=1, **where, **options)


def run(
    llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> tuple[list[list[int]], list[int]]:
    """Tokens, and how many of each prompt were cached."""
    outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    return [list(o.outputs[0].token_ids) for o in outputs], [o.num_cached_tokens or 0 for o in outputs]


def events(llm: LLM) -> dict[str, float]:
    """Blocks by what became of them."""
    rows = [
        row for row in llm.session.call("metrics").result() if row["name"] == "pagewire:kv_tier_blocks_total"
    ]
    return {row["labels"]["event"]: row["value"] for row in rows}


def gauges(llm: LLM) -> dict[str, float]:
    """The metrics of swapped requests and of the second tier, by vLLM's names."""
    names = ("num_requests_swapped", "cpu_cache_usage_perc", "cpu_prefix_cache_hit_rate")
    rows = {row["name"]: row.get("value") for row in llm.session.call("metrics").result()}
    return {name: rows[f"vllm:{name}"] for name in names}


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[str, list[list[int]]]]:
    """What an engine without a tier generates, cold."""
    with engine(None, enable_prefix_caching=False) as llm:
        yield {"greedy": run(llm, PROMPTS)[0], "seeded": run(llm, PROMPTS, SEEDED)[0]}
        assert set(gauges(llm).values()) == {0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, expected: dict[str, list[list[int]]]) -> Path:
    """The folder of an engine that has run all prompts, and ended."""
    folder = tmp_path_factory.mktemp("saved") / "tier"
    with engine(folder) as llm:
        assert run(llm, PROMPTS) == (expected["greedy"], [0] * 4)
    return folder


def test_a_restart_forgets_nothing(saved: Path, expected: dict[str, list[list[int]]]) -> None:
    with engine(saved) as llm:
        assert run(llm, PROMPTS) == (expected["greedy"], [CACHED] * 4)
        assert events(llm)["hit"] == events(llm)["read"] == 4 * CACHED // 16
        told = gauges(llm)
        assert told["num_requests_swapped"] == 0
        assert 0 < told["cpu_cache_usage_perc"] < 0.1, "a few blocks of a quota of 20 GiB"
        assert told["cpu_prefix_cache_hit_rate"] == CACHED / 330
        assert run(llm, PROMPTS, SEEDED) == (expected["seeded"], [CACHED] * 4)
        assert events(llm)["read"] == 4 * CACHED // 16  # the second time from memory
        assert llm.reset_prefix_cache()
        assert run(llm, PROMPTS[:1]) == (expected["greedy"][:1], [0])


def test_evicted_prefixes_come_back(tmp_path: Path, expected: dict[str, list[list[int]]]) -> None:
    with engine(tmp_path / "tier", **TINY) as llm:
        assert run(llm, PROMPTS) == (expected["greedy"], [0] * 4)
        for _ in range(3):
            assert run(llm, PROMPTS) == (expected["greedy"], [CACHED] * 4)
        assert events(llm)["written"] >= 2 * CACHED // 16
        assert events(llm)["unreadable"] == events(llm)["dropped"] == 0
        # All at once: each waits for its prefix while others run.
        outputs = llm.generate(PROMPTS * 3, GREEDY, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected["greedy"] * 3


def test_a_killed_worker_reads_its_prefixes_again(
    tmp_path: Path, expected: dict[str, list[list[int]]]
) -> None:
    with engine(tmp_path / "tier", **TINY) as llm:
        run(llm, PROMPTS)
        os.kill(llm.session.call("status").result()["worker_pid"], signal.SIGKILL)
        assert run(llm, PROMPTS) == (expected["greedy"], [CACHED, 0, 0, 0])  # the first was evicted before


KILLED = """
import os, signal, sys
from tests.end_to_end.test_tiers import PROMPTS, TINY, Path, engine, run
llm = engine(Path(sys.argv[1]), **TINY)
run(llm, PROMPTS)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_engine_leaves_what_was_evicted(
    tmp_path: Path, expected: dict[str, list[list[int]]]
) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "tier")], cwd=root, check=False)
    assert done.returncode == -signal.SIGKILL
    with engine(tmp_path / "tier", **TINY) as llm:
        assert run(llm, PROMPTS) == (expected["greedy"], [CACHED, 0, 0, 0])


def test_damage_is_a_miss(tmp_path: Path, expected: dict[str, list[list[int]]]) -> None:
    folder = tmp_path / "tier"
    with engine(folder) as llm:
        run(llm, PROMPTS)
    random = Random(3)
    for path in folder.rglob("*.kv"):
        data = bytearray(path.read_bytes())
        for _ in range(12):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        path.write_bytes(data)
    with engine(folder) as llm:
        tokens, cached = run(llm, PROMPTS)
        assert tokens == expected["greedy"]
        assert 0 < sum(cached) < 4 * CACHED and events(llm)["unreadable"] > 0
    with engine(folder) as llm:  # what was computed was written again
        assert run(llm, PROMPTS) == (expected["greedy"], [CACHED] * 4)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_each_worker_of_a_group_keeps_its_part(
    tmp_path: Path, expected: dict[str, list[list[int]]], name: str
) -> None:
    """What is evicted comes back, a restart forgets nothing, and a part that is damaged is a miss for all."""
    folder, group = tmp_path / "tier", TINY | {name: 2}
    with engine(folder, **group) as llm:
        tokens, cached = run(llm, PROMPTS)
        assert cached == [0] * 4 and run(llm, PROMPTS) == (tokens, [CACHED] * 4)
        assert events(llm)["unreadable"] == events(llm)["dropped"] == 0
    if name == "pipeline_parallel_size":  # with shards, sums have another order
        assert tokens == expected["greedy"]
    with engine(folder, **group) as llm:
        assert run(llm, PROMPTS) == (tokens, [CACHED] * 4)
    ranks = sorted(path for path in folder.iterdir() if path.is_dir())
    assert len(ranks) == 2
    for path in ranks[0].iterdir():
        path.unlink()
    with engine(folder, **group) as llm:
        assert run(llm, PROMPTS) == (tokens, [0] * 4)


def test_other_models_and_layouts_find_nothing(saved: Path) -> None:
    with engine(saved, block_size=32) as llm:
        assert run(llm, PROMPTS[:1])[1] == [0]
    with engine(saved, hf_overrides={"rope_theta": 5000.0}) as llm:
        assert run(llm, PROMPTS[:1])[1] == [0]
    for codes in ("int8", "int4"):
        with engine(saved, kv_cache_dtype=codes) as llm:
            assert run(llm, PROMPTS[:1])[1] == [0]
            assert run(llm, PROMPTS[:1])[1] == [CACHED]
        with engine(saved, kv_cache_dtype=codes) as llm:
            assert run(llm, PROMPTS[:1])[1] == [CACHED]
    assert len([path for path in saved.iterdir() if path.is_dir()]) == 5


def test_two_engines_share_a_folder(tmp_path: Path, expected: dict[str, list[list[int]]]) -> None:
    folder = tmp_path / "tier"
    with engine(folder) as one, engine(folder) as other:
        assert run(one, PROMPTS[:2])[1] == run(other, PROMPTS[1:3])[1] == [0, 0]
    with engine(folder) as llm:
        assert run(llm, PROMPTS[:3]) == (expected["greedy"][:3], [CACHED] * 3)


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    for options, text in (
        ({"enable_prefix_caching": False}, "enable_prefix_caching=False: without it no block is found"),
        ({"device": "cuda"}, "device='cuda': blocks of a GPU's memory cannot be kept yet"),
        ({"worker_extension": "a.b"}, "worker_extension: it may change the weights"),
        ({"trust_remote_code": True}, "trust_remote_code: nobody can tell"),
        ({"load_format": "dummy"}, "load_format='dummy': another start has other weights"),
        ({"speculative_model": "demo", "num_speculative_tokens": 2}, "a model that proposes tokens: its own"),
    ):
        with pytest.raises(ValueError, match=f"kv_cache_dir does not go with {text}"):
            EngineArgs.from_kwargs({"model": "demo", "kv_cache_dir": str(tmp_path), **options})
    with pytest.raises(ValueError, match="kv_cache_disk needs kv_cache_dir"):
        EngineArgs.from_kwargs({"model": "demo", "kv_cache_disk": "1GiB"})
    with pytest.raises(ValueError, match="kv_cache_disk must be a size such as"):
        EngineArgs.from_kwargs({"model": "demo", "kv_cache_dir": str(tmp_path), "kv_cache_disk": "lots"})
    with pytest.raises(ValueError, match=r"kv_cache_disk: 1,000,000 bytes do not hold two blocks"):
        engine(tmp_path / "tier", kv_cache_disk="1MB", block_size=128, max_model_len=1024)
    with pytest.raises(ValueError, match="blocks of pictures and sounds cannot be kept elsewhere yet"):
        LLM("demo-vision", device="cpu", kv_cache_dir=str(tmp_path / "tier"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"kv_cache_dir: .*file cannot be used"):
        engine(tmp_path / "file")
