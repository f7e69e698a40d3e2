"""`minillava probe` on a Hugging Face vision-language model: measure on pictures, lay theory beside it, say a verdict.

Everything is averaged while it streams: one sample is in memory at a time, however many pictures there are. All numbers
of the result are in embedding units, radians or cosines; "visual" and "text" as in `minillava.probe`, without the first
token of a prompt (`minillava.hf.token_masks` says why).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from minillava import hf, interventions
from minillava.probe import CLOSING, Moments, Observation, Trace, trace_observations
from theory.depth import evolve, layers_until_ratio
from theory.normalization import alignment_gain

PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}
MET = 1.1  # norms have met when they are within ten percent
GAP = 1.5  # a ratio of norms below this (and above 1/1.5) is no gap worth the name


@dataclass(frozen=True)
class Asked:
    """The pictures and questions of a probe; every picture is asked every question."""

    pictures: list[Path]
    questions: list[str]

    def samples(self, processor: Any, device: str) -> Iterator[dict[str, Tensor]]:
        for path in self.pictures:
            with Image.open(path) as opened:
                picture = opened.convert("RGB")
            for question in self.questions:
                yield hf.make_inputs(processor, picture, question, device)


def gather(image: Path | None, prompt: str, questions: Path | None, limit: int) -> Asked:
    """Find the pictures (a file, or at most `limit` of a folder and those in it, in
    order of name) and the questions (a line each).

    Raises ValueError for a path that is not there, a folder without pictures and a file without questions.
    """
    if image is None:
        raise ValueError("--image: a picture or a folder of pictures is needed to probe this model")
    if not image.exists():
        raise ValueError(f"--image {image}: no such file or folder")
    pictures = [image]
    if image.is_dir():
        pictures = sorted(path for path in image.rglob("*") if path.suffix.lower() in PICTURES)[:limit]
        if not pictures:
            raise ValueError(f"--image {image}: no picture in it ({', '.join(sorted(PICTURES))})")
    lines = [prompt]
    if questions is not None:
        lines = [line.strip() for line in questions.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"--questions {questions}: no question in it")
    return Asked(pictures, lines)


# Measuring -----------------------------------------------------------------------------------------------------------


def measure(model: Any, parts: hf.Parts, samples: Iterable[dict[str, Tensor]]) -> dict[str, Any]:
    """One pass over the samples: what `probe.json` holds, but for what is measured on request.

    Raises ValueError as `hf.observe` and `trace_observations` do.
    """
    moments: dict[str, Moments] = defaultdict(Moments)

    def observations() -> Iterator[Observation]:
        for i, inputs in enumerate(samples):
            seen = hf.observe(model, parts, inputs, verify=i == 0)
            state = seen.observation.states["embedding"]
            tokens = {"encoder": seen.encoder, "projector": seen.projected}
            tokens |= {"visual": state[seen.observation.visual], "text": state[seen.observation.text]}
            for name, values in tokens.items():
                moments[name].add(values.double().norm(dim=-1))
            yield seen.observation

    trace = trace_observations(observations())
    vocabulary = hf.vocabulary_norms(parts.embedding)
    moments["vocabulary"].add(vocabulary[vocabulary > 1e-6])
    interface: dict[str, Any] = {name: value.summary() for name, value in moments.items()}
    loud = interface["visual"]["mean"]
    interface["ratio_text"] = loud / interface["text"]["mean"]
    interface["ratio_vocabulary"] = loud / interface["vocabulary"]["mean"]
    T = interface["vocabulary"]["mean"]
    width = parts.embedding.weight.shape[-1]  # type: ignore[union-attr,index]
    result = {
        "interface": interface,
        "trace": trace,
        "theory": evolution(trace),
        "audit": audit(trace),
        "meeting": meeting(trace),
        "gain": {"T": T, "width": width, "gain": float(alignment_gain(T, width))},
    }
    return result | {"verdict": verdict(result)}


def evolution(trace: Trace) -> dict[str, np.ndarray]:
    """Norms at every state that the formula of one step gives from the mean norm at the input, C and φ alone (D1)."""
    result = {}
    for modality, rows in trace.data.items():
        angles = np.where(np.isnan(rows["angle"]), np.pi / 2, rows["angle"])  # no φ only where no token's C is above 0
        result[modality] = evolve(rows["state_norm"][0], rows["update"], angles).norms
    return result


def audit(trace: Trace) -> dict[str, Any]:
    """How far the paper's assumptions carry (THEORY.md, last section).

    Of each modality: `turned`, the sum over steps of the mean turn [rad], and the share of it that theory explains,
    1 − Σ|predicted − measured|/Σ measured, when told each token's own n, C, φ (`exact`), their means (`means`), or the
    mean n and a C and φ that both modalities share, as the paper assumes (`shared`; 1 is all, below 0 is worse than
    predicting no turn at all). Beside them what is assumed: `update_ratio` C_v/C_t (A1) and `angle_difference`
    φ_v − φ_t (A2) of every step, the mean `direction_agreement` (0 under A3), and `slower`, the share of steps in which
    visual tokens turned less.
    """
    visual, text = trace.data["visual"], trace.data["text"]
    both = ~np.isnan(visual["turn_at_shared"]) & ~np.isnan(text["turn_at_shared"])  # steps that move both modalities
    result: dict[str, Any] = {"steps": int(both.sum())}
    for modality, rows in trace.data.items():
        turned = rows["turn"][both].sum()
        told = {"exact": "predicted_turn", "means": "turn_at_means", "shared": "turn_at_shared"}
        result[modality] = {"turned": turned} | {
            name: 1 - np.abs(rows[key] - rows["turn"])[both].sum() / turned for name, key in told.items()
        }
        result[modality]["direction_agreement"] = float(np.nanmean(rows["direction_agreement"][both]))
    shared = visual["turn_at_shared"][both].sum() / text["turn_at_shared"][both].sum()
    return result | {
        "turn_ratio": result["visual"]["turned"] / result["text"]["turned"],
        "turn_ratio_shared": shared,
        "update_ratio": visual["update"][both] / text["update"][both],
        "angle_difference": (visual["angle"] - text["angle"])[both],
        "slower": float((visual["turn"] < text["turn"])[both].mean()),
    }


def meeting(trace: Trace) -> dict[str, float | None]:
    """After how many layers the two mean norms are within ten percent: `measured` (None: not within the model), and
    `predicted` for updates of one size that point nowhere in particular (D2); `update` is that size, a layer's.
    """
    ends = [0] + [i + 1 for i, step in enumerate(trace.steps) if step.endswith(CLOSING)]
    norms = np.stack([rows["state_norm"][ends] for rows in trace.data.values()])  # (2, L + 1)
    ratio = norms.max(axis=0) / norms.min(axis=0)
    met = np.flatnonzero(ratio <= MET)
    squares = np.mean([(rows["update"] ** 2).sum() for rows in trace.data.values()])
    update = math.sqrt(squares / (len(ends) - 1))
    predicted = 0.0
    if ratio[0] > MET:
        predicted = layers_until_ratio(norms[:, 0].max(), norms[:, 0].min(), update, MET)
    return {
        "measured": int(met[0]) if len(met) else None,
        "predicted": predicted,
        "layers": len(ends) - 1,
        "update": update,
    }


# Saying --------------------------------------------------------------------------------------------------------------


def verdict(result: dict[str, Any]) -> dict[str, str]:
    """`kind` (gap and slower; gap, not slower; reversed; no gap) and the same in `words`."""
    interface, trace = result["interface"], result["trace"]
    ratio = interface["ratio_text"]
    visual, text = (trace.data[modality]["layer_cosine"][0] for modality in ("visual", "text"))
    slower = visual > text
    if ratio >= GAP:
        kind = "gap, slower" if slower else "gap, not slower"
    else:
        kind = "reversed" if ratio <= 1 / GAP else "no gap"
    return {"kind": kind, "words": " ".join(sentences(result, kind, visual, text))}


def sentences(result: dict[str, Any], kind: str, visual: float, text: float) -> list[str]:
    interface, audited, met = result["interface"], result["audit"], result["meeting"]
    ratio = interface["ratio_text"]
    opening = {
        "no gap": "There is no norm gap:",
        "reversed": "The gap is reversed, visual tokens are the quieter ones:",
    }.get(kind, "There is a norm gap:")
    told = [
        f"{opening} visual tokens enter the LM with a mean norm of {interface['visual']['mean']:.3g}, text with "
        f"{interface['text']['mean']:.3g} (ratio {ratio:.2f}).",
        f"After the first layer a visual token's cosine to what it was is {visual:.3f}, a text token's {text:.3f}: "
        f"visual tokens turn {'less' if visual > text else 'no less'} than text there, and less in "
        f"{100 * audited['slower']:.0f} % of all steps.",
    ]
    measured = met["measured"]
    if kind != "no gap":
        told.append(
            f"The norms are within ten percent {f'after {measured} layers' if measured is not None else 'nowhere'} "
            f"(the model has {met['layers']}); updates without a direction would take {met['predicted']:,.1f}."
        )
    told.append(
        f"One update size and angle for both, as the paper assumes, explains "
        f"{_percent(audited['visual']['shared'])} of what visual tokens turn and {_percent(audited['text']['shared'])} "
        f"of what text turns; each token's own, {_percent(audited['visual']['exact'])}."
    )
    advice = {
        "gap, slower": f"If you are about to train on this projector, aligning it (gain {result['gain']['gain']:.4g}) "
        "is worth an arm of its own. Do not rescale a model that is already trained.",
        "gap, not slower": "The gap does not slow visual tokens here, so the paper's reason to align is missing.",
        "reversed": "Alignment would make visual tokens louder; the paper says nothing about that case.",
        "no gap": "There is nothing to align.",
    }
    return [*told, advice[kind]]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# The command ---------------------------------------------------------------------------------------------------------


def probe_hf(
    source: str,
    asked: Asked,
    names: dict[str, Any],
    device: str = "cpu",
    attention: bool = False,
    scales: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Everything `minillava probe` measures of a Hugging Face model; `names` as `hf.find_parts` takes them."""
    model, processor = hf.load(source, device=device)
    parts = hf.find_parts(model, **names)
    result: dict[str, Any] = {"model": source, "revision": getattr(model.config, "_commit_hash", None) or ""}
    result |= measure(model, parts, asked.samples(processor, device))
    result["samples"] = len(asked.pictures) * len(asked.questions)
    if attention:
        result["attention"] = interventions.attention(model, parts, asked.samples(processor, device))
    if scales:
        visual, text = (result["interface"][name]["mean"] for name in ("visual", "text"))
        factors = interventions.read_scales(scales, visual, text)
        samples = asked.samples(processor, device)
        result["interventions"] = interventions.interventions(model, parts, samples, factors)
    return result
