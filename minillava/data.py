"""Conversations, rendered once into arrays, and the batches cut from them.

A batch is a pure function of (pool, seed, step): to resume a run, nothing of the loader needs to be saved but the step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from minillava.tokenizer import IGNORE, IMAGE_MARK, PAD, Tokenizer, render


@dataclass
class Sample:
    """One conversation: (question, answer) turns, the images that its `<image>` marks stand for, a kind for each turn.

    `images` are indices into a pool of pictures.
    """

    id: str
    turns: list[tuple[str, str | None]]
    images: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)


@dataclass
class Batch:
    """Token rows, right-padded, and the images that their placeholders stand for.

    input_ids, labels, document_ids are (B, T) longs; a label is the token *at* its position (the loss shifts), or
    IGNORE; document_ids are 1, 2, ... for the documents packed in a row and 0 for padding. Images come as uint8 pixels
    (I, 3, S, S) or as features of the frozen tower (I, N, Dv), in the order of their placeholders.
    """

    input_ids: Tensor
    labels: Tensor
    document_ids: Tensor
    pixels: Tensor | None = None
    features: Tensor | None = None
    sample_ids: list[str] | None = None

    def to(self, device: torch.device | str) -> Batch:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})

    @property
    def supervised(self) -> int:
        """How many tokens the loss averages over; position 0 has no prediction."""
        return int((self.labels[:, 1:] != IGNORE).sum())

    def images(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The images as keyword arguments of `MiniLLaVA.forward`, if there are any."""
        if self.features is not None:
            return {"features": self.features.to(dtype)} if len(self.features) else {}
        if self.pixels is not None and len(self.pixels):
            return {"pixel_values": normalize(self.pixels, dtype)}
        return {}


def normalize(pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 pixels to floats in [-1, 1]."""
    return pixels.to(dtype) / 127.5 - 1


class Pool:
    """Samples rendered once, end to end, with the pictures (or the frozen tower's features) they refer to.

    `input_ids` and `labels` are flat int32: padded to the longest, real conversations would fill the memory with
    padding. Row i has `lengths[i]` tokens from `starts[i]` on.

    Raises ValueError, naming the sample, when a conversation's `<image>` marks and images differ in number or when
    nothing in it is supervised.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        tokenizer: Tokenizer,
        image_tokens: int,
        pixels: Tensor | None = None,
        features: Tensor | None = None,
    ):
        self.samples = samples
        self.pixels, self.features = pixels, features
        flat_ids, flat_labels, lengths = array("i"), array("i"), []
        for sample in samples:
            ids, labels = self._render(sample, tokenizer, image_tokens)
            flat_ids.extend(ids)
            flat_labels.extend(labels)
            lengths.append(len(ids))
        self.input_ids, self.labels = (torch.from_numpy(np.array(flat, np.int32)) for flat in (flat_ids, flat_labels))
        self.lengths = torch.tensor(lengths, dtype=torch.long)
        self.starts = self.lengths.cumsum(0) - self.lengths

    @staticmethod
    def _render(sample: Sample, tokenizer: Tokenizer, image_tokens: int) -> tuple[list[int], list[int]]:
        marks = sum(question.count(IMAGE_MARK) for question, _ in sample.turns)
        if marks != len(sample.images):
            raise ValueError(f"sample '{sample.id}': {marks} <image> mark(s) but {len(sample.images)} image(s)")
        ids, labels = render(tokenizer, sample.turns, image_tokens)
        if all(label == IGNORE for label in labels):
            raise ValueError(f"sample '{sample.id}': no supervised token, because it has no answer")
        return ids, labels

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, indices: Sequence[int] | range | np.ndarray) -> Batch:
        """The batch of these rows, as short as its longest row."""
        rows = torch.as_tensor(np.asarray(indices))
        order = torch.arange(int(self.lengths[rows].max()))  # (T,)
        real = order < self.lengths[rows][:, None]  # (B, T)
        at = (self.starts[rows][:, None] + order).where(real, 0)
        input_ids, labels = self.input_ids[at].where(real, PAD), self.labels[at].where(real, IGNORE)
        batch = Batch(input_ids.long(), labels.long(), real.long())
        batch.sample_ids = [self.samples[i].id for i in indices]
        images = torch.tensor([image for i in indices for image in self.samples[i].images], dtype=torch.long)
        if self.features is not None:
            batch.features = self.features[images]
        elif self.pixels is not None:
            batch.pixels = self.pixels[images]
        return batch

    def batch(self, step: int, batch_size: int, seed: int) -> Batch:
        """The batch of a training step: each epoch is one random order of all rows."""
        return self.take(shuffled(len(self), step, batch_size, seed))


def shuffled(n: int, step: int, batch_size: int, seed: int) -> np.ndarray:
    """Row numbers of the batch of a step. Epochs are permutations; a rest smaller than a batch is left out.

    Raises ValueError if there is nothing to draw from or to draw.
    """
    if n < 1:
        raise ValueError("no samples to make a batch of: the pool is empty")
    if batch_size < 1:
        raise ValueError(f"a batch of {batch_size} samples has nothing to train on: batch_size must be at least 1")
    batch_size = min(batch_size, n)
    epoch, place = divmod(step, n // batch_size)
    order = np.random.default_rng([seed, epoch]).permutation(n)
    return order[place * batch_size : (place + 1) * batch_size]
