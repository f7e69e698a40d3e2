"""Train on your own pictures: a folder in LLaVA's format, a checkpoint to start from, one stage at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from minillava.checkpoint import fingerprint, load_model, save_model
from minillava.data import Pool, normalize
from minillava.evaluate import mean_loss
from minillava.llava import LLaVAConfig, MiniLLaVA
from minillava.llava_json import load_pixels, read_folder
from minillava.objectives import next_token_loss
from minillava.tokenizer import Tokenizer
from minillava.train import TrainConfig, fit


def folder_pool(path: Path, model: MiniLLaVA, tokenizer: Tokenizer, frozen: bool, text: bool = True) -> Pool:
    """A folder's conversations. A frozen vision tower looks at each picture once, here; otherwise pixels are kept.

    Without `text`, conversations without a picture are left out: nothing that stage 1 trains would have a gradient.
    """
    samples, pictures = read_folder(path)
    if not text:
        samples = [sample for sample in samples if sample.images]
        if not samples:
            raise ValueError(f"{path}: no sample has a picture, and stage 1 trains on pictures only")
    vision = model.config.vision
    pixels = load_pixels(pictures, vision.image_size)  # (M, 3, S, S) uint8
    if not frozen:
        return Pool(samples, tokenizer, vision.num_patches, pixels=pixels)
    with torch.no_grad():
        device = next(model.parameters()).device
        chunks = [model.vision(normalize(chunk.to(device))).cpu() for chunk in pixels.split(256)]
    features = torch.cat(chunks) if chunks else torch.empty(0, vision.num_patches, vision.width)
    return Pool(samples, tokenizer, vision.num_patches, features=features)


def finetune(
    data: Path,
    init: Path,
    out: Path,
    config: TrainConfig,
    stage: int,
    arm: str | None = None,
    validation: Path | None = None,
    train_vision: bool = False,
    device: str = "cpu",
    show: bool = True,
) -> dict:
    """Train one stage from the model folder `init` and write the model folder `out/model`.

    Stage 1 starts a fresh projector and arm between the two towers of `init`; stage 2 goes on from `init` as it is.
    Returns the first and last losses, with validation losses if a validation folder was given.
    """
    if train_vision and stage == 1:
        raise ValueError("stage 1 trains projector and arm only; the vision tower can be trained in stage 2")
    model, tokenizer, _ = load_model(init, device)
    if stage == 1:
        torch.manual_seed(config.seed)
        model_config = LLaVAConfig.from_dict(model.config.to_dict() | {"arm": arm or model.config.arm})
        model = MiniLLaVA(model_config, model.vision, model.lm).to(device)
    elif arm not in (None, model.config.arm):
        raise ValueError(f"{init} has the arm '{model.config.arm}', not '{arm}'; the arm is chosen in stage 1")
    pool = folder_pool(data, model, tokenizer, frozen=not train_vision, text=stage == 2)
    watched = folder_pool(validation, model, tokenizer, frozen=not train_vision) if validation else None
    trains = model.set_trainable(stage, train_vision)
    if show:
        print(trains)
    if stage == 1 and model.config.arm in ("scale", "discrete"):
        assert pool.features is not None
        model.calibrate(pool.features[:256].to(device))
    before = mean_loss(model, watched) if watched is not None else None
    about = {"stage": stage, "arm": model.config.arm, "train_vision": train_vision}
    about |= {"data": fingerprint(pool.input_ids, pool.labels), "init": fingerprint(*model.state_dict().values())}

    rows = fit(
        model,
        next_token_loss,
        pool,
        replace(config, eval_every=config.eval_every if watched is not None else 0),
        run=out,
        evaluate=(lambda: {"validation_loss": mean_loss(model, watched)}) if watched is not None else None,
        label=f"stage {stage}",
        show=show,
        about=about,
    )
    notes = {"stage": stage, "data": data.name, "steps": config.steps, "lr": config.lr, "seed": config.seed}
    save_model(out / "model", model, tokenizer, notes)
    result = {"loss_first": rows[0]["loss"], "loss_last": rows[-1]["loss"], "samples": len(pool)}
    if watched is not None:
        result |= {"validation_before": before, "validation_after": mean_loss(model, watched)}
    return result
