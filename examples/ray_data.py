"""Offline batches over a cluster with Ray Data: each actor keeps an engine, through which batches of prompts go.

    pip install 'pagewire[ray]' 'ray[data]'
    python examples/ray_data.py --output texts --instances 4 --gpus 1

The output is a folder of Parquet files with the columns `prompt` and `text`.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pagewire import LLM, SamplingParams

PROMPTS = [f'The "{word}" statement is used to' for word in ("with", "for", "del", "import", "try", "while")]


class Generator:
    """An engine in an actor of Ray Data."""

    def __init__(self, options: dict[str, Any], params: SamplingParams) -> None:
        self.llm, self.params = LLM(**options), params

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """The texts for a batch of prompts."""
        prompts = list(batch["text"])
        outputs = self.llm.generate(prompts, self.params, use_tqdm=False)
        return {"prompt": prompts, "text": [output.outputs[0].text for output in outputs]}


def resources(gpus: int) -> dict[str, Any]:
    """What an actor asks of Ray: a GPU; for several, a placement group, where its engine runs a worker on each."""
    if gpus <= 1:
        return {"num_gpus": gpus}

    def own_group() -> dict[str, Any]:
        group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * gpus, strategy="STRICT_PACK")
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
        return {"scheduling_strategy": strategy}

    return {"num_gpus": 0, "ray_remote_args_fn": own_group}


def main() -> None:
    """Generate a text for each prompt."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--prompts", help="text file (or s3://...) with a prompt on each line; default: a few"
    )
    parser.add_argument("--output", required=True, help="folder for the Parquet files (or s3://...)")
    parser.add_argument("--instances", type=int, default=1, help="number of engines")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each engine; 0: it runs on processors")
    parser.add_argument("--max-tokens", type=int, default=100)
    arguments = parser.parse_args()
    if arguments.prompts is None:
        prompts = ray.data.from_items([{"text": prompt} for prompt in PROMPTS])
    else:
        prompts = ray.data.read_text(arguments.prompts)
    texts = prompts.map_batches(
        Generator,
        fn_constructor_args=(
            {"model": arguments.model, "tensor_parallel_size": max(1, arguments.gpus)},
            SamplingParams(temperature=0.8, top_p=0.95, seed=0, max_tokens=arguments.max_tokens),
        ),
        batch_size=32,
        concurrency=arguments.instances,
        **resources(arguments.gpus),
    )
    texts.write_parquet(arguments.output)


if __name__ == "__main__":
    main()
