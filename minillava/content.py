"""What visual tokens say about their own place in the picture, layer by layer: a linear probe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minillava.data import Batch
from minillava.llava import MiniLLaVA
from minillava.probe import each, observe


def visual_states(model: MiniLLaVA, batches: Batch | Iterable[Batch]) -> list[Tensor]:
    """Every image's visual tokens (I, N, D) at the LM's input and after every layer, on the CPU in float32.

    Raises ValueError if no batch holds an image.
    """
    pieces = []
    for batch in each(batches):
        images = len(next(iter(batch.images().values()), ()))
        if images == 0:
            continue
        seen = observe(model, batch)
        layers = [seen.states[name][seen.visual] for name in seen.layers]  # each (I * N, D)
        pieces.append([tokens.unflatten(0, (images, -1)).float().cpu() for tokens in layers])
    if not pieces:
        raise ValueError("no batch holds an image, so there are no visual states")
    return [torch.cat(layer) for layer in zip(*pieces, strict=True)]


def content_probe(
    states: Sequence[Tensor], cells: Tensor, ridge: float = 1e-2, test_fraction: float = 0.5, seed: int = 0
) -> dict:
    """What each visual token says about its own cell: a linear probe per layer, scored on held-out images.

    states: of every layer (I, N, D); cells: integer classes (I, N), negative where a token has none. The probe is ridge
    regression onto one-hot targets, in closed form, on channels standardised over the training tokens (so neither
    the size of the tokens nor a constant added to them matters); `ridge` is relative to the number of tokens. Returns
    `accuracy` (layers,), `chance` (always naming the most frequent class of the training images), `tokens` tested.
    Raises ValueError for shapes that disagree, or when a side of the split is empty.
    """
    if any(state.shape[:2] != cells.shape for state in states):
        raise ValueError(f"states {[tuple(s.shape) for s in states]} and cells {tuple(cells.shape)} must share (I, N)")
    order = torch.randperm(len(cells), generator=torch.Generator().manual_seed(seed))
    held_out = order[: round(test_fraction * len(cells))]
    in_test = torch.zeros_like(cells, dtype=torch.bool).index_fill_(0, held_out, True)
    train, test = (cells >= 0) & ~in_test, (cells >= 0) & in_test  # (I, N): whole images
    if not (train.any() and test.any()):
        raise ValueError(
            f"{len(cells)} images with test_fraction={test_fraction} leave no token to train or to test on"
        )
    targets = F.one_hot(cells[train]).double()  # (M, K)
    frequent = targets.sum(0).argmax()
    accuracy = []
    for state in states:
        x, held = state[train].double(), state[test].double()  # (M, D)
        mean, std = x.mean(0), x.std(0).clamp_min(1e-30)
        x, held = (x - mean) / std, (held - mean) / std
        gram = x.T @ x + ridge * len(x) * torch.eye(x.shape[1], dtype=x.dtype)  # (D, D)
        weights = torch.linalg.solve(gram, x.T @ (targets - targets.mean(0)))  # (D, K)
        guess = (held @ weights + targets.mean(0)).argmax(-1)
        accuracy.append((guess == cells[test]).double().mean().item())
    chance = (cells[test] == frequent).double().mean().item()
    return {"accuracy": np.array(accuracy), "chance": chance, "tokens": int(test.sum())}
