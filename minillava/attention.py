"""Where tokens look: attention of text on the image, its map, and the paper's signal as a function of the visual norm.

The model keeps its fused attention; the weights are computed again from the queries and keys that an observed forward
pass leaves behind.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from minillava.data import IGNORE, Batch
from minillava.llava import MiniLLaVA
from minillava.probe import Moments, Observation, each, observe


def attention(q: Tensor, k: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Scores q·k/√hs and weights (B, nh, T, S) of queries (B, nh, T, hs) for keys (B, kv, S, hs) under a mask."""
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, nh, S, hs): each key head serves a group
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores, scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)


def attention_mass(model: MiniLLaVA, batches: Batch | Iterable[Batch]) -> dict:
    """Share of their attention that text tokens after an image give to it.

    Returns `mass` (L,), the mean over heads and queries; `uniform`, the share that even attention would give; and
    `queries`, how many there were. Raises ValueError if no text follows an image.
    """
    mass: dict[int, Moments] = defaultdict(Moments)
    uniform = Moments()
    for batch in each(batches):
        seen = observe(model, batch)
        visible = seen.mask & seen.visual[:, None, None, :]  # (B, 1, T, T)
        after = seen.text & visible.any(dim=-1)[:, 0]  # (B, T)
        uniform.add((visible.sum(-1) / seen.mask.sum(-1))[:, 0][after])
        for i, (q, k) in enumerate(zip(seen.queries, seen.keys, strict=True)):
            weights = attention(q, k, seen.mask)[1]  # (B, nh, T, T)
            mass[i].add((weights * visible).sum(-1).mean(1)[after])
    if uniform.count == 0:
        raise ValueError("no text token comes after an image, so no query can look at one")
    return {
        "mass": np.array([moments.mean for moments in mass.values()]),
        "uniform": uniform.mean,
        "queries": uniform.count,
    }


def asking_positions(batch: Batch) -> Tensor:
    """Where each row decides its first answer token (B,): before its first label, or its last token if it has none."""
    position = torch.arange(batch.labels.shape[1], device=batch.labels.device).expand_as(batch.labels)
    last = torch.where(batch.document_ids > 0, position, 0).amax(dim=1)
    supervised = batch.labels != IGNORE
    return torch.where(supervised.any(dim=1), supervised.int().argmax(dim=1) - 1, last)


def _at_query(seen: Observation, positions: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Every layer's scores and weights (B, nh, S) of one query a row, and where the image it sees lies (B, N)."""
    B, T = seen.visual.shape
    if positions.shape != (B,) or not bool(((positions >= 0) & (positions < T)).all()):
        raise ValueError(f"positions must be {B} numbers from 0 to {T - 1}, one a row, got {positions.tolist()}")
    rows = torch.arange(B, device=seen.visual.device)
    positions = positions.to(rows.device)
    mask = seen.mask[rows, :, positions][:, :, None]  # (B, 1, 1, S)
    visible = mask[:, 0, 0] & seen.visual  # (B, S)
    counts = visible.sum(dim=1)
    if bool((counts != counts[0]).any()) or counts[0] == 0:
        raise ValueError(f"each row's query must see the same number of visual tokens, > 0; got {counts.tolist()}")
    layers = []
    for q, k in zip(seen.queries, seen.keys, strict=True):
        scores, weights = attention(q[rows, :, positions][:, :, None], k, mask)  # (B, nh, 1, S)
        layers.append((scores[:, :, 0], weights[:, :, 0]))
    return layers, visible.nonzero()[:, 1].view(B, -1)


def attention_map(model: MiniLLaVA, batch: Batch, positions: Tensor | None = None) -> dict:
    """Where on the image one query of each row looks, by default the one that decides the first answer token.

    `positions` (B,) chooses other queries. Returns `maps` (B, L, side, side), mean over heads, whose sum is the mass on
    the image, and `positions`. Raises ValueError unless each query sees exactly one square image, and for positions
    that are not in the rows.
    """
    positions = asking_positions(batch) if positions is None else positions
    layers, image = _at_query(observe(model, batch), positions)
    side = math.isqrt(image.shape[1])
    if side**2 != image.shape[1]:
        raise ValueError(f"{image.shape[1]} visual tokens are not one square image")
    maps = [weights.mean(dim=1).gather(1, image).view(-1, side, side) for _, weights in layers]
    return {"maps": torch.stack(maps, dim=1).float().cpu().numpy(), "positions": positions.cpu().numpy()}


def signal(
    model: MiniLLaVA,
    batch: Batch,
    relevant: Tensor,
    scales: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 4.0),
    positions: Tensor | None = None,
) -> dict:
    """The paper's signal at the asking token, as a function of how loud visual tokens are.

    `relevant` (B, N) marks the visual tokens that hold the answer. Every factor of `scales` multiplies the visual
    tokens before they enter the LM. Returns arrays (scales, L), means over rows and heads: `difference`, the score
    q·k/√hs of relevant keys less that of irrelevant ones; `standardised`, the same over the standard deviation of the
    irrelevant scores, and `standardised_best`, that of the best head; `mass`, the attention on relevant tokens. Beside
    them `scale`, `norm_visual` (scales,), `norm_text`, and `relevant_share`, the share of visual tokens that are
    relevant. Raises ValueError unless every row has at least one relevant and two irrelevant tokens.
    """
    positions = asking_positions(batch) if positions is None else positions
    rows: dict[str, list] = defaultdict(list)
    for scale in scales:
        seen = observe(model, batch, visual_scale=scale)
        norms = seen.states["embedding"].double().norm(dim=-1)  # (B, T)
        layers, image = _at_query(seen, positions)
        hit = _check_relevant(relevant, image)[:, None]  # (B, 1, N)
        measured = [_signal_of_layer(scores, weights, image, hit) for scores, weights in layers]
        for key in measured[0]:
            rows[key].append([layer[key] for layer in measured])
        rows["scale"].append(float(scale))
        rows["norm_visual"].append(norms[seen.visual].mean().item())
    result: dict = {key: np.array(values) for key, values in rows.items()}
    return result | {"norm_text": norms[seen.text].mean().item(), "relevant_share": hit.double().mean().item()}


def _check_relevant(relevant: Tensor, image: Tensor) -> Tensor:
    if relevant.shape != image.shape or relevant.dtype != torch.bool:
        raise ValueError(
            f"relevant must be booleans {tuple(image.shape)}, got {relevant.dtype} {tuple(relevant.shape)}"
        )
    bad = (relevant.sum(1) < 1) | ((~relevant).sum(1) < 2)
    if bool(bad.any()):
        raise ValueError(f"row {int(bad.nonzero()[0])} needs at least 1 relevant and 2 irrelevant visual tokens")
    return relevant.to(image.device)


def _signal_of_layer(scores: Tensor, weights: Tensor, image: Tensor, hit: Tensor) -> dict[str, float]:
    """Signal of one layer from scores and weights (B, nh, S), image positions (B, N) and relevance (B, 1, N)."""
    where = image[:, None].expand(-1, scores.shape[1], -1)  # (B, nh, N)
    scores, weights = scores.gather(2, where).double(), weights.gather(2, where).double()
    others = (scores * ~hit).sum(-1) / (~hit).sum(-1)  # (B, nh)
    spread = ((scores - others[..., None]).square() * ~hit).sum(-1).div((~hit).sum(-1)).sqrt()
    difference = (scores * hit).sum(-1) / hit.sum(-1) - others
    standardised = difference / spread.clamp_min(1e-30)  # equal scores everywhere: 0, not NaN
    return {
        "difference": difference.mean().item(),
        "standardised": standardised.mean().item(),
        "standardised_best": standardised.mean(dim=0).max().item(),
        "mass": (weights * hit).sum(-1).mean().item(),
    }
