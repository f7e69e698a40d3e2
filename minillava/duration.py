"""How long a preset takes on this machine: a few steps of each of its trainings, timed, times how often it trains."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from minillava import world
from minillava.data import Pool
from minillava.experiment import cache_folder, encode
from minillava.llava import LLaVAConfig, MiniLLaVA
from minillava.lm import LM
from minillava.objectives import CellPool, CellReader, cell_loss, next_token_loss
from minillava.presets import VARIANTS, Preset
from minillava.tokenizer import IMAGE, world_tokenizer
from minillava.train import TrainConfig, fit
from minillava.vit import ViT

WARM_UP = 2  # steps that are not counted: the first one compiles, the second still allocates


def trainings(preset: Preset) -> dict[str, int]:
    """How often each training runs, towers found in the cache and grids that have to grow left aside."""
    towers = len(preset.seeds) if preset.pretrain_seeds else 1
    blocks = len({VARIANTS[name].post_norm for name in preset.variants})
    runs = len(preset.seeds) * len(preset.variants)
    searches = len(preset.variants) if preset.select else 0
    loudness = len(preset.seeds) * ("discrete" in preset.variants)  # base's stage 1 says how loud `discrete` starts
    rates = 1 if preset.select else len(preset.stage2_lrs)
    return {
        "vision": towers,
        "language": towers * blocks,
        "stage 1": searches * len(preset.stage1_lrs) + runs + loudness,
        # the second search finds its middle rate already trained by the first
        "stage 2": searches * (len(preset.stage1_lrs) + len(preset.stage2_lrs) - 1) + runs * rates,
    }


def time_steps(preset: Preset, device: str, steps: int = 5) -> list[dict]:
    """One row per training: `training`, `times`, `steps`, `start` (seconds to the end of the first step, compilation
    included), `step` (median seconds of the later ones) and `hours` of all of them, one after the other.

    Towers are random and the world is small, since neither changes the time of a step. On a CPU in fp32 and uncompiled,
    whatever the preset says. What is measured between trainings is not counted.

    Raises ValueError for less than one step.
    """
    if steps < 1:
        raise ValueError(f"at least one step has to be timed, got {steps}")
    small = replace(preset.world, train_scenes=2 * preset.stage2.batch_size)
    split = world.build_split(small, "train", 0)
    tokenizer, N = world_tokenizer(cache_folder()), preset.vision.num_patches
    reader = CellReader(ViT(preset.vision), preset.world.grid).to(device)
    lm = LM(replace(preset.lm, vocab_size=len(tokenizer))).to(device)
    features = encode(reader.vision, split.pixels)
    model = MiniLLaVA(LLaVAConfig(preset.vision, lm.config, "gwc", IMAGE), reader.vision, lm).to(device)
    texts = Pool(world.language_samples(small, 2 * preset.language_training.batch_size, 0), tokenizer, N)
    captions, questions = (
        Pool(samples, tokenizer, N, features=features)
        for samples in (world.captions(split), world.instruction_samples(small, split, 0))
    )

    def row(name: str, module, loss, pool, config: TrainConfig) -> dict:
        plan = replace(config, steps=WARM_UP + steps, log_every=1, eval_every=0)
        if device == "cpu":
            plan = replace(plan, precision="fp32", compile=False)
        ends = [logged["seconds"] for logged in fit(module, loss, pool, plan, show=False)]
        step = median(after - before for before, after in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False))
        times = trainings(preset)[name]
        hours = times * (ends[0] + (config.steps - 1) * step) / 3600
        return {"training": name, "times": times, "steps": config.steps, "start": ends[0], "step": step, "hours": hours}

    rows = [row("vision", reader, cell_loss, CellPool(split.pixels, split.cells), preset.vision_training)]
    rows.append(row("language", lm, next_token_loss, texts, preset.language_training))
    for stage, pool, config in ((1, captions, preset.stage1), (2, questions, preset.stage2)):
        model.set_trainable(stage)
        rows.append(row(f"stage {stage}", model, next_token_loss, pool, config))
    return rows
