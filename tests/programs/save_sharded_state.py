import dataclasses
import os
from pathlib import Path

from vllm import LLM, EngineArgs
from vllm.utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
EngineArgs.add_cli_args(parser)
parser.add_argument("--output", "-o", required=True, type=str, help="path to output checkpoint")
parser.add_argument("--file-pattern", type=str, help="string pattern of saved filenames")
parser.add_argument("--max-file-size", type=str, default=5 * 1024**3, help="bytes of each file")


def main(args) -> None:
    engine_args = EngineArgs.from_cli_args(args)
    if engine_args.enable_lora:
        raise ValueError("Saving with enable_lora=True is not supported!")
    if not Path(engine_args.model).is_dir():
        raise ValueError("model path must be a local directory")
    llm = LLM(**dataclasses.asdict(engine_args))
    Path(args.output).mkdir(exist_ok=True)
    model_executor = llm.llm_engine.model_executor
    model_executor.save_sharded_state(
        path=args.output, pattern=args.file_pattern, max_size=args.max_file_size
    )
    print(os.listdir(args.output))  # noqa: PTH208 (as the original copies files)


if __name__ == "__main__":
    main(parser.parse_args())
