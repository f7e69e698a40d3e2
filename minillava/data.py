"""Batches: what every model in this house eats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100  # label of a token that is not supervised


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
