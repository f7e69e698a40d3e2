"""The two losses of the house: the next token, and what is in each cell of a picture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillava import scenes
from minillava.data import Batch, normalize, shuffled
from minillava.lm import LM
from minillava.tokenizer import IGNORE
from minillava.vit import ViT


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Logits (B, T, V) of a bare language model (text only) or of a MiniLLaVA."""
    lm = getattr(model, "_orig_mod", model)  # torch.compile wraps the module it was given
    if isinstance(lm, LM):
        return model(lm.embed_tokens(batch.input_ids), batch.document_ids)
    return model(batch.input_ids, batch.document_ids, sample_ids=batch.sample_ids, **batch.images())


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy, summed over supervised tokens: position t predicts the token at t + 1."""
    logits = logits_of(model, batch)[:, :-1]  # (B, T-1, V)
    labels = batch.labels[:, 1:]  # (B, T-1)
    keep = labels != IGNORE
    return F.cross_entropy(logits[keep].float(), labels[keep], reduction="sum")


class CellReader(nn.Module):
    """A vision tower with two linear heads that name the colour and the shape in each cell of the grid.

    `forward` takes floats (B, 3, S, S) and returns logits (B, cells, colours + 1) and (B, cells, shapes + 1); class 0
    is an empty cell. Colour and shape are separate heads, so a pair never seen in training can still be read.
    """

    def __init__(self, vision: ViT, grid: int):
        super().__init__()
        self.vision, self.grid = vision, grid
        width = vision.config.width
        self.colour = nn.Linear(width, len(scenes.COLOURS) + 1)
        self.shape = nn.Linear(width, len(scenes.SHAPES) + 1)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.vision.norm(self.vision(pixel_values, layer=-1))  # (B, N, D)
        B, N, D = tokens.shape
        side = int(N**0.5)
        image = tokens.transpose(1, 2).reshape(B, D, side, side)
        cells = F.adaptive_avg_pool2d(image, self.grid).flatten(2).transpose(1, 2)  # (B, cells, D)
        return self.colour(cells), self.shape(cells)


def cell_targets(cells: Tensor) -> tuple[Tensor, Tensor]:
    """Classes of colour and of shape (B, cells), 0 for empty, from scene values."""
    full = cells > 0
    return ((cells - 1) // len(scenes.SHAPES) + 1) * full, ((cells - 1) % len(scenes.SHAPES) + 1) * full


@dataclass
class CellBatch:
    """Pixels (B, 3, S, S) uint8 and scene values (B, cells)."""

    pixels: Tensor
    cells: Tensor

    @property
    def supervised(self) -> int:
        return 2 * self.cells.numel()

    def to(self, device: torch.device | str) -> CellBatch:
        return CellBatch(self.pixels.to(device), self.cells.to(device))


class CellPool:
    """Pictures and what is in them."""

    def __init__(self, pixels: np.ndarray, cells: np.ndarray):
        self.pixels, self.cells = torch.from_numpy(pixels), torch.from_numpy(cells)

    def batch(self, step: int, batch_size: int, seed: int) -> CellBatch:
        rows = torch.from_numpy(shuffled(len(self.cells), step, batch_size, seed))
        return CellBatch(self.pixels[rows], self.cells[rows])


def cell_loss(model: nn.Module, batch: CellBatch) -> Tensor:
    """Cross entropy of colour and shape, summed over cells."""
    colour, shape = model(normalize(batch.pixels))
    colour_target, shape_target = cell_targets(batch.cells)
    return F.cross_entropy(colour.flatten(0, 1), colour_target.flatten(), reduction="sum") + F.cross_entropy(
        shape.flatten(0, 1), shape_target.flatten(), reduction="sum"
    )
