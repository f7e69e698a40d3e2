"""A random Pre-Norm transformer in numpy, to measure assumptions instead of making them (S1, N3, simulation (c)).

Untrained, bidirectional or causal, no biases, LayerNorm without gain. Complex input is welcome: an imaginary
perturbation of 1e-30 carries exact derivatives through the whole network (the complex step).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from theory.arrays import Floats, whole_number


def _normalise(h: Floats, eps: float) -> Floats:
    centred = h - h.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps)


def _softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.real.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@dataclass(frozen=True)
class RandomTransformer:
    """Weights of L layers; build one with `random_transformer`."""

    qkv: Floats  # (L, 3, D, D)
    out: Floats  # (L, D, D)
    up: Floats  # (L, D, 4D)
    down: Floats  # (L, 4D, D)
    heads: int
    eps: float
    causal: bool
    parallel: bool

    def attention(self, layer: int, h: Floats) -> Floats:
        """The attention branch F(LN(h)) of tokens h (..., T, D)."""
        x = _normalise(h, self.eps)
        *batch, T, D = x.shape
        q, k, v = ((x @ w).reshape(*batch, T, self.heads, -1).swapaxes(-2, -3) for w in self.qkv[layer])
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(D // self.heads)  # (..., heads, T, T)
        if self.causal:
            scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        return (_softmax(scores) @ v).swapaxes(-2, -3).reshape(*batch, T, D) @ self.out[layer]

    def mlp(self, layer: int, h: Floats) -> Floats:
        """The MLP branch F(LN(h)); tanh keeps it analytic."""
        return np.tanh(_normalise(h, self.eps) @ self.up[layer]) @ self.down[layer]

    def residual_states(self, h: Floats) -> list[Floats]:
        """h_0, and the stream after every branch: 2L + 1 states, or L + 1 for parallel blocks."""
        states = [h]
        for layer in range(len(self.out)):
            if self.parallel:
                states.append(states[-1] + self.attention(layer, states[-1]) + self.mlp(layer, states[-1]))
            else:
                states.append(states[-1] + self.attention(layer, states[-1]))
                states.append(states[-1] + self.mlp(layer, states[-1]))
        return states


def random_transformer(
    layers: int,
    width: int,
    heads: int,
    rng: np.random.Generator,
    *,
    scale: float = 1.0,
    eps: float = 0.0,
    causal: bool = True,
    parallel: bool = False,
) -> RandomTransformer:
    """Gaussian weights of variance scale²/fan-in. Raises ValueError unless sizes are whole and heads divide width."""
    layers, width, heads = (
        whole_number(name, value, 1) for name, value in (("layers", layers), ("width", width), ("heads", heads))
    )
    if width % heads:
        raise ValueError(f"heads must divide width {width}, got {heads}")
    draw = lambda *shape: rng.normal(0, scale / np.sqrt(shape[-2]), size=(layers, *shape))  # noqa: E731
    return RandomTransformer(
        draw(3, width, width), draw(width, width), draw(width, 4 * width), draw(4 * width, width),
        heads=heads, eps=eps, causal=causal, parallel=parallel,
    )  # fmt: skip


def gain_gradient_ratio(
    layers: int, target_norm: float, width: int, rng: np.random.Generator, tokens: int = 4
) -> float:
    """‖∂loss/∂x̂‖ at gain g = T/√D over the same at g = 1, x̂ the normalised visual tokens, y = g x̂ (N3).

    The loss is a random linear reading of the last text token's normalised final state; the derivative in each of the
    tokens·D directions is a complex step. Raises ValueError as `random_transformer` does.
    """
    model = random_transformer(layers, width, 4, rng)
    visual = _normalise(rng.normal(size=(tokens, width)), 0.0)
    text = rng.normal(size=(tokens, width)) * target_norm / np.sqrt(width)
    reading = rng.normal(size=width)
    nudges = 1e-30j * np.eye(tokens * width).reshape(-1, tokens, width)
    sizes = []
    for gain in (target_norm / np.sqrt(width), 1.0):
        h = np.concatenate([gain * (visual + nudges), np.broadcast_to(text, nudges.shape)], axis=1)
        last = model.residual_states(h)[-1][:, -1]
        loss = np.tanh(_normalise(last, 0.0) @ reading / np.sqrt(width))
        sizes.append(np.linalg.norm(loss.imag / 1e-30))
    return float(sizes[0] / sizes[1])
