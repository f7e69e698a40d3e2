"""What share of a training step goes into making its batch: the figure to reach is under 5 %.

    python benchmarks/data_loading.py [--steps 100] [--threads 1]

Each stage of the quick preset, at its own sizes, on the CPU: the time of `pool.batch()` and of a whole step (forward,
backward, clipping, AdamW) are taken in turn, in one process, so that whatever else the machine does slows both. The
ratio is the result; milliseconds depend on the machine. Nothing is drawn or tokenized in the loop: pools are arrays.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from minillava.data import Pool, normalize
from minillava.llava import LLaVAConfig, MiniLLaVA
from minillava.lm import LM, LMConfig
from minillava.objectives import CellPool, CellReader, cell_loss, next_token_loss
from minillava.presets import quick
from minillava.tokenizer import world_tokenizer
from minillava.train import clip_gradients, parameter_groups
from minillava.vit import ViT
from minillava.world import build_split, captions, instruction_samples, language_samples

SCENES = 2_000  # a batch costs the same however many pictures it is chosen from


def stages() -> dict[str, tuple]:
    """By name: a model, its loss, a pool, a TrainConfig, all of the quick preset."""
    preset = quick()
    preset.world.train_scenes = SCENES
    with TemporaryDirectory() as cache:
        tokenizer = world_tokenizer(Path(cache))
    N, split = preset.vision.num_patches, build_split(preset.world, "train", 0)
    reader = CellReader(ViT(preset.vision), preset.world.grid)
    lm = LM(LMConfig(**vars(preset.lm) | {"vocab_size": len(tokenizer)}))
    words = Pool(language_samples(preset.world, SCENES, 0), tokenizer, N)
    with torch.no_grad():
        chunks = torch.from_numpy(split.pixels).split(500)
        features = torch.cat([reader.vision(normalize(chunk)) for chunk in chunks])
    first = MiniLLaVA(LLaVAConfig(preset.vision, lm.config, "gwc"))
    second = MiniLLaVA(LLaVAConfig(preset.vision, lm.config, "gwc"))
    first.set_trainable(1)
    second.set_trainable(2)
    shown = Pool(captions(split), tokenizer, N, features=features)
    asked = Pool(instruction_samples(preset.world, split, 0), tokenizer, N, features=features)
    return {
        "vision tower": (reader, cell_loss, CellPool(split.pixels, split.cells), preset.vision_training),
        "language model": (lm, next_token_loss, words, preset.language_training),
        "stage 1": (first, next_token_loss, shown, preset.stage1),
        "stage 2": (second, next_token_loss, asked, preset.stage2),
    }


def measure(model, loss, pool, config, steps: int) -> tuple[float, float]:
    """Median seconds of making a batch and of the rest of a step."""
    optimizer = torch.optim.AdamW(parameter_groups(model, config), lr=1e-4)
    making, training = [], []
    for step in range(steps):
        start = time.perf_counter()
        batch = pool.batch(step, config.batch_size, 0)
        made = time.perf_counter()
        (loss(model, batch) / batch.supervised).backward()
        clip_gradients(model, config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        making.append(made - start)
        training.append(time.perf_counter() - made)
    return median(making), median(training)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name, parts in stages().items():
        batch, rest = measure(*parts, arguments.steps)
        share = batch / (batch + rest)
        print(f"{name:<16} batch {1e3 * batch:7.2f} ms, step {1e3 * (batch + rest):8.1f} ms: {share:.1%} of a step")


if __name__ == "__main__":
    main()
