"""The paper's fix: one LayerNorm after the projector that makes visual tokens as quiet as text.

With bias 0 and one scalar gain g = T / sqrt(D), every output token has norm T·ρ, where T is the mean norm of the text
embeddings and ρ = (1 + ε/σ²)^(-1/2) ≤ 1 (claim N2). The price is that g, about 0.02, also multiplies the gradient that
flows back into the projector; Global Weight Compensation divides it out again, in the backward pass alone (see
PAPER.md, E).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from minillava.layer_norm import layer_norm


def text_norm(embeddings: Tensor) -> float:
    """T: mean L2 norm of the non-zero rows of an embedding matrix (V, D), in the embedding's own units (PAPER.md, D).

    Raises ValueError if the matrix has no non-zero row (there is nothing to align to) or one that is not finite.
    """
    norms = embeddings.detach().float().norm(dim=-1)  # (V,)
    if not bool(norms.isfinite().all()):
        row = int(norms.isfinite().logical_not().nonzero()[0])
        raise ValueError(f"embedding matrix {tuple(embeddings.shape)} is not finite in row {row}")
    norms = norms[norms > 1e-6]
    if len(norms) == 0:
        raise ValueError(f"embedding matrix {tuple(embeddings.shape)} has no non-zero row, so it has no mean norm")
    return norms.mean().item()


class NormAlign(nn.Module):
    """LayerNorm over the last dimension with bias 0 and every gain equal to `gain`.

    `gain=1` is an ordinary LayerNorm (the `default` arm); `NormAlign.to_text(embeddings)` starts at T/√D (`aligned`);
    with `compensate=True` the gradient to the input is divided by max(mean|gain|, 1e-3), while the gradients of gain
    and bias stay as they are (`gwc`). The input may be fp32, fp16 or bf16, the parameters stay fp32 (all in fp64
    after `.double()`).
    """

    def __init__(self, width: int, gain: float = 1.0, compensate: bool = False, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), float(gain)))
        self.bias = nn.Parameter(torch.zeros(width))
        self.compensate = compensate
        self.eps = eps

    @classmethod
    def to_text(cls, embeddings: Tensor, compensate: bool = False, eps: float = 1e-5) -> NormAlign:
        """Start at the norm of a text embedding matrix (V, D): g = T/√D (claim N1: then σ·√D becomes T)."""
        width = embeddings.shape[-1]
        return cls(width, text_norm(embeddings) / math.sqrt(width), compensate, eps)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, self.compensate)

    def extra_repr(self) -> str:
        gain = self.weight.detach().abs().mean().item()
        return f"{len(self.weight)}, mean |gain|={gain:.4g}, compensate={self.compensate}, eps={self.eps}"
