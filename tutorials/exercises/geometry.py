"""Exercises of tutorials 0 to 3: one step, one block, the formula, many layers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import theory
from exercises.judging import Exercise, by_number, by_values, close

STEPS = [(n, C, phi) for n in (0.5, 1.08, 39.96) for C in (0.3, 1.0, 25.0) for phi in (0.2, 1.2, 1.6, 2.5, 3.0)]


# Tutorial 0 ----------------------------------------------------------------------------------------------------------


def norm_after(n, C, phi):
    return np.sqrt(n**2 + 2 * n * C * np.cos(phi) + C**2)


NORM_AFTER = by_values(
    norm_after,
    STEPS,
    mistakes={
        "this is Pythagoras, which holds at a right angle only": lambda n, C, phi: np.hypot(n, C),
        "lengths add up only if both arrows point the same way": lambda n, C, phi: n + C,
        "the sign of the cosine is wrong: φ lies between the directions of h and Δ, it is not the triangle's inner "
        "angle": lambda n, C, phi: np.sqrt(n**2 - 2 * n * C * np.cos(phi) + C**2),
        "that is the square of the norm": lambda n, C, phi: n**2 + 2 * n * C * np.cos(phi) + C**2,
        "φ is in radians already": lambda n, C, phi: norm_after(n, C, np.radians(phi)),
    },
)


def update_for_45_degrees():
    return 39.96  # at a right angle tan θ = C/n, and tan 45° = 1


UPDATE = by_number(
    update_for_45_degrees,
    {
        "45 is the angle, not the update": 45.0,
        "this turns the token by 35 degrees: the tangent of the turn counts, not its sine": 39.96
        * math.sin(math.pi / 4),
    },
)


def best_angle(n, C):
    return np.arccos(-C / n)  # where h + Δ touches the circle: h + Δ stands at a right angle to Δ


def _judge_best_angle(answer: Callable) -> str:
    for n, C in ((2.0, 1.0), (39.96, 1.0), (1.08, 0.9), (5.0, 0.01)):
        got = float(answer(n, C))
        if abs(got - math.pi / 2) < 1e-12:
            return "a right angle is good and not the best: a push that leans back a little also shortens the token"
        if not 0 <= got <= math.pi:
            return f"for n = {n:g}, C = {C:g} it gives {got:.6g}, which is no angle between 0 and π (in radians)"
        turn, most = theory.step_angle(n, C, got), theory.turn_bound(n, C)
        if turn < most * (1 - 1e-9):
            return f"for n = {n:g}, C = {C:g} your angle turns the token by {turn:.6g}, and {most:.6g} can be had"
    return ""


BEST_ANGLE = Exercise(
    _judge_best_angle,
    best_angle,
    mistakes={
        "a right angle is good and not the best: a push that leans back a little also shortens the token": (
            lambda n, C: math.pi / 2
        ),
        "for n = 2, C = 1 it gives 120, which is no angle between 0 and π (in radians)": (
            lambda n, C: np.degrees(np.arccos(-C / n))
        ),
        "for n = 2, C = 1 your angle turns the token by 0.333473, and 0.523599 can be had": lambda n, C: np.arccos(
            C / n
        ),
    },
)


# Tutorial 1 ----------------------------------------------------------------------------------------------------------


def rms_norm(x, eps):
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


_GENERATOR = torch.Generator().manual_seed(0)
_TOKENS = [
    (torch.randn(2, 5, 16, generator=_GENERATOR, dtype=torch.float64) * size, eps)
    for size, eps in ((1.0, 1e-5), (1e-3, 1e-5), (1e3, 0.0))
]
RMS_NORM = by_values(
    rms_norm,
    _TOKENS,
    mistakes={
        "eps belongs under the root": lambda x, eps: x / ((x * x).mean(dim=-1, keepdim=True).sqrt() + eps),
        "this divides by the norm; the root of the *mean* square is wanted, which is √D smaller": (
            lambda x, eps: x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + eps)
        ),
        "this subtracts the mean: that would be LayerNorm": (
            lambda x, eps: torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)
        ),
        "every token is normalised by itself, over its last dimension": (
            lambda x, eps: x / torch.sqrt((x * x).mean() + eps)
        ),
    },
)


def parallel_layer(h, attention, mlp):
    return h + attention(h) + mlp(h)


def _judge_parallel(answer: Callable) -> str:
    """Both branches normalise on their own, as in the tutorial; the layer has to add them to the same state."""
    weights = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def branch(weight: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.tanh(rms_norm(x, 0.0) @ weight)

    attention, mlp = branch(weights[0]), branch(weights[1])
    h = torch.randn(3, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    got = answer(h, attention, mlp)
    if close(got, h + attention(h) + mlp(h), 1e-12):
        return ""
    if close(got, attention(h) + mlp(h), 1e-12):
        return "the residual is missing: the token itself has to be added"
    first = h + attention(h)
    if close(got, first + mlp(first), 1e-12):
        return "this is the sequential layer: its MLP still reads the state after attention"
    return "the token should come out as h plus what both branches say about h"


PARALLEL = Exercise(
    _judge_parallel,
    parallel_layer,
    mistakes={
        "the residual is missing: the token itself has to be added": lambda h, attention, mlp: attention(h) + mlp(h),
        "this is the sequential layer: its MLP still reads the state after attention": (
            lambda h, attention, mlp: h + attention(h) + mlp(h + attention(h))
        ),
        "the token should come out as h plus what both branches say about h": (
            lambda h, attention, mlp: h + attention(h) - mlp(h)
        ),
    },
)


def smallest_norm(width, eps, loss):
    """ρ = 1 − loss, and ρ² = σ²/(σ² + ε) with σ = n/√D, solved for n."""
    rho = 1 - loss
    return math.sqrt(width * eps * rho**2 / (1 - rho**2))


SMALLEST_NORM = by_values(
    smallest_norm,
    [(4096, 1e-5, 0.017), (96, 1e-6, 0.01), (3584, 1e-6, 0.5)],
    mistakes={
        "this is σ, the size of one component; the norm is √D times as large": (
            lambda width, eps, loss: smallest_norm(width, eps, loss) / math.sqrt(width)
        ),
        "this is right for small losses only; solve (1 + ε/σ²)^(−1/2) = 1 − loss without approximating": (
            lambda width, eps, loss: math.sqrt(width * eps / (2 * loss))
        ),
    },
)


# Tutorial 2 ----------------------------------------------------------------------------------------------------------


def turn(n, C, phi):
    return np.arctan2(C * np.sin(phi), n + C * np.cos(phi))


TURN = by_values(
    turn,
    [*STEPS, (2.0, 5.0, math.acos(-0.6)), (3.0, 5.0, 2.3)],
    mistakes={
        "arctan of the quotient forgets where the arrow points once it has turned by more than 90 degrees; "
        "arctan2 takes both parts": lambda n, C, phi: np.arctan(C * np.sin(phi) / (n + C * np.cos(phi))),
        "the two parts are swapped: the sideways one comes first": (
            lambda n, C, phi: np.arctan2(n + C * np.cos(phi), C * np.sin(phi))
        ),
        "that is the tangent, not the angle": lambda n, C, phi: C * np.sin(phi) / (n + C * np.cos(phi)),
        "this is in degrees": lambda n, C, phi: np.degrees(turn(n, C, phi)),
    },
)


def partner(n, C):
    return C**2 / n


PARTNER = by_values(
    partner,
    [(1.0, 1.0), (2.0, 1.0), (0.5, 3.0), (39.96, 1.08)],
    mistakes={
        "this is right for C = 1 only": lambda n, C: 1 / n,
        "the token that is as far from C on the other side of a *linear* scale is not the one": lambda n, C: 2 * C - n,
    },
)


def steep_example():
    """C, φ (radians), n_t, n_v: an obtuse update and two norms near the pole."""
    return 1.0, math.radians(135), 2.0, 8.0


def _judge_steep(answer: tuple) -> str:
    C, phi, text, visual = (float(x) for x in answer)
    if not 0 < text < visual:
        return f"the visual token has to be the longer one, got n_t = {text:g}, n_v = {visual:g}"
    if phi <= math.pi / 2:
        return f"φ = {phi:.4g} is acute, and there the bound is a theorem (R4)"
    ratio = float(theory.step_angle(visual, C, phi) / theory.step_angle(text, C, phi))
    if ratio >= text / visual:
        return f"here θ_v/θ_t = {ratio:.4g}, which is not below n_t/n_v = {text / visual:.4g}: the bound holds"
    return ""


STEEP = Exercise(
    _judge_steep,
    steep_example,
    wants_function=False,
    mistakes={
        "the visual token has to be the longer one, got n_t = 8, n_v = 2": (1.0, 2.4, 8.0, 2.0),
        "φ = 1.2 is acute, and there the bound is a theorem (R4)": (1.0, 1.2, 2.0, 8.0),
        "here θ_v/θ_t = 0.9401, which is not below n_t/n_v = 0.25: the bound holds": (50.0, 2.0, 2.0, 8.0),
    },
)


# Tutorial 3 ----------------------------------------------------------------------------------------------------------


def layers_until(n_v, n_t, C, ratio):
    """(n_v² + LC²) = ratio² (n_t² + LC²), solved for L."""
    return (n_v**2 - ratio**2 * n_t**2) / (C**2 * (ratio**2 - 1))


LAYERS_UNTIL = by_values(
    layers_until,
    [(39.96, 1.08, 1.0, 2.0), (56.88, 0.86, 2.0, 1.5), (4.7, 1.38, 0.5, 3.0)],
    mistakes={
        "the ratio of the norms is meant, not that of their squares": (
            lambda n_v, n_t, C, ratio: (n_v**2 - ratio * n_t**2) / (C**2 * (ratio - 1))
        ),
        "the squared norm grows by C² a layer, not by C": (
            lambda n_v, n_t, C, ratio: (n_v**2 - ratio**2 * n_t**2) / (C * (ratio**2 - 1))
        ),
    },
)


def resting_norm(C, phi):
    return -C / (2 * np.cos(phi))


RESTING = by_values(
    resting_norm,
    [(1.0, math.radians(120)), (2.0, 2.0), (0.3, 3.0)],
    mistakes={
        "n = −C cos φ is where the turn passes 90 degrees; you want the norm that the step leaves as it is": (
            lambda C, phi: -C * np.cos(phi)
        ),
        "a factor 2 is missing: solve n² = n² + 2nC cos φ + C²": lambda C, phi: -C / np.cos(phi),
        "a norm can't be negative, and cos φ is, here": lambda C, phi: C / (2 * np.cos(phi)),
    },
)


def total_turn(n, C, layers):
    total = 0.0
    for _ in range(layers):
        total += math.atan2(C, n)
        n = math.hypot(n, C)
    return total


SPIRAL = by_values(
    total_turn,
    [(1.08, 1.0, 32), (39.96, 1.0, 32), (5.0, 2.0, 1)],
    mistakes={
        "the norm has to grow from layer to layer: each right-angled step makes the next one smaller": (
            lambda n, C, layers: layers * math.atan2(C, n)
        ),
        "that is one layer too many": lambda n, C, layers: total_turn(n, C, layers + 1),
    },
)

EXERCISES = {
    "0.1": NORM_AFTER,
    "0.2": UPDATE,
    "0.3": BEST_ANGLE,
    "1.1": RMS_NORM,
    "1.2": PARALLEL,
    "1.3": SMALLEST_NORM,
    "2.1": TURN,
    "2.2": PARTNER,
    "2.3": STEEP,
    "3.1": LAYERS_UNTIL,
    "3.2": RESTING,
    "3.3": SPIRAL,
}
