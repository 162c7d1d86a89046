"""Which architectures are served, as a Markdown table: `python -m benchmarks.parity [NAME ...]`, from the root.

Each is a tiny random model. Served means: greedy tokens in float32 equal those of transformers' `generate`, for
prompts of several lengths, chunked and batched.

With --all it tries every language model of the installed transformers, those that take pictures as well with text
alone, each in a process of its own, and
says that its tokens are equal, why it is refused, or why it could not be tried. Status 1: another error, or other
tokens.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pagewire.workers.errors import LoadError, first_line
from tests.workers.architectures import ARCHITECTURES, VOCAB_SIZE, Architecture
from tests.workers.parity import make_prompts, our_tokens, transformers_tokens
from tests.workers.shrunk import MAX_PARAMETERS, NUM_TEXT_TOKENS, shrunk

SECONDS = 300  # for one model type: longer than any takes


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


def tried(model_type: str) -> tuple[str, str]:
    """What came of a model type: "equal", "refused", "untested", "wrong" or "error", and why."""
    import torch

    make = auto_class(model_type)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        prompts = make_prompts(NUM_TEXT_TOKENS)
        try:
            config = shrunk(model_type)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in make.from_config(config).parameters())
            if size > MAX_PARAMETERS:
                return "untested", f"the tiny model would have {size:,} parameters"
            torch.manual_seed(0)
            make.from_config(config).float().save_pretrained(path)
        except Exception as error:
            return "untested", f"no tiny model: {type(error).__name__}: {first_line(error)}"
        try:
            ours, why = our_tokens(path, prompts), ""
        except LoadError as error:
            ours, why = None, reason(error)
        except Exception as error:
            return "error", f"{type(error).__name__}: {first_line(error)}"
        try:
            theirs = transformers_tokens(path, prompts, make=make)
        except Exception as error:
            fails = f"transformers itself fails: {type(error).__name__}: {first_line(error)}"
            return "untested", f"{fails}; pagewire: {why or 'loads'}"
    if ours is None:
        return "refused", why
    return ("equal", "") if ours == theirs else ("wrong", "")


def apart(model_type: str) -> tuple[str, str]:
    """`tried` in a process of its own, which may hang or crash."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def work(connection: Any) -> None:
        connection.send(tried(model_type))

    process = context.Process(target=work, args=(there,))
    process.start()
    there.close()
    try:
        found: tuple[str, str] = here.recv() if here.poll(SECONDS) else ("error", "it hangs")
    except EOFError:
        found = "error", "the process ended"
    process.kill()
    process.join()
    return found


def every(names: Iterable[str]) -> int:
    """Print the table of all language models of transformers, or of the model types of these names."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    class_names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    print("| model type | class | | why |\n|---|---|---|---|")
    counts: Counter[str] = Counter()
    for model_type, class_name in sorted(class_names.items()):
        if names and model_type not in names:
            continue
        found, why = apart(model_type)
        counts[found] += 1
        print(f"| {model_type} | {class_name} | {found} | {why} |", flush=True)
    print("\n" + ", ".join(f"{count} {found}" for found, count in counts.most_common()))
    return 1 if counts["error"] + counts["wrong"] else 0


def main() -> int:
    """Print the table that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="every language model of transformers")
    options = parser.parse_args()
    return every(set(options.names)) if options.all else known(set(options.names))


if __name__ == "__main__":
    sys.exit(main())
