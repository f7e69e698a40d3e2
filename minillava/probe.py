"""How tokens turn, layer by layer: the paper's measurements on a trained model, with theory's predictions beside them.

One observed forward pass becomes an `Observation`: residual states, queries and keys, and which token is visual. All
geometry works on observations and does not know which model they came from. Angles are radians, norms are in the units
of the embeddings, statistics are taken over tokens, and every result is a dict (or `Trace.to_dict()`) of numbers, lists
and numpy arrays. Functions that average take one `Batch` or an iterable of them and keep only running sums.

*Visual* tokens are those at image placeholders. *Text* tokens are all other tokens of documents that hold an image:
padding and text-only documents count in neither, so the two modalities are compared in each other's company.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minillava.data import Batch
from minillava.llava import MiniLLaVA
from minillava.lm import build_mask
from theory.rotation import adjacent_cosine, step_angle

MODALITIES = ("visual", "text")
CLOSING = (".mlp", ".layer")  # how names of states end that close a layer


# Observing -----------------------------------------------------------------------------------------------------------


@dataclass
class Observation:
    """What one forward pass leaves behind; nothing else of a model is needed below.

    `states` holds the residual stream in order: the LM's input, then the state after every step. A state whose name
    ends in ".mlp" closes a layer, and so does ".layer" where a layer is one step; ".added" is a step between two
    layers that belongs to neither. The last one must be the stream itself, taken *before* the final norm.
    """

    states: dict[str, Tensor]  # each (B, T, D)
    queries: list[Tensor]  # of each layer (B, nh, T, hs), as they enter the dot product
    keys: list[Tensor]  # of each layer (B, kv, T, hs)
    mask: Tensor  # (B, 1, T, T), True where a query may look
    visual: Tensor  # (B, T) booleans
    text: Tensor  # (B, T) booleans

    @property
    def layers(self) -> list[str]:
        """Names of the LM's input and of every layer's output."""
        names = list(self.states)
        return names[:1] + [name for name in names if name.endswith(CLOSING)]

    @property
    def spans(self) -> list[tuple[str, str]]:
        """Names of every layer's own input and output."""
        spans, start = [], next(iter(self.states))
        for name in self.states:
            if name.endswith(CLOSING):
                spans.append((start, name))
            if name.endswith((*CLOSING, ".added")):
                start = name
        return spans


def modalities(batch: Batch, image_token_id: int) -> tuple[Tensor, Tensor]:
    """Masks (B, T) of visual tokens and of text tokens in documents with an image."""
    document_ids = batch.document_ids
    visual = (batch.input_ids == image_token_id) & (document_ids > 0)
    same = document_ids[:, :, None] == document_ids[:, None, :]  # (B, T, T)
    with_image = (same & visual[:, None, :]).any(dim=-1)  # (B, T)
    return visual, with_image & ~visual  # padding is no document with an image


@torch.no_grad()
def observe(model: MiniLLaVA, batch: Batch, visual_scale: float = 1.0) -> Observation:
    """Run our model once and keep its states; `visual_scale` multiplies visual tokens as they enter the LM."""
    weight = model.projector.fc1.weight
    batch = batch.to(weight.device)
    visual, text = modalities(batch, model.config.image_token_id)
    inputs_embeds = model.embed(batch.input_ids, **batch.images(weight.dtype), sample_ids=batch.sample_ids)
    inputs_embeds = torch.where(visual[..., None], inputs_embeds * visual_scale, inputs_embeds)  # (B, T, D)
    _, record = model.lm(inputs_embeds, batch.document_ids, return_states=True)
    return Observation(
        states={name: value for name, value in record.items() if name.split(".")[-1] not in ("q", "k")},
        queries=[value for name, value in record.items() if name.endswith(".q")],
        keys=[value for name, value in record.items() if name.endswith(".k")],
        mask=build_mask(batch.document_ids),
        visual=visual,
        text=text,
    )


def each(batches: Batch | Iterable[Batch]) -> Iterable[Batch]:
    return [batches] if isinstance(batches, Batch) else batches


# Geometry of steps ---------------------------------------------------------------------------------------------------


class Moments:
    """Mean, standard deviation and harmonic mean of values that arrive in pieces, in constant memory."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares, self.inverse = 0, 0.0, 0.0, 0.0

    def add(self, values: Tensor) -> None:
        if len(values) == 0:
            return
        values = values.double()
        mean, count = values.mean().item(), self.count + len(values)
        shift = mean - self.mean
        # Sums of squared deviations add up once each piece is moved to the common mean (Chan et al.): no cancellation.
        self.squares += (values - mean).square().sum().item() + shift**2 * self.count * len(values) / count
        self.mean += shift * len(values) / count
        self.inverse += values.reciprocal().sum().item()
        self.count = count

    def summary(self) -> dict[str, float]:
        """{"mean", "std", "harmonic"}; NaN when nothing was added."""
        if self.count == 0:
            return dict.fromkeys(("mean", "std", "harmonic"), math.nan)
        harmonic = self.count / self.inverse if self.inverse else math.nan
        return {"mean": self.mean, "std": math.sqrt(self.squares / self.count), "harmonic": harmonic}


def angle_between(x: Tensor, y: Tensor) -> Tensor:
    """Angle of vectors (..., D) in radians (...), NaN where one of them is zero.

    Kahan's form: acos of a dot product would lose half of the digits near 0 and π.
    """
    return _angle_of_units(*(v / v.norm(dim=-1, keepdim=True) for v in (x.double(), y.double())))


def _angle_of_units(x: Tensor, y: Tensor) -> Tensor:
    return 2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1))


def step_geometry(before: Tensor, after: Tensor) -> dict[str, Tensor]:
    """One step of tokens (M, D): norm n, update C, angle φ (NaN if C = 0), turn θ and cosine cos θ, each (M,) (R1).

    The update is the difference of the states, so it holds what rounding did to the stream, too; in float64 the
    difference of two narrower floats adds no rounding of its own.
    """
    return _geometry(_Directed.of(before.double()), _Directed.of(after.double()))[0]


@dataclass
class _Directed:
    """Tokens (M, D) with their norms (M,) and directions (M, D), which several angles share."""

    state: Tensor
    norm: Tensor
    unit: Tensor

    @classmethod
    def of(cls, state: Tensor) -> _Directed:
        norm = state.norm(dim=-1)
        return cls(state, norm, state / norm[:, None])


def _geometry(before: _Directed, after: _Directed) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """What `step_geometry` gives, and the part of the update across the token (M, D) with its length (M,)."""
    update = after.state - before.state
    along = (update * before.unit).sum(dim=-1)  # C cos φ
    C = update.norm(dim=-1)
    across = update.addcmul_(before.unit, along[:, None], value=-1)
    length = across.norm(dim=-1)  # C sin φ
    turn = _angle_of_units(before.unit, after.unit)
    angle = torch.atan2(length, along).where(C > 0, torch.nan)
    step = {"norm": before.norm, "update": C, "angle": angle, "turn": turn, "cosine": turn.cos()}
    return step, across, length


def predict(step: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn and cosine that theory gives each token from its own n, C and φ (R1, R5)."""
    n, C, angle = (step[name].cpu().numpy() for name in ("norm", "update", "angle"))
    angle = np.where(C == 0, 0.0, angle)  # a step of size zero has no direction and needs none
    return {
        "turn": torch.as_tensor(step_angle(n, C, angle)),
        "cosine": torch.as_tensor(adjacent_cosine(n, C, angle)),
    }


@dataclass
class Trace:
    """Means over tokens: `data[modality][key]` is an array over steps (2L, or more where something
    is added between layers), layers (L) or states (one more than steps).

    steps   norm, update, angle, turn, cosine, each with `_std`; norm_harmonic; direction_agreement, the mean cosine
            between the turning directions of two tokens (0 if they are symmetrically distributed, A3)
            predicted_turn, predicted_cosine      theory from every token's own n, C, φ: explains everything
            turn_at_means, turn_at_harmonic       theory from the mean (or harmonic mean) n and the mean C, φ (R6)
            turn_at_shared                        the same from the mean n and the C, φ of both modalities (A1, A2)
    layers  layer_cosine, layer_cosine_std        the paper's update rate (RQ3)
    states  state_norm, state_norm_std, state_norm_harmonic, input_cosine, input_cosine_std

    `formula_error` is the largest difference between theory and measurement over all tokens and steps, of the turn
    (radians) and of the cosine.
    """

    steps: list[str]
    tokens: dict[str, int]
    data: dict[str, dict[str, np.ndarray]]
    formula_error: dict[str, float]

    def to_dict(self) -> dict:
        """The trace as JSON takes it."""
        return plain(vars(self))


def plain(result):
    """A result of this module as JSON takes it: arrays become lists, and what has no value (NaN) becomes None."""
    if isinstance(result, dict):
        return {key: plain(value) for key, value in result.items()}
    if isinstance(result, np.ndarray | list):
        return [plain(value) for value in (result.tolist() if isinstance(result, np.ndarray) else result)]
    return None if isinstance(result, float) and math.isnan(result) else result


def trace(model: MiniLLaVA, batches: Batch | Iterable[Batch]) -> Trace:
    """Follow our model's tokens through its layers: `trace_observations` on `observe`."""
    return trace_observations(observe(model, batch) for batch in each(batches))


@torch.no_grad()
def trace_observations(observations: Iterable[Observation]) -> Trace:
    """Statistics of every step, layer and state over all tokens of all observations.

    Raises ValueError where a token's state is zero or not finite (it has no direction), and without any visual token.
    """
    follow = {modality: _Follower() for modality in MODALITIES}
    steps: list[str] = []
    for seen in observations:
        steps = list(seen.states)[1:]
        for modality, follower in follow.items():
            follower.add(seen, modality)
    if follow["visual"].tokens == 0:
        raise ValueError("no visual token in any batch: there is nothing to trace")
    data = {modality: follower.summary() for modality, follower in follow.items() if follower.tokens}
    _add_predictions_from_means(data)
    return Trace(
        steps=steps,
        tokens={modality: follower.tokens for modality, follower in follow.items()},
        data=data,
        formula_error={key: max(follower.error[key] for follower in follow.values()) for key in ("turn", "cosine")},
    )


class _Follower:
    """Running statistics of one modality's tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self.moments: dict[tuple[str, int], Moments] = defaultdict(Moments)
        self.directions: dict[int, Tensor] = defaultdict(lambda: torch.zeros(()))  # sum of unit turning directions
        self.turned: dict[int, int] = defaultdict(int)  # tokens that did turn, by step
        self.error = {"turn": 0.0, "cosine": 0.0}

    def add(self, seen: Observation, modality: str) -> None:
        """Take the states of one more pass, one after the other: three of them are in memory in float64."""
        mask = getattr(seen, modality)  # (B, T)
        if not bool(mask.any()):
            return
        self.tokens += int(mask.sum())
        spans = {end: (i, start) for i, (start, end) in enumerate(seen.spans)}
        starts: dict[str, Tensor] = {}  # directions at the layers' inputs, until the layer's end
        first = before = None
        for i, (name, state) in enumerate(seen.states.items()):
            after = _Directed.of(state[mask].double())
            if not bool((after.norm.isfinite() & (after.norm > 0)).all()):
                raise ValueError(f"state '{name}': a {modality} token is zero or not finite, so it has no direction")
            first = first or after
            self.moments["state_norm", i].add(after.norm)
            self.moments["input_cosine", i].add((first.unit * after.unit).sum(dim=-1))
            if before is not None:
                self._add_step(i - 1, before, after)
            if name in spans:
                layer, start = spans[name]
                self.moments["layer_cosine", layer].add((starts.pop(start) * after.unit).sum(dim=-1))
            if name in {start for _, start in spans.values()}:
                starts[name] = after.unit
            before = after

    def _add_step(self, i: int, before: _Directed, after: _Directed) -> None:
        step, across, length = _geometry(before, after)
        for key, values in step.items():
            self.moments[key, i].add(values[step["update"] > 0] if key == "angle" else values)
        for key, values in predict(step).items():
            self.moments[f"predicted_{key}", i].add(values)
            self.error[key] = max(self.error[key], (values - step[key].cpu()).abs().max().item())
        turned = length > 0
        weight = length.reciprocal().where(turned, 0.0)  # unit directions, summed in one product
        self.directions[i] = self.directions[i] + (weight @ across).cpu()  # (D,)
        self.turned[i] += int(turned.sum())

    def summary(self) -> dict[str, np.ndarray]:
        rows: dict[str, list[float]] = defaultdict(list)
        for (key, _), moments in sorted(self.moments.items()):
            mean, std, harmonic = moments.summary().values()
            rows[key].append(mean)
            rows[f"{key}_std"].append(std)
            if key in ("norm", "state_norm"):
                rows[f"{key}_harmonic"].append(harmonic)
        for i, total in self.directions.items():  # ||sum of M units||² = M + sum of cosines over pairs of tokens
            M = self.turned[i]
            rows["direction_agreement"].append((float(total @ total) - M) / (M * (M - 1)) if M > 1 else math.nan)
        return {key: np.array(values) for key, values in rows.items()}


def _add_predictions_from_means(data: dict[str, dict[str, np.ndarray]]) -> None:
    """What theory says when it is told only means, as the paper's argument is (R6, A1, A2)."""
    update, angle = (np.mean([rows[key] for rows in data.values()], axis=0) for key in ("update", "angle"))
    for rows in data.values():
        rows["turn_at_means"] = _turn(rows["norm"], rows["update"], rows["angle"])
        rows["turn_at_harmonic"] = _turn(rows["norm_harmonic"], rows["update"], rows["angle"])
        rows["turn_at_shared"] = _turn(rows["norm"], update, angle)


def _turn(norm: np.ndarray, update: np.ndarray, angle: np.ndarray) -> np.ndarray:
    turn, known = np.full(len(norm), np.nan), ~np.isnan(angle)  # no token with C > 0, no mean φ
    turn[known] = step_angle(norm[known], update[known], angle[known])
    return turn


# The interface -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def interface_norms(model: MiniLLaVA, batches: Batch | Iterable[Batch]) -> dict:
    """Norms on the way from the vision tower into the LM (RQ1, RQ2): each {"mean", "std", "harmonic"} over tokens.

    `encoder_blocks`: patches after the embedding and every ViT block, lists, if the batches hold pixels; `encoder`: the
    features; `projector`: after it; `visual`: after the arm, as the LM receives them; `text`: the batches' text
    tokens; `vocabulary`: non-zero rows of the embedding table, whose mean is T. `ratio_text` and `ratio_vocabulary` are
    visual over text means; `gain` has the arm's mean |g| and ||g||, or is None.
    Raises ValueError if no batch holds an image.
    """
    moments: dict[str, Moments] = defaultdict(Moments)
    blocks: dict[str, Moments] = defaultdict(Moments)
    table = model.lm.embed_tokens.weight
    for batch in each(batches):
        batch = batch.to(table.device)
        images = batch.images(table.dtype)
        if not images:
            continue
        if "pixel_values" in images:
            features, states = model.vision(images["pixel_values"], return_states=True)
            for name, state in states.items():
                if name == "embedding" or name.endswith(".mlp"):
                    blocks[name].add(_norms(state[:, int(model.config.vision.class_token) :]))
        else:
            features = images["features"]
        projected = model.projector(features)
        text = batch.input_ids[modalities(batch, model.config.image_token_id)[1]]
        tokens = {"encoder": features, "projector": projected, "visual": model.arm(projected), "text": table[text]}
        for name, values in tokens.items():
            moments[name].add(_norms(values))
    if not moments:
        raise ValueError("no batch holds an image, so there is nothing at the interface")
    vocabulary = _norms(table)
    moments["vocabulary"].add(vocabulary[vocabulary > 1e-6])
    result: dict = {name: value.summary() for name, value in moments.items()}
    if blocks:
        summaries = [value.summary() for value in blocks.values()]
        result["encoder_blocks"] = {key: [summary[key] for summary in summaries] for key in ("mean", "std", "harmonic")}
    gain = getattr(model.arm, "weight", None)
    return result | {
        "ratio_text": result["visual"]["mean"] / result["text"]["mean"],
        "ratio_vocabulary": result["visual"]["mean"] / result["vocabulary"]["mean"],
        "gain": None if gain is None else {"mean": gain.abs().mean().item(), "norm": gain.norm().item()},
    }


def _norms(x: Tensor) -> Tensor:
    return x.double().norm(dim=-1).flatten()
