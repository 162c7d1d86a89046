"""Several programs on one engine: they attach to a core that runs, in a tenth of a second and without PyTorch.

pagewire core --model demo --listen ipc:///tmp/demo.sock &
python examples/attached_frontends.py --attach ipc:///tmp/demo.sock
"""

from __future__ import annotations

import argparse
import sys
import threading
import time

from pagewire import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--attach", required=True, metavar="ADDRESS", help="of the core")
parser.add_argument("--frontends", type=int, default=3)
arguments = parser.parse_args()


def run(number: int) -> None:
    """Attach a frontend, use it, and leave."""
    began = time.perf_counter()
    with LLM.attach(arguments.attach) as llm:
        seconds = time.perf_counter() - began
        params = SamplingParams(temperature=0.8, seed=number, max_tokens=20)
        (output,) = llm.generate('The "del" statement', params, use_tqdm=False)
        print(f"frontend {number} attached in {seconds:.2f} s: {output.outputs[0].text!r}")


threads = [threading.Thread(target=run, args=(number,)) for number in range(arguments.frontends)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("PyTorch was imported" if "torch" in sys.modules else "PyTorch was not imported")
