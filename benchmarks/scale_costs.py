"""Measures what limits larger installations, for `benchmarks.scale_model`: core, frontend, sockets, sums, a worker.

    python -m benchmarks.scale_costs [--out FILE]     # under a minute on two processors

The core is a process of its own, with workers that answer at once (`instant_worker`). What is measured is the
processor time of the thread that runs its loop, so the result holds also where the processes of the measurement
share few processors: it is what a loop that is always busy handles in a second. The rates that were reached beside
it are given as well.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from pagewire.engine_core.clients.clients import RECEIVE_QUEUE, SEND_QUEUE, Clients
from pagewire.engine_core.config.config import EngineConfig
from pagewire.engine_core.wiring import open_core
from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.engine_core.workers.launchers.local import LocalLauncher
from pagewire.ipc.host.lifeline import Child, die_with_parent
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.codec import Codec
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import (
    PROTOCOL,
    Deltas,
    Hello,
    Ping,
    Pong,
    Request,
    Submit,
    ToFrontend,
    Welcome,
)
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.sockets import bind_router, connect_dealer, receive, send
from pagewire.ipc.wire.worker_messages import Parallel, Row, StepPlan, StepResult

RESULTS = Path(__file__).with_name("results")
INSTANT_WORKER = Path(__file__).with_name("instant_worker.py")
PROGRAM = (sys.executable, __file__)
ROWS = (16, 64, 256, 1024)  # of a step
RANKS = (2, 4, 8)  # of a group, beside one
RANK_ROWS = 256
MAX_MODEL_LEN, NUM_BLOCKS = 1 << 15, 1 << 16
PROMPT_TOKENS = 32
SUM_BYTES = tuple(1 << power for power in range(11, 25, 2))  # 2 KiB to 8 MiB
SLICES = 7  # of a measurement, of which the median is taken: other processes disturb some of them
REPEATS = 4  # of a sum, of which the fastest is taken
WAIT_MS = 20_000


# ---------------------------------------------------------------- a core


def run_core(address: str, ranks: int, lifeline_fd: int) -> None:
    """Serve at an address with workers that answer at once, until the parent has ended or closed the lifeline."""
    context: zmq.Context[Any] = zmq.Context()
    socket = bind_router(context, address, receive_queue=RECEIVE_QUEUE, send_queue=SEND_QUEUE)
    args = EngineArgs(
        model=str(Path(address.removeprefix("ipc://")).parent),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max(ROWS),
        tensor_parallel_size=ranks,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    config = EngineConfig(args, Path(args.model), {}, None)
    command = (sys.executable, str(INSTANT_WORKER), "--num-blocks", str(NUM_BLOCKS))
    workers = WorkerGroup(config.worker_config(), LocalLauncher(context, command))
    core = open_core(config, workers, Clients(socket, 60.0), lifeline_fd)
    core.on_ready = lambda: print("ready", flush=True)
    core.run()
    context.destroy(0)


@contextmanager
def child(*arguments: str) -> Iterator[Child]:
    """A process of this program, which is ready once it has printed a line."""
    process = Child([*PROGRAM, *arguments], stdout=subprocess.PIPE)
    try:
        assert process.process.stdout is not None
        if process.process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{arguments[0]} did not start")
        yield process
    finally:
        process.stop(5.0)


@contextmanager
def core_process(ranks: int = 1) -> Iterator[tuple[str, Callable[[], float]]]:
    """A core's address, and a function that returns the processor seconds of its loop's thread so far."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/core.sock"
        with child("core", address, str(ranks)) as core:
            times = Path(f"/proc/{core.pid}/task/{core.pid}/schedstat")  # its main thread runs the loop
            yield address, lambda: int(times.read_text().split()[0]) / 1e9


class Frontend:
    """A socket that submits requests and counts the tokens of its deltas; it keeps no text."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = connect_dealer(self._context, address, b"scale")
        self._codec: Codec[ToFrontend] = Codec(ToFrontend)
        self.num_tokens = self.num_ended = 0
        self.started: set[int] = set()
        self._say(Hello(PROTOCOL, "benchmark", os.getpid(), "scale"))
        while not isinstance(self._take(), Welcome):
            pass

    def submit(self, key: int, num_prompt: int, num_tokens: int) -> None:
        """Submit a request with a prompt of its own."""
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        tokens = [key % 30_000 + 10, key // 30_000 + 10, *[7] * (num_prompt - 2)]
        self._say(Submit([Request(key, f"request-{key}", Prompt(tokens), params, key)]))

    def receive(self) -> None:
        """Wait for a message of deltas, and count it."""
        message = self._take()
        while not isinstance(message, Deltas):
            message = self._take()
        self.num_tokens += len(message.token_ids)
        for delta in message.deltas:
            self.started.add(delta.key)
            self.num_tokens += len(delta.token_ids)
            self.num_ended += delta.finish_reason is not None
            if delta.error is not None:
                raise RuntimeError(delta.error)

    def close(self) -> None:
        """Close the socket; the core drops the requests."""
        self._context.destroy(0)

    def _say(self, message: Any) -> None:
        send(self._socket, self._codec.encode(message))

    def _take(self) -> ToFrontend:
        if not self._socket.poll(WAIT_MS):
            raise RuntimeError("the core says nothing")
        message = self._codec.decode(receive(self._socket))
        if isinstance(message, Pong):
            self._say(Ping())
        return message


def decoding(rows: int, ranks: int, seconds: float) -> dict[str, float]:
    """Rows per second of a core that plans, commits and delivers steps of `rows` rows, each one token.

    row_seconds: processor time of its loop for each row, the median of `SLICES` of the time. rows_per_s: what that
    allows. reached_rows_per_s: what was reached, with all processes of the measurement on this machine.
    """
    with core_process(ranks) as (address, processor_seconds):
        frontend = Frontend(address)
        for key in range(rows):
            frontend.submit(key, PROMPT_TOKENS, MAX_MODEL_LEN - PROMPT_TOKENS)
        while len(frontend.started) < rows:
            frontend.receive()
        parts = [slice_of(frontend, processor_seconds, seconds / SLICES) for _ in range(SLICES + 1)][1:]
        frontend.close()
    row_seconds = statistics.median(used / count for count, used, _ in parts)
    taken = sum(wall for _, _, wall in parts)
    return {
        "rows": rows,
        "ranks": ranks,
        "row_seconds": row_seconds,
        "rows_per_s": 1 / row_seconds,
        "reached_rows_per_s": sum(count for count, _, _ in parts) / taken,
        "loop_busy": sum(used for _, used, _ in parts) / taken,
    }


def slice_of(
    frontend: Frontend, processor_seconds: Callable[[], float], seconds: float
) -> tuple[int, float, float]:
    """Tokens that arrive within `seconds`, processor seconds of the core's loop meanwhile, and seconds taken."""
    count, used, begin = frontend.num_tokens, processor_seconds(), time.perf_counter()
    while time.perf_counter() < begin + seconds:
        frontend.receive()
    return frontend.num_tokens - count, processor_seconds() - used, time.perf_counter() - begin


def request_seconds(seconds: float) -> float:
    """Processor time of the core's loop for a request of 128 tokens that ends with its first one."""
    with core_process() as (address, processor_seconds):
        frontend = Frontend(address)
        number, used, begin = 0, processor_seconds(), time.perf_counter()
        while time.perf_counter() < begin + seconds:
            while number - frontend.num_ended < 256:
                frontend.submit(number, 128, 1)
                number += 1
            frontend.receive()
        while frontend.num_ended < number:
            frontend.receive()
        used = processor_seconds() - used
        frontend.close()
    return used / number


def frontend_seconds(repeats: int) -> float:
    """Processor time of a process with `LLM.generate`, without text, for each token of 256 prompts at a time."""
    from pagewire.frontend.api.llm import LLM

    params = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [key + 10] * PROMPT_TOKENS} for key in range(RANK_ROWS)]
    with core_process() as (address, _):
        llm = LLM.attach(address)
        used = time.process_time()
        for _ in range(repeats):
            llm.generate(prompts, params, use_tqdm=False)
        used = time.process_time() - used
        llm.shutdown()
    return used / (repeats * RANK_ROWS * 256)


def router_seconds(requests: int, length: int) -> float:
    """Processor time of a router's process, without HTTP, for each token that it takes from a core and gives on."""
    from benchmarks.closed_loop import run_requests
    from pagewire.frontend.route.engine import open_router
    from pagewire.frontend.route.places import running_place

    sizes = {"num_open": RANK_ROWS, "prompt_tokens": PROMPT_TOKENS, "output_tokens": length}
    with core_process() as (address, _):
        engine = open_router([running_place(address)])
        used = time.process_time()
        num_tokens = run_requests(engine.session, requests, **sizes)
        used = time.process_time() - used
        engine.shutdown()
    return used / num_tokens


# ---------------------------------------------------------------- a worker's socket


def echo(address: str) -> None:
    """Send back every message that comes, as the worker's end of the socket."""
    socket = connect_dealer(zmq.Context(), address, b"echo")
    print("ready", flush=True)
    while True:
        socket.send_multipart(socket.recv_multipart())


def socket_costs(count: int) -> dict[str, float]:
    """The socket between core and worker, with messages as large as those of a step of 256 rows.

    delay: half of a round trip. message_seconds: processor time of ZeroMQ's thread in the core for a message.
    messages_per_s: messages that the core's end sent and received, many at a time.
    """
    codec: Codec[Any] = Codec(Any)
    (plan,) = codec.encode(
        StepPlan(1 << 20, [Row(slot, 1000, 1, num_samples=1) for slot in range(RANK_ROWS)])
    )
    (result,) = codec.encode(StepResult(1 << 20, token_ids=[20_000] * RANK_ROWS))
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/echo.sock"
        context: zmq.Context[Any] = zmq.Context()
        socket = bind_router(context, address)
        with child("echo", address):
            trips = []
            for _ in range(count // 10):
                begin = time.perf_counter()
                exchange(socket, plan)
                trips.append(time.perf_counter() - begin)
            begin, threads = time.perf_counter(), other_threads_seconds()
            for number in range(count):
                send(socket, [b"echo", plan])
                if number >= 100:
                    receive(socket)
            for _ in range(100):
                receive(socket)
            taken, used = time.perf_counter() - begin, other_threads_seconds() - threads
        context.destroy(0)
    return {
        "plan_bytes": len(plan),
        "result_bytes": len(result),
        "delay": statistics.median(trips) / 2,
        "message_seconds": used / (2 * count),
        "messages_per_s": 2 * count / taken,
    }


def exchange(socket: zmq.Socket[bytes], plan: Any) -> None:
    """A message to the other end and back."""
    for _ in range(WAIT_MS):
        try:
            send(socket, [b"echo", plan])
            break
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # it has not connected yet
                raise
            socket.poll(1)
    receive(socket)


def other_threads_seconds() -> float:
    """Processor seconds so far of this process's threads other than the main one: those of ZeroMQ."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


# ---------------------------------------------------------------- sums of workers, and a worker's limits


def run_rank(rank: int, size: int, rendezvous: str) -> None:
    """Time sums of several sizes over the ranks of this machine; rank 0 prints the seconds of each as JSON."""
    import torch

    from pagewire.workers.ranks.open import open_collective
    from pagewire.workers.ranks.probe import check, seconds_of

    torch.set_num_threads(1)
    device = torch.device("cpu")
    place = Parallel(rank, size, rank, size, rendezvous)
    group = open_collective(place, device)
    check(group, device)
    table = {}
    for num_bytes in SUM_BYTES:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16)
        table[num_bytes] = min(seconds_of(lambda x=x: group.all_reduce(x), group) for _ in range(REPEATS))
    group.close()
    if rank == 0:
        print(json.dumps(table), flush=True)


def sum_seconds(size: int = 2) -> dict[int, float]:
    """Seconds of a sum over `size` ranks through shared memory, by its bytes."""
    name = f"pagewire-scale-{os.getpid()}"
    ranks = [
        Child([*PROGRAM, "rank", str(rank), str(size), name], stdout=subprocess.PIPE) for rank in range(size)
    ]
    try:
        output, _ = ranks[0].process.communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
    return {int(num_bytes): seconds for num_bytes, seconds in json.loads(output).items()}


def worker_rates() -> dict[str, float]:
    """What a worker on all processors of this machine reads and multiplies in a second, in bfloat16.

    read_rate: bytes, by a loop that only reads. flop_rate: operations of a product of 256 rows. kv_rate: bytes of
    keys and values, by attention of 64 sequences.
    """
    import torch

    from benchmarks.kernels_cpu import CASES, fastest, paged_call, product_calls
    from benchmarks.limits import measure_limits

    size, dtype = 4096, torch.bfloat16
    product = fastest(product_calls((size, size), RANK_ROWS, dtype), 1.0)
    case = next(case for case in CASES if case.name.startswith("decode, 64"))
    attention = fastest([paged_call(case, dtype, dtype)], 1.0)
    return {
        "read_rate": measure_limits().read_bytes_per_s,
        "flop_rate": 2 * RANK_ROWS * size * size / product,
        "kv_rate": 2 * case.kv_elements / attention,
    }


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of y = a + b x with the least squares of relative errors; a is not below 0."""
    weights = [1 / (y * y) for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    both = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = both / sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    if mean_y < slope * mean_x:
        slope = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / sum(
            w * x * x for w, (x, _) in zip(weights, points, strict=True)
        )
        return 0.0, slope
    return mean_y - slope * mean_x, slope


# ---------------------------------------------------------------- the program


def measure(seconds: float, http_token: float) -> dict[str, Any]:
    """All costs, as `benchmarks.scale_model` reads them, with what they follow from."""
    load = os.getloadavg()[0]
    steps = [decoding(rows, 1, seconds) for rows in ROWS]
    groups = [decoding(RANK_ROWS, ranks, seconds) for ranks in RANKS]
    core_step, core_row = line([(step["rows"], step["row_seconds"] * step["rows"]) for step in steps])
    alone = next(step["row_seconds"] for step in steps if step["rows"] == RANK_ROWS)
    further = [(group["row_seconds"] - alone) / (group["ranks"] - 1) for group in groups]
    request = request_seconds(seconds)
    socket = socket_costs(10_000)
    router = router_seconds(768, 64)
    sums = sum_seconds()
    latency, slope = line(list(sums.items()))
    from benchmarks.limits import processor

    return {
        "date": datetime.date.today().isoformat(),
        "processor": f"{processor()}, {os.cpu_count()} processors",
        "load_before": round(load, 2),
        "costs": {
            "core_step": core_step,
            "core_row": core_row,
            "core_rank_row": statistics.median(further),
            "core_request": max(0.0, request - core_row),
            "router_token": router,
            "http_token": http_token,
            "socket_delay": socket["delay"],
            "socket_message": socket["message_seconds"],
        },
        "shared_memory": {"latency": latency, "bandwidth": 1 / slope},
        "worker": worker_rates(),
        "measured": {
            "core": [*steps, *groups],
            "frontend_token": frontend_seconds(4),
            "socket": socket,
            "sum_seconds": sums,
        },
    }


def main() -> None:
    """Measure, or be one of the processes of the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--lifeline", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=1.5, help="for which each core is measured")
    parser.add_argument(
        "--http-us",
        type=float,
        default=75.0,
        help="server time of a token over HTTP, as `benchmarks.route overhead` prints it",
    )
    parser.add_argument("--out", type=Path, help="default: scale-costs-DATE.json in benchmarks/results")
    options = parser.parse_args()
    if options.part:
        name, *arguments = options.part
        if name == "core":
            run_core(arguments[0], int(arguments[1]), options.lifeline)
            return
        die_with_parent(options.lifeline)
        if name == "echo":
            echo(arguments[0])
        elif name == "rank":
            run_rank(int(arguments[0]), int(arguments[1]), arguments[2])
        return
    costs = measure(options.seconds, options.http_us * 1e-6)
    out = options.out or RESULTS / f"scale-costs-{costs['date']}.json"
    out.write_text(json.dumps(costs, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(costs, indent=1))


if __name__ == "__main__":
    main()
