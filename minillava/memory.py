"""How much memory and arithmetic a preset's trainings need, counted rather than guessed: the model runs on the meta
device, which has shapes but no storage, while a hook adds up every tensor that autograd would keep for the backward
pass, and PyTorch's counter the operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from minillava.data import Pool
from minillava.experiment import cache_folder
from minillava.lm import LM
from minillava.objectives import CellReader
from minillava.presets import Preset
from minillava.tokenizer import world_tokenizer
from minillava.train import TrainConfig
from minillava.vit import ViT
from minillava.world import build_split, instruction_samples, language_samples


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor], bf16: bool) -> int:
    """Bytes that autograd keeps for the backward pass of `forward()`, each storage once, parameters not among them."""
    storages = {p.untyped_storage()._cdata for p in model.parameters()}
    total = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages.add(storage._cdata)
            alive.append(storage)  # else its address may be given to the next one
            total += storage.nbytes()
        return tensor

    alive: list = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # The meta device has no autocast; halving what fp32 keeps is an estimate a little on the low side.
        forward()
    return total // 2 if bf16 else total


def estimate(preset: Preset) -> list[dict]:
    """One row per training: `weights`, `gradients` with AdamW's two moments, `activations` of a micro-batch, `data`
    (the pool that stays in memory), and `total`, all in GiB; and `pflop`, 10^15 operations of one such training."""
    tokenizer = world_tokenizer(cache_folder())
    few = replace(preset.world, train_scenes=60)
    N = preset.vision.num_patches
    split = build_split(few, "train", 0)
    length = {
        "language": int(Pool(language_samples(few, 60, 0), tokenizer, N).lengths.max()),
        "stage 2": int(Pool(instruction_samples(few, split, 0), tokenizer, N).lengths.max()),
    }
    length["stage 1"] = length["stage 2"]
    pixels = preset.world.train_scenes * split.pixels[0].nbytes
    features = preset.world.train_scenes * N * preset.vision.width * 4

    with torch.device("meta"):
        reader = CellReader(ViT(preset.vision), preset.world.grid)
        images = torch.empty(preset.vision_training.batch_size, 3, preset.vision.image_size, preset.vision.image_size)
        rows = [row("vision", reader, lambda: reader(images)[0], preset.vision_training, pixels)]
        lm = LM(replace(preset.lm, vocab_size=len(tokenizer)))
        trainings = {"language": preset.language_training, "stage 1": preset.stage1, "stage 2": preset.stage2}
        for name, config in trainings.items():
            lm.requires_grad_(name != "stage 1")  # a frozen layer keeps less: only what the gradient to its input needs
            embeds = torch.empty(config.batch_size, length[name], preset.lm.width, requires_grad=True)
            data = pixels + features if name != "language" else preset.language_samples * length[name] * 8
            rows.append(row(name, lm, lambda embeds=embeds: lm(embeds), config, data, trains=name != "stage 1"))
    return rows


def row(name: str, model: nn.Module, forward: Callable, config: TrainConfig, data: int, trains: bool = True) -> dict:
    weights = sum(p.numel() * 4 for p in model.parameters())
    parts = {
        "weights": weights,
        "gradients": 3 * weights if trains else 0,
        "activations": saved_bytes(model, forward, config.precision == "bf16"),
        "data": data,
    }
    with FlopCounterMode(display=False) as counter:
        forward()
    # The backward pass multiplies twice for each product of the forward pass, once where weights are frozen.
    operations = counter.get_total_flops() * (3 if trains else 2) * config.accumulate * config.steps
    return (
        {"training": name}
        | {key: value / 2**30 for key, value in parts.items()}
        | {"total": sum(parts.values()) / 2**30, "pflop": operations / 1e15}
    )
