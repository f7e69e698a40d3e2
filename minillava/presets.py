"""The experiments, as plain data: what is compared (variants), at what size and on what world (presets)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minillava.lm import LMConfig
from minillava.scenes import QUESTION_KINDS
from minillava.train import TrainConfig
from minillava.vit import ViTConfig
from minillava.world import WorldConfig


@dataclass(frozen=True)
class Variant:
    """One thing to compare: an arm of the model, on which kind of LM block, and how its gain trains."""

    arm: str
    post_norm: bool = False
    train_gain: bool = True
    gain_lr: float = 1.0


VARIANTS = {
    "base": Variant("base"),
    "default": Variant("default"),
    "aligned": Variant("aligned"),
    "gwc": Variant("gwc"),
    "scale": Variant("scale"),
    "discrete": Variant("discrete"),
    "post-norm": Variant("base", post_norm=True),
    "aligned-frozen": Variant("aligned", train_gain=False),
    "aligned-low": Variant("aligned", gain_lr=0.1),
}


@dataclass
class Preset:
    """One experiment. Stage 2 runs at each of `stage2_lrs`, or, with `select`, at the rate chosen per variant on the
    selection split (then `stage1_lrs` and `stage2_lrs` are the grids, widened while the best lies at an edge).

    With `pretrain_seeds`, each seed also has towers of its own; otherwise all share the towers of seed 0.
    """

    name: str
    world: WorldConfig
    vision: ViTConfig
    lm: LMConfig
    variants: tuple[str, ...]
    vision_training: TrainConfig
    language_training: TrainConfig
    stage1: TrainConfig
    stage2: TrainConfig
    stage1_lrs: tuple[float, ...]
    stage2_lrs: tuple[float, ...]
    seeds: tuple[int, ...] = (0,)
    language_samples: int = 30_000
    select: bool = False
    pretrain_seeds: bool = False

    def with_seeds(self, count: int) -> Preset:
        return replace(self, seeds=tuple(range(count)))


def quick() -> Preset:
    """Two cores, minutes: the six arms and the Post-Norm control, one seed, two stage-2 rates, nothing chosen."""
    world = WorldConfig(kinds=("colour_at", "shape_at", "colour_at", "shape_at", "count"))  # counting needs the least
    return Preset(
        name="quick",
        world=world,
        vision=ViTConfig(image_size=world.image_size),
        lm=LMConfig(depth=4, kv_heads=4, hidden=192),
        variants=("base", "default", "aligned", "gwc", "scale", "discrete", "post-norm"),
        vision_training=TrainConfig(steps=200, lr=1e-3),
        language_training=TrainConfig(steps=800, batch_size=32, lr=1e-3),
        stage1=TrainConfig(steps=200, batch_size=32),
        stage2=TrainConfig(steps=250, batch_size=32, eval_every=25),
        stage1_lrs=(1e-2,),
        stage2_lrs=(5e-4, 2e-3),
    )


def paper() -> Preset:
    """One GPU, hours: all question kinds on a 3×3 grid, five seeds with their own towers, rates chosen per variant."""
    world = WorldConfig(grid=3, image_size=48, kinds=QUESTION_KINDS, train_scenes=60_000, eval_scenes=2_000)
    training = TrainConfig(batch_size=128, precision="bf16", compile=True, save_every=500, log_every=50)
    return Preset(
        name="paper",
        world=world,
        vision=ViTConfig(image_size=48, width=256, depth=12, heads=8),
        lm=LMConfig(width=256, depth=12, heads=8, kv_heads=8, hidden=704),
        variants=tuple(VARIANTS),
        vision_training=replace(training, steps=2_000, lr=5e-4),
        language_training=replace(training, steps=6_000, lr=1e-3),
        stage1=replace(training, steps=1_000),
        stage2=replace(training, steps=2_000, eval_every=200),
        stage1_lrs=(1e-3, 3e-3, 1e-2),
        stage2_lrs=(1e-4, 3e-4, 1e-3),
        seeds=(0, 1, 2, 3, 4),
        language_samples=200_000,
        select=True,
        pretrain_seeds=True,
    )


def tiny() -> Preset:
    """Seconds: the same code paths as `quick` at a size that learns nothing. For tests, and for a first look."""
    short = TrainConfig(steps=6, batch_size=8, eval_every=3, log_every=3, save_every=3)
    return replace(
        quick(),
        name="tiny",
        world=WorldConfig(train_scenes=60, eval_scenes=24),
        vision=ViTConfig(width=32, depth=2, heads=2),
        lm=LMConfig(width=32, depth=2, heads=2, kv_heads=1, hidden=64),
        vision_training=short,
        language_training=short,
        stage1=short,
        stage2=short,
        language_samples=120,
    )


PRESETS = {"quick": quick, "paper": paper, "tiny": tiny}


def paper_slice() -> Preset:
    """The `paper` preset with its own sizes and procedure, cut down in steps, data and seeds for a CPU (so in fp32)."""
    full = paper()
    short = TrainConfig(steps=2, batch_size=4, eval_every=2, log_every=1, save_every=1)
    return replace(
        full,
        name="paper-slice",
        world=replace(full.world, train_scenes=24, eval_scenes=8),
        variants=("base", "gwc", "aligned-low"),
        vision_training=short,
        language_training=short,
        stage1=short,
        stage2=short,
        seeds=(0, 1),
        language_samples=24,
    )


PRESETS["paper-slice"] = paper_slice
