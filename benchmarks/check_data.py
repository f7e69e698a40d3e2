"""How much faster the quick check is than the full one, and how many samples a second each reads.

    python benchmarks/check_data.py [--samples 4000] [--rounds 3]

Both read the same folder in turn, in one process and thread: JPEGs of 640 x 480 pixels, four turns a sample, as in
LLaVA's instruction data. The ratio is the result; samples a second depend on the machine.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image

from minillava.check_data import check_data
from minillava.scenes import vocabulary
from minillava.tokenizer import Tokenizer

DISTINCT = 200  # pictures drawn; the others are links to them, which are read all the same


def make_folder(folder: Path, samples: int) -> None:
    rng = np.random.default_rng(0)
    for i in range(samples):
        file = folder / f"{i}.jpg"
        if i < DISTINCT:
            coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            coarse.resize((640, 480), Image.Resampling.BICUBIC).save(file)
        else:
            file.symlink_to(f"{i % DISTINCT}.jpg")
    turn = [{"from": "human", "value": "what is there ?"}, {"from": "gpt", "value": "two red things at north . " * 5}]
    first = [{"from": "human", "value": "<image>\nwhat is there ?"}, turn[1]]
    conversations = [{"id": i, "image": f"{i}.jpg", "conversations": first + 3 * turn} for i in range(samples)]
    (folder / "data.json").write_text(json.dumps(conversations))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.train(vocabulary())
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder), arguments.samples)
        for _ in range(arguments.rounds):
            for full in (False, True):
                start = time.perf_counter()
                report = check_data(folder, 16, tokenizer, full)
                seconds[full].append(time.perf_counter() - start)
                assert report.samples == report.images == arguments.samples and not report.problems
    quick, full = median(seconds[False]), median(seconds[True])
    print(f"quick {arguments.samples / quick:,.0f} samples/s, full {arguments.samples / full:,.0f} samples/s")
    print(f"quick is {full / quick:.1f} times as fast (median of {arguments.rounds} rounds)")


if __name__ == "__main__":
    main()
