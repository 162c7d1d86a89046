"""What comes of one model type of transformers: a tiny random model of it, served and compared with its forward."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from pagewire.ipc.families.media import media_family
from pagewire.workers.checkpoint.source import Checkpoint
from pagewire.workers.errors import LoadError, first_line
from pagewire.workers.module.text_base import takes_more_than_text
from tests.workers import biting, logprobs, pooled
from tests.workers.architectures import VOCAB_SIZE, Architecture
from tests.workers.shrunk import MAX_PARAMETERS, NUM_TEXT_TOKENS, shrunk

SECONDS = 600  # for one model type: longer than any takes
REFUSAL_SECONDS = 3  # a refusal decides by shapes alone
MAX_REASON = 200  # characters
TEXT_ONLY = "text only"
CAUSAL, ENCODER = "decoder", "encoder"


class Trial(NamedTuple):
    """What came of a model type: "equal", "refused", "untested", "wrong" or "error"; why; what is amiss with it."""

    verdict: str
    why: str = ""
    complaint: str = ""


def words(error: Exception, folder: str) -> str:
    """An error in a line."""
    found = f"{type(error).__name__}: {first_line(error)}".replace(folder, "MODEL")[:MAX_REASON]
    return f"a package is missing ({found})" if isinstance(error, ImportError) else found


def reason(error: LoadError) -> str:
    """Why a model is refused."""
    return str(error).partition("not supported: ")[2] or str(error)


def auto_class(model_type: str) -> Any:
    """The class of transformers that makes a model of a type: for pictures and text, or else for text."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


class Refusal:
    """How a model is refused: the seconds of the processor that it takes, and the weights read before it."""

    def __init__(self) -> None:
        self.seconds, self.num_read = 0.0, 0

    def logprobs(self, path: Path) -> list[logprobs.Continued]:
        """Our log probabilities of a checkpoint.

        Raises:
            LoadError: the model is refused.
        """
        read, started = Checkpoint.read, time.process_time()

        def counted(checkpoint: Checkpoint, name: str) -> Any:
            self.num_read += 1
            return read(checkpoint, name)

        Checkpoint.read = counted  # type: ignore[method-assign]
        try:
            return logprobs.our_logprobs(path, NUM_TEXT_TOKENS)
        finally:
            self.seconds = time.process_time() - started

    @property
    def complaint(self) -> str:
        """What is wrong with it; empty if nothing is."""
        if self.num_read:
            return f"refused after {self.num_read} weights were read"
        return f"refused after {self.seconds:.1f} s" if self.seconds > REFUSAL_SECONDS else ""


def tried(model_type: str) -> Trial:
    """What came of the decoder of a model type, with the settings of its family and with others that bite."""
    import torch

    make = auto_class(model_type)
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = shrunk(model_type)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in make.from_config(config).parameters())
            if size > MAX_PARAMETERS:
                return Trial("untested", f"the tiny model would have {size:,} parameters")
            write(make, config, Path(folder, "plain"))
        except Exception as error:
            return Trial("untested", f"no tiny model: {words(error, folder)}")
        plain = compared(make, Path(folder, "plain"))
        if plain.verdict not in ("equal", "flat"):
            return plain
        config, changed = biting.bitten(make, config)
        write(make, config, Path(folder, "bitten"))
        other = compared(make, Path(folder, "bitten"))
    if other.verdict == "refused":
        other = Trial(plain.verdict, f"refused with {', '.join(sorted(changed))}: {other.why}")
    if {plain.verdict, other.verdict} == {"flat"}:
        return Trial("untested", f"its tiny model shows too little: {plain.why}")
    if other.verdict not in ("equal", "flat"):
        return other._replace(why=f"{other.why} (with {', '.join(sorted(changed))})")
    is_text = takes_more_than_text(config) and media_family({"model_type": model_type}) is None
    notes = [TEXT_ONLY] if is_text else []
    return Trial(
        "equal", "; ".join([*notes, *([other.why] if other.verdict == "equal" and other.why else [])])
    )


def write(make: Any, config: Any, path: Path) -> None:
    """A checkpoint in float32 with weights that bite."""
    import torch

    torch.manual_seed(0)
    model = make.from_config(config).float()
    biting.bite(model)
    model.save_pretrained(path)


def compared(make: Any, path: Path) -> Trial:
    """What came of a checkpoint. "flat": equal, but its log probabilities show too little."""
    refusal, folder, why = Refusal(), str(path.parent), ""
    try:
        ours = refusal.logprobs(path)
    except LoadError as error:
        ours, why = [], reason(error).replace(folder, "MODEL")[:MAX_REASON]
    except Exception as error:
        return Trial("error", words(error, folder), "not refused by name")
    if not ours and " fails" not in why:
        return Trial("refused", why, refusal.complaint)
    try:
        model = logprobs.loaded_in_float32(path, make)
        texts = [text.token_ids for text in ours] or logprobs.make_prompts(NUM_TEXT_TOKENS)
        theirs = [logprobs.forward_logprobs(model, text) for text in texts]
        flat = logprobs.flatness(model, texts)
    except Exception as error:
        return Trial("untested", f"transformers itself fails: {words(error, folder)}")
    if not ours:
        return Trial("refused", why, refusal.complaint)
    pairs = zip(ours, theirs, strict=True)
    worst = max(logprobs.difference(text.logprobs, expected[:-1]) for text, expected in pairs)
    if worst > logprobs.PERMITTED:
        return Trial("wrong", f"log probabilities differ by {worst:.2g}", "other log probabilities")
    return Trial("flat", flat) if flat else Trial("equal")


def tried_encoder(model_type: str) -> Trial:
    """What came of an encoder: its hidden states, with prompts of several lengths in one step."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = pooled.write(Path(folder), model_type)
            expected = pooled.hidden_states(path, logprobs.make_prompts(VOCAB_SIZE, logprobs.LENGTHS))
        except Exception as error:
            return Trial("untested", f"transformers itself fails: {words(error, folder)}")
        try:
            found = pooled.our_hidden_states(path, logprobs.make_prompts(VOCAB_SIZE, logprobs.LENGTHS))
        except LoadError as error:
            return Trial("refused", reason(error).replace(folder, "MODEL")[:MAX_REASON])
        except Exception as error:
            return Trial("error", words(error, folder), "not refused by name")
    worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    if not worst <= logprobs.PERMITTED:
        return Trial("wrong", f"hidden states differ by {worst:.2g}", "other hidden states")
    return Trial("equal")


def known(architecture: Architecture) -> Trial:
    """What came of an entry of `ARCHITECTURES`."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        return compared(AutoModelForCausalLM, architecture.write(Path(folder, "model")))


Named = tuple[str, str]
"""`CAUSAL` or `ENCODER`, and a model type."""


def each_apart(names: Iterable[Named], num_processes: int) -> Iterator[tuple[Named, Trial]]:
    """The trial of each in a process of its own, which may hang or crash; as they end.

    One runs here before, so that processes begin with all modules imported. It runs in one thread, since those of
    OpenMP do not outlive a fork.
    """
    import torch

    torch.set_num_threads(1)
    tried("llama")
    context = multiprocessing.get_context("fork")
    waiting, running = deque(names), dict[Any, tuple[Named, Any, float]]()
    while waiting or running:
        while waiting and len(running) < num_processes:
            name, (here, there) = waiting.popleft(), context.Pipe()
            process = context.Process(target=_work, args=(there, name))
            process.start()
            there.close()
            running[here] = name, process, time.monotonic() + SECONDS
        ready: Sequence[Any] = wait(running, timeout=1)
        late = [one for one, (_, _, until) in running.items() if until < time.monotonic()]
        for connection in [*ready, *(one for one in late if one not in ready)]:
            name, process, _ = running.pop(connection)
            trial = _received(connection) if connection in ready else Trial("error", "it hangs", "it hangs")
            process.kill()
            process.join()
            yield name, trial


def _work(connection: Connection, name: Named) -> None:
    kind, model_type = name
    connection.send(tried(model_type) if kind == CAUSAL else tried_encoder(model_type))


def _received(connection: Connection) -> Trial:
    try:
        return connection.recv()  # type: ignore[no-any-return]
    except EOFError:
        return Trial("error", "the process ended", "the process ended")


class Log:
    """Trials in a file of JSON lines, so that a run goes on where another was interrupted. path: None: none."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.trials: dict[Named, Trial] = {}
        for kind, model_type, *trial in map(json.loads, lines):
            self.trials[kind, model_type] = Trial(*trial)

    def add(self, name: Named, trial: Trial) -> None:
        """Keep a trial."""
        self.trials[name] = trial
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps([*name, *trial]) + "\n")
