"""Several cores as one: a router starts them, and sends requests that begin alike to the same core.

python examples/router.py --model demo --cores 2 --max-num-seqs 16
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

SUBJECTS = ("A list", "A dictionary", "The with statement", "A set")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo")
parser.add_argument("--cores", type=int, default=2)
arguments, options = parser.parse_known_args()  # options of `pagewire route`

command = [
    sys.executable,
    "-m",
    "pagewire.cli.main",
    "route",
    "--spawn",
    str(arguments.cores),
    arguments.model,
]
command += ["--port", "0", "--enable-admin", *options]
router = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
assert router.stdout is not None
try:
    _, url = router.stdout.readline().split()  # "ready http://..."
    client = OpenAI(base_url=f"{url}/v1", api_key="none")

    def ask(subject: str) -> str:
        """Return a completion."""
        prompt = f"{subject} is used to"
        answer = client.completions.create(model=arguments.model, prompt=prompt, max_tokens=20, temperature=0)
        return answer.choices[0].text

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, SUBJECTS * 4))
    assert texts == texts[: len(SUBJECTS)] * 4  # whichever core they came from
    print(texts[: len(SUBJECTS)])
    request = urllib.request.Request(f"{url}/cores", headers={"X-Pagewire-Admin": "1"})
    with urllib.request.urlopen(request) as response:
        print(response.read().decode())
finally:
    router.terminate()
    router.wait()
