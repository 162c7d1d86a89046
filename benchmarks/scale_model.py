"""Tokens per second of larger installations, simulated from measured costs, and what limits them.

    python -m benchmarks.scale_model                                            # a Llama of 8B, measured workers
    python -m benchmarks.scale_model --model 70b --read-gbs 3350 --tflops 600   # workers with these limits
    python -m benchmarks.scale_model --latency-us 20 --bandwidth-gbs 12.5       # one network between ranks

The costs come from `benchmarks.scale_costs`, which measures them; the newest file in `benchmarks/results` is read.
Only decoding is simulated: every row of a step computes one token. Nothing here reads a clock, so the results are
the same everywhere.

A step goes round in a circle: the core plans it, a socket carries it to the workers, each stage of the pipeline
computes its layers, the socket carries the result back, and the core commits it. `period` lets several steps go
round this circle, and nothing overtakes: so the slowest station, or the time once around divided by the number of
steps in flight, decides.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagewire.workers.estimate.figures import REACHED, STACK_LAYER_SECONDS, STEP_SECONDS

RESULTS = Path(__file__).with_name("results")
SIZES = (1, 2, 4, 8)  # ranks over which a layer is divided
STAGES = (1, 2, 3, 4)
CORES = (1, 2, 4, 8, 16, 32, 64)
DEPTH = 2  # steps in flight of the engine, as `SchedulerConfig.depth`
TWO_EXCHANGES_BYTES = (
    1 << 16
)  # from this size on, a sum takes two exchanges (`workers.collective.distributed`)
STEADY_ROUNDS = 64


# ---------------------------------------------------------------- what is simulated


@dataclass(frozen=True)
class Model:
    """The sizes of a dense decoder as config.json has them; weights, keys and values of `bytes_per_number`."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    bytes_per_number: float = 2.0

    @classmethod
    def read(cls, path: Path) -> Model:
        """The model of a folder with a config.json.

        Raises:
            OSError: it cannot be read. KeyError: it lacks a size.
        """
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        return cls(
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads", heads),
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
        )

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of a layer: attention, gate, up and down."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of the keys and values of a token in a layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.bytes_per_number


MODELS = {
    "300m": Model(1024, 2816, 24, 16, 8, 64, 32_000),
    "1b": Model(2048, 8192, 16, 32, 8, 64, 32_000),
    "8b": Model(4096, 14336, 32, 32, 8, 128, 128_256),
    "70b": Model(8192, 28672, 80, 64, 8, 128, 128_256),
}


@dataclass(frozen=True)
class Network:
    """What connects ranks. latency: seconds of an exchange. bandwidth: bytes per second that a rank receives."""

    latency: float
    bandwidth: float

    def exchange_seconds(self, num_bytes: float, ranks: int) -> float:
        """Every rank gets `num_bytes` from each other one."""
        return 0.0 if ranks == 1 else self.latency + (ranks - 1) * num_bytes / self.bandwidth

    def sum_seconds(self, num_bytes: float, ranks: int) -> float:
        """A sum of `num_bytes` over ranks, as `DistributedGroup.all_reduce` exchanges them."""
        if ranks <= 2 or num_bytes < TWO_EXCHANGES_BYTES:
            return self.exchange_seconds(num_bytes, ranks)
        return 2 * self.exchange_seconds(num_bytes / ranks, ranks)


@dataclass(frozen=True)
class Worker:
    """The limits of one rank, which shares its memory with no other.

    read_rate: bytes per second that it reads. flop_rate: operations per second of a product of many rows.
    kv_rate: bytes per second of keys and values, of many sequences.
    reached: the share of the reading rate that products reach. step_seconds: what a step takes beside its layers.
    layer_seconds: what a layer takes beside what it reads and multiplies.
    """

    read_rate: float
    flop_rate: float
    kv_rate: float
    reached: float = REACHED["float16"]
    step_seconds: float = STEP_SECONDS
    layer_seconds: float = STACK_LAYER_SECONDS


@dataclass(frozen=True)
class Costs:
    """Seconds of the processes that compute no layers, as `benchmarks.scale_costs` measures them.

    core_step, core_row: of the core's loop for a step, and for each of its rows, with one worker.
    core_rank_row: for each row with each further rank, which answers as well.
    core_request: for a request beside its rows. router_token: of a router for a token, without HTTP.
    http_token: of a server or router for a token over HTTP, each an event of its own.
    socket_delay: one way between core and worker. socket_message: of the socket's thread for a message.
    """

    core_step: float
    core_row: float
    core_rank_row: float
    core_request: float
    router_token: float
    http_token: float
    socket_delay: float
    socket_message: float

    def core_seconds(self, rows: float, ranks: int, tokens_per_request: float) -> float:
        """The core's loop for a step: its plan, its commit, its delivery, and its share of new requests."""
        row = self.core_row + (ranks - 1) * self.core_rank_row + self.core_request / tokens_per_request
        return self.core_step + rows * row


@dataclass(frozen=True)
class Work:
    """What is asked for: rows that decode in each core, tokens of context of each, tokens of an answer."""

    rows: int = 256
    context: int = 512
    answer: int = 256


# ---------------------------------------------------------------- one engine


@dataclass(frozen=True)
class Station:
    """A place on the circle of a step. shared: it serves one step at a time; else all pass beside each other."""

    name: str
    seconds: float
    shared: bool = True


@dataclass(frozen=True)
class Rate:
    """Tokens per second, and what limits them. busy: the share of the time in which each process works."""

    tokens: float
    limit: str
    busy: dict[str, float]


def period(stations: Sequence[Station], depth: int, rounds: int = STEADY_ROUNDS) -> float:
    """Seconds from one step to the next, with `depth` steps on their way, once all is steady."""
    free = [0.0] * len(stations)
    ends: list[float] = []
    for number in range(2 * rounds * depth):
        now = ends[number - depth] if number >= depth else 0.0
        for index, station in enumerate(stations):
            now = (max(now, free[index]) if station.shared else now) + station.seconds
            free[index] = now
        ends.append(now)
    return (ends[-1] - ends[rounds * depth - 1]) / (rounds * depth)


def stage_parts(
    model: Model,
    worker: Worker,
    network: Network,
    work: Work,
    *,
    ranks: int = 1,
    stages: int = 1,
    rows: float,
) -> dict[str, float]:
    """Seconds of one stage in a step of `rows` rows, by what takes them.

    The ranks of a stage read, or multiply with, their part of its weights, and read their part of keys and values.
    Each layer has two sums over the ranks, the embedding one more, and the logits are gathered. All stages are as
    slow as that with the most layers; what embedding and output layer take is spread over them.
    """
    layers = math.ceil(model.num_layers / stages)
    output = model.hidden_size * model.vocab_size / stages
    weights = (layers * model.layer_weights + output) / ranks
    reading = weights * model.bytes_per_number / (worker.read_rate * worker.reached)
    multiplying = 2 * rows * weights / worker.flop_rate
    kv = rows * work.context * layers * model.kv_token_bytes / min(ranks, model.num_kv_heads)
    row_bytes = model.hidden_size * model.bytes_per_number
    sums = (2 * layers + 1 / stages) * network.sum_seconds(rows * row_bytes, ranks)
    logits = rows * model.vocab_size * model.bytes_per_number / ranks
    return {
        "weights": reading if reading >= multiplying else 0.0,
        "products": multiplying if multiplying > reading else 0.0,
        "keys and values": kv / worker.kv_rate,
        "network": sums + network.exchange_seconds(logits, ranks) / stages,
        "calls": worker.step_seconds + layers * worker.layer_seconds,
    }


def engine_rate(
    model: Model, worker: Worker, network: Network, costs: Costs, work: Work, ranks: int = 1, stages: int = 1
) -> Rate:
    """Tokens per second of one core with `ranks` x `stages` workers.

    With one stage, the next step is planned while one runs, so a sequence is in both. With several, a sequence's
    next token waits for its last one, so the sequences are divided among as many steps as there are stages. Only
    the last stage answers with rows.
    """
    rows = work.rows / stages
    parts = stage_parts(model, worker, network, work, ranks=ranks, stages=stages, rows=rows)
    between = network.exchange_seconds(rows * model.hidden_size * model.bytes_per_number, 2)
    stations = [
        Station("core", costs.core_seconds(rows, ranks, work.answer)),
        Station("socket", 2 * ranks * stages * costs.socket_message),
        Station("delay", 2 * costs.socket_delay, shared=False),
    ]
    for number in range(stages):
        if number:
            stations.append(Station("delay", between, shared=False))
        stations.append(Station("workers", sum(parts.values())))
    seconds = period(stations, DEPTH if stages == 1 else stages)
    busy = {station.name: station.seconds / seconds for station in stations if station.shared}
    name = max(busy, key=lambda name: busy[name])
    if busy[name] < 0.99:
        name = "round trip"
    limit = f"workers: {max(parts, key=lambda part: parts[part])}" if name == "workers" else name
    return Rate(rows / seconds, limit, busy)


# ---------------------------------------------------------------- several engines


def installation_rate(engine: Rate, cores: int, routers: int, token_seconds: float) -> Rate:
    """Tokens per second of several cores behind routers, of which each takes `token_seconds` for a token."""
    offered, passed = cores * engine.tokens, routers / token_seconds
    share = min(1.0, passed / offered)  # the cores wait for a router that is saturated
    busy = {name: share * value for name, value in engine.busy.items()} | {"router": share * offered / passed}
    return Rate(share * offered, engine.limit if offered <= passed else "router", busy)


def limits(costs: Costs, work: Work) -> dict[str, float]:
    """Tokens per second at which each process is saturated, by its name."""
    table = {}
    for ranks in SIZES:
        seconds = costs.core_seconds(work.rows, ranks, work.answer)
        table[f"core, {work.rows} rows a step, {ranks} rank(s)"] = work.rows / seconds
    for ranks in SIZES:
        table[f"worker socket, {ranks} rank(s)"] = work.rows / (2 * ranks * costs.socket_message)
    table["router without HTTP"] = 1 / costs.router_token
    table["server or router over HTTP"] = 1 / costs.http_token
    return table


# ---------------------------------------------------------------- the program


def newest_costs() -> Path:
    """The file of the newest measured costs.

    Raises:
        FileNotFoundError: there is none.
    """
    files = sorted(RESULTS.glob("scale-costs-*.json"))
    if not files:
        raise FileNotFoundError(f"no scale-costs-*.json in {RESULTS}: run python -m benchmarks.scale_costs")
    return files[-1]


def networks(measured: dict[str, Any], options: argparse.Namespace) -> dict[str, Network]:
    """The networks to simulate, by name: that of the options, or a few; shared memory for measured workers only."""
    if options.latency_us is not None:
        name = f"{options.latency_us:g} us, {options.bandwidth_gbs:g} GB/s"
        return {name: Network(options.latency_us * 1e-6, options.bandwidth_gbs * 1e9)}
    local = {} if options.read_gbs is not None else {"shared memory": Network(**measured["shared_memory"])}
    return local | {
        "2 us, 400 GB/s": Network(2e-6, 400e9),
        "10 us, 50 GB/s": Network(10e-6, 50e9),
        "30 us, 12.5 GB/s": Network(30e-6, 12.5e9),
        "100 us, 1.25 GB/s": Network(100e-6, 1.25e9),
        "1 ms, 0.125 GB/s": Network(1e-3, 0.125e9),
    }


def show(rows: Sequence[tuple[str, Sequence[Rate]]], columns: Sequence[str]) -> None:
    """Print a table of rates, with the limit of each."""
    print(f"{'':28}" + "".join(f"{column:>28}" for column in columns))
    for name, rates in rows:
        cells = (f"{rate.tokens:,.0f} ({rate.limit.removeprefix('workers: ')})" for rate in rates)
        print(f"{name:28}" + "".join(f"{cell:>28}" for cell in cells))
    print()


def report(measured: dict[str, Any], options: argparse.Namespace) -> None:
    """Print all tables."""
    model = MODELS.get(options.model) or Model.read(Path(options.model))
    model = replace(model, bytes_per_number=options.bits / 8)
    rates = dict(measured["worker"])
    if options.read_gbs is not None:
        rates = dict.fromkeys(("read_rate", "kv_rate"), options.read_gbs * 1e9)
        rates["flop_rate"] = options.tflops * 1e12
    worker, costs = Worker(**rates), Costs(**measured["costs"])
    work = Work(options.rows, options.context, options.answer)
    links = networks(measured, options)

    def engine(link: Network, ranks: int, stages: int = 1) -> Rate:
        return engine_rate(model, worker, link, costs, work, ranks, stages)

    print(f"costs of {measured['processor']}, {measured['date']}")
    print(
        f"{options.model}, {options.bits} bits, workers of {rates['read_rate'] / 1e9:.0f} GB/s and "
        f"{rates['flop_rate'] / 1e12:.2f} TFLOP/s; {work.rows} rows of {work.context} tokens in each core\n"
    )
    print("Tokens/s of one core by tensor parallel size and network between ranks")
    names = [f"TP {ranks}" for ranks in SIZES]
    show([(name, [engine(link, ranks) for ranks in SIZES]) for name, link in links.items()], names)
    name, link = next(iter(links.items()))
    shares = (f"{engine(link, ranks).busy['core']:.1%} (TP {ranks})" for ranks in SIZES)
    print(f"The core's loop is busy for {', '.join(shares)} of the time ({name})\n")
    print(f"Tokens/s of one core by pipeline and tensor parallel size ({name})")
    show([(f"PP {count}", [engine(link, ranks, count) for ranks in SIZES]) for count in STAGES], names)
    seconds = costs.http_token if options.http else costs.router_token
    print(
        f"Several cores behind {options.routers} router(s) {'over' if options.http else 'without'} HTTP ({name})"
    )
    table = [
        (
            f"{cores} core(s)",
            [installation_rate(engine(link, ranks), cores, options.routers, seconds) for ranks in SIZES],
        )
        for cores in CORES
    ]
    show(table, names)
    print("Tokens/s at which a process is saturated")
    for process, tokens in limits(costs, work).items():
        print(f"{process:44}{tokens:12,.0f}")


def main() -> None:
    """Read the costs, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--costs", type=Path, help="JSON of benchmarks.scale_costs; default: the newest")
    parser.add_argument("--model", default="8b", help=f"{', '.join(MODELS)}, or a folder with a config.json")
    parser.add_argument("--bits", type=float, default=16, help="bits of each weight, key and value")
    parser.add_argument("--rows", type=int, default=Work.rows, help="sequences that decode in each core")
    parser.add_argument("--context", type=int, default=Work.context, help="tokens of each")
    parser.add_argument("--answer", type=int, default=Work.answer, help="tokens of a request's output")
    parser.add_argument(
        "--latency-us", type=float, help="of an exchange between ranks; default: some networks"
    )
    parser.add_argument("--bandwidth-gbs", type=float, help="of each rank's connection")
    parser.add_argument("--read-gbs", type=float, help="a worker's reading rate; default: as measured")
    parser.add_argument("--tflops", type=float, help="a worker's rate of products")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--http", action="store_true", help="routers send each token as an event over HTTP")
    options = parser.parse_args()
    for first, second in (("latency_us", "bandwidth_gbs"), ("read_gbs", "tflops")):
        if (getattr(options, first) is None) != (getattr(options, second) is None):
            parser.error(f"--{first} and --{second} go together".replace("_", "-"))
    path = options.costs or newest_costs()
    report(json.loads(path.read_text(encoding="utf-8")), options)


if __name__ == "__main__":
    main()
