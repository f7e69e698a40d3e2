"""What attention looks at in a Hugging Face model, and what a trained one says when its visual tokens are scaled.

Both run the model with an attention function of our own, which computes what attention computes and keeps the weights,
the keys as they enter the dot product, and the values. It knows masks of any shape, grouped heads and capped scores.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from minillava import hf
from minillava.probe import Moments

NAME = "minillava_recorded"


@dataclass
class Recorded:
    """Of every LM layer, in order; `weights` are means over heads."""

    weights: list[Tensor] = field(default_factory=list)  # (B, T, S)
    keys: list[Tensor] = field(default_factory=list)  # (B, S, kv * hs)
    values: list[Tensor] = field(default_factory=list)  # (B, S, kv * hs)


@contextmanager
def recorded(model: Any, parts: hf.Parts) -> Iterator[Recorded]:
    """Within it, the LM's attention is computed by `_attend` and written down; afterwards the model is as before."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    kept = Recorded()
    ours = {id(module) for layer in parts.layers for module in layer.modules()}

    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, None]:
        output, weights = _attend(module, q, k, v, attention_mask, options)
        if id(module) in ours:
            kept.weights.append(weights.mean(dim=1))
            kept.keys.append(k.transpose(1, 2).flatten(2))
            kept.values.append(v.transpose(1, 2).flatten(2))
        return output, None

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    before = {module: module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}
    try:
        for module in before:
            module.config._attn_implementation = NAME
        yield kept
    finally:
        for module, implementation in before.items():
            module.config._attn_implementation = implementation


def _attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Output (B, T, nh, hs) and weights (B, nh, T, S) of q (B, nh, T, hs), k and v (B, kv, S, hs)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scale = options.get("scaling") or q.shape[-1] ** -0.5
    scores = (q @ k.transpose(-1, -2)).float() * scale
    cap = options.get("softcap")
    if cap:
        scores = torch.tanh(scores / cap) * cap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()
    elif options.get("is_causal", getattr(module, "is_causal", False)):
        T, S = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1), -torch.inf)
    weights = scores.softmax(dim=-1)
    return (weights.to(v.dtype) @ v).transpose(1, 2).contiguous(), weights


def attention(model: Any, parts: hf.Parts, samples: Iterable[dict[str, Tensor]]) -> dict[str, Any]:
    """Share of their attention that text tokens behind an image give to it.

    `mass` (L,): mean over heads, queries and samples; `uniform`: what even attention over all tokens up to the query
    would give; `map`: attention of the first sample's last token on the image, (L, side, side), or None unless its
    visual tokens are one square. Raises ValueError if no text follows an image.
    """
    mass: dict[int, Moments] = defaultdict(Moments)
    uniform, maps = Moments(), None
    for inputs in samples:
        with recorded(model, parts) as kept:
            seen = hf.observe(model, parts, inputs).observation
        behind = seen.text & (seen.visual.cumsum(dim=1) > 0)  # (B, T)
        counts = torch.arange(1, behind.shape[1] + 1, device=behind.device)
        uniform.add((seen.visual.cumsum(dim=1) / counts)[behind])
        for i, weights in enumerate(kept.weights):
            mass[i].add((weights * seen.visual[:, None]).sum(-1)[behind])
        side = math.isqrt(int(seen.visual.sum()))
        if maps is None and side**2 == int(seen.visual.sum()):
            maps = torch.stack([w[0, -1][seen.visual[0]].view(side, side) for w in kept.weights]).float().cpu().numpy()
    if uniform.count == 0:
        raise ValueError("no text token comes after an image, so no query can look at one")
    return {"mass": [moments.mean for moments in mass.values()], "uniform": uniform.mean, "map": maps}


# Interventions -------------------------------------------------------------------------------------------------------


def read_scales(words: Sequence[str], visual: float, text: float) -> dict[str, float]:
    """Factors by name from "0.1", "norm-matched", ...; the latter is text / visual norm. ValueError for other words."""
    scales = {}
    for word in words:
        try:
            scales[word] = text / visual if word == "norm-matched" else float(word)
        except ValueError:
            raise ValueError(f"--interventions {word}: a positive number or norm-matched is needed") from None
        if not 0 < scales[word] < math.inf:
            raise ValueError(f"--interventions {word}: a positive number or norm-matched is needed")
    return scales


def interventions(
    model: Any, parts: hf.Parts, samples: Iterable[dict[str, Tensor]], scales: dict[str, float]
) -> dict[str, dict[str, Any]]:
    """What a trained model says when its visual tokens are multiplied by each of `scales` as they enter the LM.

    Of every scale, means over samples: `kl`, the Kullback-Leibler divergence [nat] of the next-token distribution after
    the prompt from the untouched model's; and lists over layers: `mass`, the last token's attention on the image, and
    `keys`, `values`, the cosine of visual tokens' keys and values to the untouched ones (heads side by side). Two
    controls: "blank image" (every pixel value 0, the mean of a normalised picture) and "no image" (its tokens cut out).
    Deep-stack features, which are added later, are not scaled.
    """
    sums: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for inputs in samples:
        kept, base, visual = _run(model, parts, inputs)
        sums["as it is"]["mass"].append(_mass(kept, visual))
        variants = {name: (inputs, scale) for name, scale in scales.items()}
        blank = {k: torch.zeros_like(v) if k == "pixel_values" else v for k, v in inputs.items()}
        variants["blank image"] = (_keep_images(blank), 1.0)
        for name, (given, scale) in variants.items():
            other, said, _ = _run(model, parts, given, scale)
            sums[name]["kl"].append(divergence(base, said))
            sums[name]["mass"].append(_mass(other, visual))
            sums[name]["keys"].append(_cosines(kept.keys, other.keys, visual))
            sums[name]["values"].append(_cosines(kept.values, other.values, visual))
        with torch.no_grad():
            said = model(**hf.without_image(inputs, parts.image_token_id), use_cache=False).logits[:, -1]
        sums["no image"]["kl"].append(divergence(base, said))
    result: dict[str, dict[str, Any]] = {}
    for name, found in sums.items():
        means = {key: torch.tensor(values).double().mean(dim=0).tolist() for key, values in found.items()}
        known = {"as it is": 1.0, "blank image": 1.0} | scales
        result[name] = {key: means.get(key) for key in ("kl", "mass", "keys", "values")}
        result[name]["scale"] = known.get(name)
    result["as it is"]["kl"] = 0.0
    return result


def _keep_images(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Idefics-like models drop pictures that are exactly 0, as padding; the smallest step away keeps them."""
    return {k: v + 1e-6 if k == "pixel_values" else v for k, v in inputs.items()}


def _run(model: Any, parts: hf.Parts, inputs: dict[str, Tensor], scale: float = 1.0) -> tuple[Recorded, Tensor, Tensor]:
    with recorded(model, parts) as kept:
        seen = hf.observe(model, parts, inputs, visual_scale=scale)
    return kept, seen.next_token, seen.observation.visual


def divergence(base: Tensor, other: Tensor) -> float:
    """KL(base ‖ other) [nat] of two logits (B, V), mean over B."""
    base, other = base.double().log_softmax(-1), other.double().log_softmax(-1)
    return (base.exp() * (base - other)).sum(-1).mean().item()


def _mass(kept: Recorded, visual: Tensor) -> list[float]:
    return [(weights[:, -1] * visual).sum(-1).mean().item() for weights in kept.weights]


def _cosines(base: list[Tensor], other: list[Tensor], visual: Tensor) -> list[float]:
    pairs = zip(base, other, strict=True)
    return [torch.cosine_similarity(a[visual].double(), b[visual].double(), dim=-1).mean().item() for a, b in pairs]
