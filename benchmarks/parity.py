"""Which architectures are served, as a Markdown table: `python -m benchmarks.parity [NAME ...]`, from the root.

Each is a tiny random model. Served means: greedy tokens in float32 equal those of transformers' `generate`, for
prompts of several lengths, chunked and batched.

With --all it tries every language model of the installed transformers, those that take pictures as well with text
alone, each in a process of its own, and says that its tokens are equal, why it is refused, or why it could not be
tried. --write: make docs/families.md and its list in docs/models.md. Status 1: another error, other tokens, or a
refusal that takes seconds or reads weights.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import families
from benchmarks.families import ModelRow
from pagewire.workers.checkpoint.source import Checkpoint
from pagewire.workers.errors import LoadError, first_line
from tests.workers.architectures import ARCHITECTURES, VOCAB_SIZE, Architecture
from tests.workers.parity import make_prompts, our_tokens, transformers_tokens
from tests.workers.shrunk import MAX_PARAMETERS, NUM_TEXT_TOKENS, SPECIAL, shrunk

SECONDS = 300  # for one model type: longer than any takes
REFUSAL_SECONDS = 3  # a refusal decides by shapes alone
MAX_REASON = 200  # characters


def verdict(architecture: Architecture) -> tuple[str, str, bool]:
    """The architecture's class, what came of it in words, and whether the table says so too."""
    with tempfile.TemporaryDirectory() as folder:
        path = architecture.write(Path(folder))
        name = architecture.class_name()
        prompts = make_prompts(VOCAB_SIZE)
        try:
            equal = our_tokens(path, prompts) == transformers_tokens(path, prompts)
        except LoadError as error:
            return name, f"refused: {reason(error)}", architecture.refused is not None
    return name, "served" if equal else "**wrong tokens**", equal and architecture.refused is None


def reason(error: LoadError) -> str:
    """Why a model is refused."""
    return str(error).partition("not supported: ")[2] or str(error)


def known(names: Iterable[str]) -> int:
    """Print the table of `ARCHITECTURES`, or of those of these names. Status 1: something is not as it says."""
    print("| model type | class | |\n|---|---|---|")
    num_served = num_surprises = 0
    for architecture in ARCHITECTURES:
        if names and architecture.name not in names:
            continue
        class_name, words, expected = verdict(architecture)
        num_served += words == "served"
        num_surprises += not expected
        print(f"| {architecture.name} | {class_name} | {words} |", flush=True)
    print(f"\n{num_served} served, {num_surprises} not as expected")
    return 1 if num_surprises else 0


def auto_class(model_type: str) -> Any:
    """The class of transformers that makes a model of a type: for pictures and text, or else for text."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


class Refusal:
    """How a model is refused: the seconds that it takes, and the weights that are read before it."""

    def __init__(self) -> None:
        self.seconds, self.num_read = 0.0, 0

    def tokens(self, path: Path, prompts: list[list[int]]) -> list[list[int]]:
        """Our tokens of a checkpoint.

        Raises:
            LoadError: the model is refused.
        """
        read, started = Checkpoint.read, time.monotonic()

        def counted(checkpoint: Checkpoint, name: str) -> Any:
            self.num_read += 1
            return read(checkpoint, name)

        Checkpoint.read = counted  # type: ignore[method-assign]
        try:
            return our_tokens(path, prompts)
        finally:
            self.seconds = time.monotonic() - started

    @property
    def complaint(self) -> str:
        """What is wrong with it; empty if nothing is."""
        if self.num_read:
            return f"refused after {self.num_read} weights were read"
        return f"refused after {self.seconds:.1f} s" if self.seconds > REFUSAL_SECONDS else ""


def tried(model_type: str) -> tuple[str, str, str]:
    """What came of a model type: "equal", "refused", "untested", "wrong" or "error"; why; what is wrong with it."""
    import torch

    make, refusal = auto_class(model_type), Refusal()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        prompts = make_prompts(NUM_TEXT_TOKENS)

        def words(error: Exception) -> str:
            return f"{type(error).__name__}: {first_line(error)}".replace(folder, "MODEL")[:MAX_REASON]

        try:
            config = shrunk(model_type)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in make.from_config(config).parameters())
            if size > MAX_PARAMETERS:
                return "untested", f"the tiny model would have {size:,} parameters", ""
            torch.manual_seed(0)
            make.from_config(config).float().save_pretrained(path)
        except Exception as error:
            return "untested", f"no tiny model: {words(error)}", ""
        try:
            ours = refusal.tokens(path, prompts)
        except LoadError as error:
            ours, why = None, reason(error).replace(folder, "MODEL")[:MAX_REASON]
        except Exception as error:
            return "error", words(error), "not refused by name"
        if ours is None and " fails" not in why:
            return "refused", why, refusal.complaint
        try:
            theirs = transformers_tokens(path, prompts, make=make)
        except Exception as error:
            return "untested", f"transformers itself fails: {words(error)}", ""
    if ours is None:
        return "refused", why, refusal.complaint
    media = media_tokens(config)
    same = [until(media, tokens) for tokens in ours] == [until(media, tokens) for tokens in theirs]
    return ("equal", "", "") if same else ("wrong", "", "other tokens")


def media_tokens(config: Any) -> set[int]:
    """The tokens that stand for media, in whose place some families of transformers embed another token."""
    names = config.to_dict().items()
    return {
        value for name, value in names if name.startswith(SPECIAL) and "token" in name and type(value) is int
    }


def until(ends: set[int], tokens: list[int]) -> list[int]:
    """Tokens up to the first of these, that included."""
    return tokens[: next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))]


def apart(model_type: str) -> tuple[str, str, str]:
    """`tried` in a process of its own, which may hang or crash."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def work(connection: Any) -> None:
        connection.send(tried(model_type))

    process = context.Process(target=work, args=(there,))
    process.start()
    there.close()
    try:
        found: tuple[str, str, str] = here.recv() if here.poll(SECONDS) else ("error", "it hangs", "it hangs")
    except EOFError:
        found = "error", "the process ended", "the process ended"
    process.kill()
    process.join()
    return found


def every(names: Iterable[str], *, write: bool) -> int:
    """Print the table of all language models of transformers, or of the model types of these names."""
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    class_names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    print(families.HEADER)
    tried_families: list[ModelRow] = []
    complaints: list[str] = []
    for model_type, class_name in sorted(class_names.items()):
        if names and model_type not in names:
            continue
        verdict, why, complaint = apart(model_type)
        tried_families.append(ModelRow(model_type, class_name, verdict, why))
        complaints += [f"{model_type}: {complaint}"] if complaint else []
        print(tried_families[-1].line, flush=True)
    print(f"\n{families.summary(tried_families)}", *complaints, sep="\n")
    if write:
        families.PATH.write_text(families.document(tried_families, transformers.__version__))
        families.main()
    return 1 if complaints else 0


def main() -> int:
    """Print the table that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="every language model of transformers")
    parser.add_argument("--write", action="store_true", help="with --all: make docs/families.md of the table")
    options = parser.parse_args()
    if options.write and (options.names or not options.all):
        parser.error("--write needs the whole table: --all, and no NAME")
    names = set(options.names)
    return every(names, write=options.write) if options.all else known(names)


if __name__ == "__main__":
    sys.exit(main())
