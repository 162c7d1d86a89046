"""Which architectures are served, as a Markdown table: `python -m benchmarks.parity [NAME ...]`, from the root.

Each is a tiny random model. Equal means: in float32 the log probabilities of the whole vocabulary, after every
token of random prompts of several lengths and of what is sampled behind them, chunked and batched, are those of
transformers' forward pass within 0.001.

With --all it tries every language model of the installed transformers, those that take pictures as well with text
alone, and every encoder that is served, each in a process of its own, and says that it is equal, why it is refused,
or why it could not be tried. --write: make docs/families.md and its list in docs/models.md. Status 1: another
error, other numbers, or a refusal that takes seconds or reads weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks import families, family_trial
from benchmarks.families import ModelRow
from benchmarks.family_trial import CAUSAL, ENCODER, Log, Named
from tests.workers.architectures import ARCHITECTURES


def known(names: Iterable[str]) -> int:
    """Print the table of `ARCHITECTURES`, or of those of these names. Status 1: something is not as it says."""
    print("| model type | class | |\n|---|---|---|")
    num_served = num_surprises = 0
    for architecture in ARCHITECTURES:
        if names and architecture.name not in names:
            continue
        trial = family_trial.known(architecture)
        num_served += trial.verdict == "equal"
        num_surprises += trial.verdict != ("equal" if architecture.refused is None else "refused")
        said = f"{trial.verdict}: {trial.why}" if trial.why else trial.verdict
        print(f"| {architecture.name} | {architecture.class_name()} | {said} |", flush=True)
    print(f"\n{num_served} equal, {num_surprises} not as expected")
    return 1 if num_surprises else 0


def class_names() -> dict[Named, str]:
    """The class of each language model of transformers, and of each encoder that is served."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    )

    from pagewire.workers.network.pooling_files import ENCODERS

    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    named = {(CAUSAL, model_type): name for model_type, name in sorted(causal.items())}
    return named | {(ENCODER, model_type): MODEL_MAPPING_NAMES[model_type] for model_type in sorted(ENCODERS)}


def every(names: Iterable[str], log: Log, num_processes: int, *, write: bool) -> int:
    """Print the table of all language models of transformers, or of the model types of these names.

    What the log has is not tried again.
    """
    import transformers

    classes = {name: cls for name, cls in class_names().items() if not names or name[1] in names}
    left = [name for name in classes if name not in log.trials]
    print(families.HEADER)
    for name, trial in family_trial.each_apart(left, num_processes):
        log.add(name, trial)
        print(ModelRow(name[1], classes[name], trial.verdict, trial.why).line, flush=True)
    rows: dict[str, list[ModelRow]] = {CAUSAL: [], ENCODER: []}
    for name, class_name in classes.items():
        trial = log.trials[name]
        rows[name[0]].append(ModelRow(name[1], class_name, trial.verdict, trial.why))
    complaints = [
        f"{name[1]}: {log.trials[name].complaint}" for name in classes if log.trials[name].complaint
    ]
    print(f"\n{families.summary(rows[CAUSAL])}", f"encoders: {families.summary(rows[ENCODER])}", sep="\n")
    print(*complaints, sep="\n")
    if write:
        last = families.last_sections(families.PATH.read_text())
        page = families.document(rows[CAUSAL], rows[ENCODER], transformers.__version__, last)
        families.PATH.write_text(page)
        families.make_list()
    return 1 if complaints else 0


def main() -> int:
    """Print the table that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="every language model of transformers")
    parser.add_argument("--write", action="store_true", help="with --all: make docs/families.md of the table")
    parser.add_argument("--log", type=Path, help="with --all: a file that a later run goes on from")
    parser.add_argument("--processes", type=int, default=2, help="with --all: as many at once")
    options = parser.parse_args()
    if options.write and (options.names or not options.all):
        parser.error("--write needs the whole table: --all, and no NAME")
    names = set(options.names)
    if not options.all:
        return known(names)
    return every(names, Log(options.log), options.processes, write=options.write)


if __name__ == "__main__":
    sys.exit(main())
