"""Simulator (a), two numbers a token, against (b), full vectors: side by side in one run, and a million tokens.

    python benchmarks/simulator.py [--full]

CPU time of one thread, best of three, at LLaVA's width D = 4096. `--full` adds the figure for one million tokens
through 128 layers (wall clock and peak memory). The ratio is what (a) saves; that both have
one law is a test, not a benchmark.
"""

import argparse
import resource
import time

from theory.simulate import Setup, run_chain, run_vectors


def nanoseconds(run, setup: Setup, tokens: int) -> float:
    """CPU time per token and layer."""
    best = float("inf")
    for seed in range(3):
        started = time.process_time()
        run(setup, tokens, seed)
        best = min(best, time.process_time() - started)
    return best / tokens / setup.layers * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="one million tokens through 128 layers")
    arguments = parser.parse_args()

    print(f"{'mode':10}{'(a) ns':>9}{'(b) ns':>10}{'ratio':>8}   per token and layer, D = 4096")
    for mode in ("isotropic", "angle", "drift"):
        setup = Setup(norm=1.08, layers=16, width=4096, mode=mode, angle=1.5, drift=0.3)
        a, b = nanoseconds(run_chain, setup, 50_000), nanoseconds(run_vectors, setup, 256)
        print(f"{mode:10}{a:9.1f}{b:10.0f}{b / a:8.0f}")

    print("\n(a) by width, ns per token and layer, and by layers:")
    for width, layers in ((64, 16), (4096, 16), (16384, 16), (4096, 64)):
        cost = nanoseconds(run_chain, Setup(norm=1.08, layers=layers, width=width), 50_000)
        print(f"  D = {width:5}, L = {layers:2}: {cost:.1f}")

    if arguments.full:
        started, cpu = time.perf_counter(), time.process_time()
        run_chain(Setup(norm=1.08, layers=128, width=4096), 1_000_000, 0)
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"\n1,000,000 tokens, 128 layers: {wall:.1f} s wall, {cpu:.1f} s CPU, peak memory {memory:.2f} GiB")


if __name__ == "__main__":
    main()
