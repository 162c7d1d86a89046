"""What each decoder of `tests.workers.architectures` is served with: `python -m benchmarks.families --matrix`.

Nothing here says what is served. A tiny model is loaded with an option, as a start does, and what refuses it says
why; the scheduler's features run, and their tokens must be those without them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from pagewire.ipc.speculative import SpeculativeConfig
from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Parallel, WorkerConfig
from pagewire.workers.errors import LoadError, first_line
from pagewire.workers.network.loaded import Phases
from pagewire.workers.process import wiring
from pagewire.workers.ranks.single import SingleRank
from pagewire.workers.run.room import records_steps, why_not_recorded
from pagewire.workers.run.runner import Runner
from pagewire.workers.weight_cache.ahead import WeightsAhead
from pagewire.workers.weight_cache.forms import NotStoredError, describe
from tests.engine_core.schedule.simulation import drafting
from tests.workers import scheduled
from tests.workers.architectures import SERVED, VOCAB_SIZE, Architecture
from tests.workers.driver import load_runner
from tests.workers.parallel import pipelined
from tests.workers.parallel.threads import run_ranks
from tests.workers.parity import make_prompts
from tests.workers.scheduled import Setting

YES, REFUSED, WRONG = "yes", "refused: ", "wrong: "
PLAIN = Setting("one step at a time", depth=1, share_prefixes=False)
CACHED = Setting("overlap and cache")
PREEMPTED = Setting("few blocks", num_blocks=16, share_prefixes=False)
PROMPTS = make_prompts(VOCAB_SIZE, (23, 5, 17, 1, 30))
REPEATING = [[11, 12, 13, 14] * 4, [15, 16, 17] * 3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
NUM_DRAFTS = 3
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=NUM_DRAFTS)
OTHER_TOKENS = f"{WRONG}other tokens"
GPU_SIZES: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "num_blocks": 24,
    "block_size": 16,
    "num_threads": 1,
}
GPU_WIDTHS = {"moe_intermediate_size": 32, "kv_lora_rank": 256, "qk_rope_head_dim": 32}
"""Of experts and latents that have a kernel."""


class Trial:
    """A decoder that is tried with one feature after the other. folder: for its checkpoints."""

    def __init__(self, architecture: Architecture, folder: Path) -> None:
        self.architecture, self._folder = architecture, folder

    @cached_property
    def model(self) -> Path:
        """The folder of its tiny checkpoint in float32."""
        return self.architecture.write(self._folder / "model")

    @cached_property
    def runner(self) -> Runner:
        """A runner without any option; sizes are those of the scheduler's features."""
        return self.load()

    def load(self, **options: Any) -> Runner:
        """A runner with options of a worker.

        Raises:
            LoadError: they are refused.
        """
        sizes: dict[str, Any] = {
            "max_model_len": scheduled.MAX_MODEL_LEN,
            "block_size": scheduled.BLOCK_SIZE,
            "num_blocks": 320,  # with as much memory for checkpoints of states
        }
        return load_runner(self.model, dtype="float32", **(sizes | options))[0]

    @cached_property
    def head(self) -> str:
        """The folder of an EAGLE-3 head for it."""
        stack = getattr(self.runner.model.model.base, "stack", None)
        size = 64 if stack is None else stack.hidden_size  # a module refuses heads of any size
        return str(write_head(self._folder / "head", size, self.runner.model.vocab_size))


def from_packed_weights(trial: Trial) -> str:
    """Whether a start may find its weights packed."""
    try:
        describe(trial.runner.model, [], trial.runner.collective)
    except NotStoredError as error:
        return refused(error)
    return YES


def compiled_decoding(trial: Trial) -> str:
    """Whether steps that only decode are one compiled call."""
    reason = trial.runner.decoding.why_not
    return f"{REFUSED}{reason}" if reason else YES


def lora(trial: Trial) -> str:
    """Whether it starts with adapters."""
    trial.load(lora=LoRAConfig(max_lora_rank=8))
    return YES


def eagle3(trial: Trial) -> str:
    """Whether it starts with an EAGLE-3 head, which takes states from within."""
    trial.load(speculative=SpeculativeConfig("eagle3", trial.head, NUM_DRAFTS))
    return YES


def ngram_drafts(trial: Trial) -> str:
    """Whether it starts with drafts of n-grams, and they change no token."""
    runner = trial.load(speculative=NGRAM)
    plain, _ = pipelined.generate(trial.runner, REPEATING, params=GREEDY)
    drafted, _ = pipelined.generate(runner, REPEATING, params=GREEDY, speculation=drafting("ngram", 0))
    return YES if drafted == plain else OTHER_TOKENS


def two_shards(trial: Trial) -> str:
    """Whether two ranks divide its layers."""
    run_ranks(2, lambda rank: load_runner(trial.model, rank, dtype="float32")[1])
    return YES


def two_stages(trial: Trial) -> str:
    """Whether two ranks have a part of its layers each."""

    def work(rank: Any) -> object:
        place = Parallel(rank.rank, rank.size, stages=2)
        return load_runner(trial.model, rank, dtype="float32", parallel=place)[1]

    run_ranks(2, work)
    return YES


def prefix_cache(trial: Trial) -> str:
    """Whether prefixes are found, and change no token."""
    expected, _ = scheduled.run(trial.runner, PLAIN, PROMPTS)
    outputs, scheduler = scheduled.run(trial.runner, CACHED, PROMPTS)
    if not scheduler.stats.num_prefix_hits:
        return f"{WRONG}no prefix is found"
    return YES if outputs == expected else OTHER_TOKENS


def preemption(trial: Trial) -> str:
    """Whether sequences may be preempted, and go on with the same tokens."""
    expected, _ = scheduled.run(trial.runner, PLAIN, PROMPTS)
    outputs, scheduler = scheduled.run(trial.runner, PREEMPTED, PROMPTS)
    if not scheduler.stats.num_preemptions:
        return f"{WRONG}nothing is preempted"
    return YES if outputs == expected else OTHER_TOKENS


def cuda_graph(trial: Trial) -> str:
    """Whether its steps are recorded as graphs, on an emulated GPU in bfloat16."""
    # The emulation is pytest's.
    from tests.kernels.cuda.emulate.launcher import EmulatedLauncher
    from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice, emulated
    from tests.workers.device.test_cuda_architectures import with_kernels

    fields = with_kernels(trial.architecture).fields
    fields |= {name: size for name, size in GPU_WIDTHS.items() if name in fields}
    sized = replace(trial.architecture, fields=fields)
    # Read from a file of another dtype, weights are aligned, as they are on a GPU.
    folder = sized.write(trial.model.parent / "gpu", dtype="float32")
    config, launcher = WorkerConfig(str(folder), **GPU_SIZES), EmulatedLauncher()
    device = patch.object(wiring, "open_device", lambda _: EmulatedCudaDevice(launcher))
    with device, emulated(launcher):
        # Without the first steps, in which graphs are recorded.
        steps = wiring.open_launcher(
            config, Phases(lambda *_: None), WeightsAhead(config), SingleRank(), lambda: None
        )
        return YES if records_steps(config, steps) else f"{REFUSED}{why_not_recorded(config, steps)}"


FEATURES: dict[str, Callable[[Trial], str]] = {
    "start from packed weights": from_packed_weights,
    "compiled decoding": compiled_decoding,
    "LoRA": lora,
    "EAGLE-3": eagle3,
    "n-gram drafts": ngram_drafts,
    "TP 2": two_shards,
    "PP 2": two_stages,
    "prefix cache": prefix_cache,
    "preemption": preemption,
    "CUDA graph": cuda_graph,
}
"""How each column of the table is asked for. Functions raise LoadError where a start does."""
HEADER = f"| decoder | {' | '.join(FEATURES)} |\n|{'---|' * (1 + len(FEATURES))}"


class Row(NamedTuple):
    """A decoder, and an answer for each of `FEATURES`."""

    name: str
    answers: tuple[str, ...]

    @property
    def line(self) -> str:
        """Its line of the table."""
        return f"| {' | '.join((self.name, *self.answers))} |"


def refused(error: Exception) -> str:
    """The answer for a feature that is refused, in the words of the error."""
    return f"{REFUSED}{first_line(error)}"


def answer(trial: Trial, ask: Callable[[Trial], str]) -> str:
    """What the engine says about a feature, as a cell of a table."""
    try:
        found = ask(trial)
    except LoadError as error:
        found = refused(error)
    return found.replace("|", "/")


def row_of(architecture: Architecture) -> Row:
    """The row of a decoder."""
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(architecture, Path(folder))
        return Row(architecture.name, tuple(answer(trial, ask) for ask in FEATURES.values()))


def rows(names: Iterable[str] = ()) -> Iterator[Row]:
    """The rows of all decoders that are served, or of those of these names."""
    wanted = set(names)
    for name, architecture in SERVED.items():
        if not wanted or name in wanted:
            yield row_of(architecture)


def read(table_text: str) -> list[Row]:
    """The rows of a table that `table` has written."""
    lines = table_text.partition(HEADER)[2].strip().splitlines()
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [Row(name, tuple(answers)) for name, *answers in cells]


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Rows with others in the place of those of the same names, in the order of the architectures."""
    known = {row.name: row for row in (*old, *new)}
    return [known[name] for name in SERVED if name in known]


def summary(found: Iterable[Row]) -> str:
    """How many decoders have each feature."""
    known = list(found)
    counts = (
        f"{name} {sum(row.answers[column] == YES for row in known)}" for column, name in enumerate(FEATURES)
    )
    return f"**Of {len(known)} decoders: {', '.join(counts)}**"


def table(found: Iterable[Row]) -> str:
    """The table, below its numbers."""
    known = list(found)
    return f"{summary(known)}\n\n{HEADER}\n" + "\n".join(row.line for row in known) + "\n"


def write_head(folder: Path, size: int, vocab_size: int) -> Path:
    """An EAGLE-3 head with random weights, for states of `size` numbers after the first layer of a model."""
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": size,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": vocab_size,
        "max_position_embeddings": 128,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 0]},
    }
    shapes = {f"midlayer.self_attn.{name}_proj": (size, 2 * size) for name in "qkv"}
    shapes |= {f"midlayer.mlp.{name}_proj": (size, size) for name in ("gate", "up", "down")}
    shapes |= {
        "fc": (size, 3 * size),
        "midlayer.self_attn.o_proj": (size, size),
        "lm_head": (vocab_size, size),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors = {f"{name}.weight": torch.randn(shape) / size**0.5 for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(size) for name in norms}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors")
    return folder
