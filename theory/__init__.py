"""theory: how tokens must turn inside a Pre-Norm transformer.

The numeric functions are here, loaded when first used: `theory.step_angle(norm, update, angle)`. The ledger of claims
is `theory.claims`; `python -m theory verify` examines it. Neither torch nor the model is needed.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "theory.rotation": (
        "step_angle", "norm_after", "adjacent_cosine", "adjacent_cosine_deficit", "turn_slopes", "turns_slower",
        "turn_bound", "least_update_ratio", "ratio_bounds", "turn_series", "lognormal_turn",
    ),
    "theory.vectors": ("angle_between",),
    "theory.invariance": (
        "layer_norm", "rms_norm", "shrinkage", "scale_effect", "centred", "adjacent_cosine_views",
    ),
    "theory.depth": (
        "evolve", "fate", "attractor", "theodorus_bounds", "spiral_angle", "cumulative_bounds", "isotropic_fate",
        "layers_until_ratio", "effective_depth",
    ),
    "theory.attention": (
        "symmetric_similarity", "step_alignment", "best_turn", "slow_turn_hurts", "geodesic_loss", "alignment",
        "critical_norm", "imbalance_hurts", "layers_until_hurt", "noise_variance", "tail_probability",
        "argmax_probability", "log_moment", "mass_bounds", "critical_similarity",
    ),
    "theory.normalization": (
        "layernorm_vjp", "layernorm_jacobian", "radial_part", "target_norm", "alignment_gain", "output_norm_bounds",
        "aligned", "compensation_factor", "restored_amplitude", "clip_effect", "adam_steps", "largest_adam_step",
        "varying_factor_bound",
    ),
    "theory.precision": ("round_to_bf16", "lost_below", "update_lost", "all_bf16", "frozen_from", "audit_gain"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'theory' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
