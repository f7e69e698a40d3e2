"""One run of the experiment: towers (pretrained once, cached), stage 1, stage 2, and every measure of the result."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minillava import data as batches
from minillava import layer_norm, llava, lm, norm_align, objectives, probe, scenes, tokenizer, train, vit, world
from minillava.attention import attention_map, attention_mass, signal
from minillava.checkpoint import save_model
from minillava.content import content_probe, visual_states
from minillava.data import Batch, Pool, normalize
from minillava.evaluate import accuracy, cell_accuracy, mean_loss
from minillava.llava import LLaVAConfig, MiniLLaVA
from minillava.lm import LM
from minillava.objectives import CellPool, CellReader, cell_loss, next_token_loss
from minillava.presets import VARIANTS, Preset, Variant
from minillava.tokenizer import END, IMAGE, Tokenizer, render, world_tokenizer
from minillava.train import TrainConfig, fit, gain_of
from minillava.vit import ViT


def cache_folder() -> Path:
    """Where towers and the tokenizer are kept between runs: $MINILLAVA_CACHE, else the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MINILLAVA_CACHE") or Path(home) / "minillava")


def _code(*modules) -> str:
    return hashlib.sha256(b"".join(Path(str(module.__file__)).read_bytes() for module in modules)).hexdigest()


# Read when imported: what is hashed is what runs, even if a file is edited while it does.
TOWER_CODE = _code(vit, lm, scenes, world, tokenizer, batches, objectives, train)
STAGE_CODE = _code(llava, norm_align, layer_norm)


def content_key(*parts: object) -> str:
    """A hash of settings and of the code that they configure: change either and nothing stale is reused."""
    settings = json.dumps([torch.__version__, TOWER_CODE, *parts], sort_keys=True)
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


@dataclass
class World:
    """Everything that all arms of one pretraining seed share: splits, tokenizer, and the frozen tower's features."""

    preset: Preset
    seed: int
    device: str
    tokenizer: Tokenizer
    splits: dict[str, world.Split]

    @functools.cached_property
    def vision(self) -> ViT:
        return pretrain_vision(self, show=False)[0]

    @functools.cached_property
    def features(self) -> dict[str, Tensor]:
        """The frozen tower's features of every picture (I, N, Dv), by split: it needs to look only once."""
        return {name: encode(self.vision, split.pixels) for name, split in self.splits.items()}

    @functools.cached_property
    def blank(self) -> Tensor:
        """Features (1, N, Dv) of an empty scene."""
        empty = np.zeros((1, self.preset.world.grid**2), dtype=int)
        return encode(self.vision, scenes.draw(empty, self.preset.world.image_size, np.random.default_rng(self.seed)))

    @functools.cached_property
    def languages(self) -> dict[bool, LM]:
        return {}

    def language(self, post_norm: bool) -> LM:
        """A copy of the pretrained language model, free to be trained further."""
        if post_norm not in self.languages:
            self.languages[post_norm] = pretrain_language(self, post_norm, show=False)
        return copy.deepcopy(self.languages[post_norm])

    def words(self, name: str) -> Pool:
        """Held-out questions about scenes told in words."""
        rng = np.random.default_rng([self.seed, 20])
        samples = world.word_questions(self.splits[name].cells, self.preset.world.kinds, 3, rng)
        return Pool(samples, self.tokenizer, self.preset.vision.num_patches)

    def text(self) -> Pool:
        """The tested text-only questions."""
        return Pool(world.tested_text(), self.tokenizer, self.preset.vision.num_patches)


@functools.lru_cache(maxsize=1)
def load_world(preset_json: str, seed: int, device: str) -> World:
    """The world of a pretraining seed; kept, so that the next run in this process finds it ready."""
    preset = preset_from_json(preset_json)
    splits = {name: world.build_split(preset.world, name, seed) for name in world.SPLITS}
    return World(preset, seed, device, world_tokenizer(cache_folder()), splits)


def preset_from_json(text: str) -> Preset:
    """A preset survives the way to a worker process and into results.json."""
    raw = json.loads(text)
    raw["world"] = world.WorldConfig(**raw["world"] | {"kinds": tuple(raw["world"]["kinds"])})
    raw["vision"], raw["lm"] = vit.ViTConfig(**raw["vision"]), lm.LMConfig(**raw["lm"])
    for name in ("vision_training", "language_training", "stage1", "stage2"):
        raw[name] = TrainConfig(**raw[name])
    for name in ("variants", "stage1_lrs", "stage2_lrs", "seeds"):
        raw[name] = tuple(raw[name])
    return Preset(**raw)


def preset_to_json(preset: Preset) -> str:
    return json.dumps(asdict(preset))


# Towers ---------------------------------------------------------------------------------------------------------------


def pretrain_vision(data: World, show: bool = True) -> tuple[ViT, dict[str, float]]:
    """The vision tower, taught to name what is in each cell; from the cache if it was trained before."""
    preset = data.preset
    config = replace(preset.vision_training, seed=data.seed)
    torch.manual_seed(data.seed)
    reader = CellReader(ViT(preset.vision), preset.world.grid).to(data.device)
    key = content_key("vision", asdict(preset.world), asdict(preset.vision), asdict(config), data.device)
    split = data.splits["train"]
    run = cache_folder() / f"vision-{key}"
    fit(reader, cell_loss, CellPool(split.pixels, split.cells), config, run, label="vision tower", show=show)
    test = data.splits["test"]
    return reader.vision.requires_grad_(False), cell_accuracy(reader, test.pixels, test.cells)


def pretrain_language(data: World, post_norm: bool, show: bool = True) -> LM:
    """The language model, taught to answer about scenes in words; from the cache if it was trained before."""
    preset = data.preset
    config = replace(preset.language_training, seed=data.seed)
    sizes = replace(preset.lm, vocab_size=len(data.tokenizer), post_norm=post_norm)
    torch.manual_seed(data.seed)
    model = LM(sizes).to(data.device)
    key = content_key(
        "language", asdict(preset.world), asdict(sizes), asdict(config), preset.language_samples, data.device
    )
    samples = world.language_samples(preset.world, preset.language_samples, data.seed)
    pool = Pool(samples, data.tokenizer, preset.vision.num_patches)
    name = "language, Post-Norm" if post_norm else "language model"
    fit(model, next_token_loss, pool, config, cache_folder() / f"language-{key}", label=name, show=show)
    return model


@torch.no_grad()
def encode(tower: ViT, pixels: np.ndarray, batch_size: int = 500) -> Tensor:
    """Features (I, N, Dv) of uint8 pictures (I, 3, S, S), on the CPU."""
    device = next(tower.parameters()).device
    chunks = (torch.from_numpy(pixels[i : i + batch_size]).to(device) for i in range(0, len(pixels), batch_size))
    return torch.cat([tower(normalize(chunk)).cpu() for chunk in chunks])


# One run --------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One variant of one seed: the pools it reads, and the model it trains."""

    preset: Preset
    name: str
    seed: int
    folder: Path
    device: str = "cpu"
    show: bool = False

    def __post_init__(self):
        tower_seed = self.seed if self.preset.pretrain_seeds else 0
        self.variant: Variant = VARIANTS[self.name]
        self.data = load_world(preset_to_json(self.preset), tower_seed, self.device)

    @functools.cached_property
    def key(self) -> str:
        """Stands for everything that a stage of this run depends on beside its TrainConfig."""
        preset = self.preset
        parts = asdict(preset.world), asdict(preset.vision), asdict(preset.lm), preset.language_samples
        towers = asdict(preset.vision_training), asdict(preset.language_training), self.data.seed, self.device
        return content_key(STAGE_CODE, parts, towers, asdict(self.variant))

    @functools.cached_property
    def training_pools(self) -> dict[int, Pool]:
        """What each stage trains on; rendered once, for all learning rates."""
        questions = world.instruction_samples(self.preset.world, self.data.splits["train"], self.seed)
        return {1: self.captions("train"), 2: self.pool("train", questions)}

    def pool(self, split: str, samples: list) -> Pool:
        return Pool(samples, self.data.tokenizer, self.preset.vision.num_patches, features=self.data.features[split])

    def questions(self, split: str, limit: int | None = None) -> Pool:
        """Questions about the pictures of a split (of the first `limit` pictures)."""
        rng = np.random.default_rng([self.data.seed, 21])
        samples = world.visual_questions(self.data.splits[split], self.preset.world.kinds, 3, rng)
        return self.pool(split, samples[:limit])

    def captions(self, split: str) -> Pool:
        return self.pool(split, world.captions(self.data.splits[split]))

    def build(self) -> MiniLLaVA:
        """A model that stands before stage 1. Its projector depends on the seed alone: arms start from the same one."""
        language, vision = self.data.language(self.variant.post_norm), self.data.vision
        torch.manual_seed(1000 + self.seed)  # after the towers: to make or to load them moves the random state
        config = LLaVAConfig(self.preset.vision, language.config, self.variant.arm, IMAGE)
        model = MiniLLaVA(config, vision, language).to(self.device)
        loudness = self.base_norm() if self.variant.arm == "discrete" else None
        model.calibrate(self.data.features["train"][:256].to(self.device), loudness)
        return model

    def base_norm(self) -> float:
        """How loud the visual tokens of the base arm are after stage 1, with the same seed and rate: the size that the
        discrete arm starts at. That stage 1 is this run's own: runs do not wait for each other."""
        base = replace(self, name="base", folder=self.folder / "reference")
        _, measures = base.stage1(self.preset.stage1_lrs[0])
        return measures["interface_stage1"]["visual"]["mean"]

    def train_stage(self, model: MiniLLaVA, stage: int, lr: float, name: str, evaluate: Callable | None = None):
        """Train one stage in place and return its rows; `name` is the run's folder."""
        template = self.preset.stage1 if stage == 1 else self.preset.stage2
        config = replace(template, lr=lr, seed=self.seed, gain_lr=self.variant.gain_lr)
        model.set_trainable(stage, train_gain=self.variant.train_gain)
        label, about = f"{self.name} stage {stage}", {"experiment": self.key, "stage": stage}
        pool = self.training_pools[stage]
        return fit(model, next_token_loss, pool, config, self.folder / name, evaluate, label, self.show, about)

    def stage1(self, lr: float) -> tuple[MiniLLaVA, dict]:
        """Projector and arm on captions. Returns the model and what was measured of it."""
        model = self.build()
        before = self.look(model)
        rows = self.train_stage(model, 1, lr, f"stage1-{lr:g}")
        measures = {
            "stage1_lr": lr,
            "stage1_rows": rows,
            "stage1_caption_loss": mean_loss(model, self.captions("test")),
            "gain_after_stage1": gain_of(model),
            "interface_start": before,
            "interface_stage1": self.look(model),
        }
        return model, measures

    def stage2(self, model: MiniLLaVA, lr: float, name: str) -> list[dict]:
        """Projector, arm and LM on questions; accuracy on a part of the selection split is logged on the way."""
        watch = self.questions("selection", limit=200)
        return self.train_stage(
            model, 2, lr, name, evaluate=lambda: {"visual_accuracy": accuracy(model, watch)["all"]["accuracy"]}
        )

    def look(self, model: MiniLLaVA) -> dict:
        """Norms at the interface (RQ1, RQ2), over one batch of test questions."""
        return probe.plain(probe.interface_norms(model, self.probe_batch()))

    def probe_batch(self) -> Batch:
        return self.questions("test", limit=100).take(range(min(100, self.preset.world.eval_scenes)))


def measure(run: Run, model: MiniLLaVA, rows: list[dict]) -> dict:
    """Everything we say about a trained model, on the test split."""
    model.eval()
    questions, words = run.questions("test"), run.data.words("test")
    visual = accuracy(model, questions)
    curve = [(row["step"], row["visual_accuracy"]) for row in rows if "visual_accuracy" in row]
    batch = run.probe_batch()
    traced = probe.trace(model, batch)
    text_only = accuracy(model, run.data.text())
    return {
        "visual_accuracy": visual["all"]["accuracy"],
        "visual_accuracy_by_kind": visual,
        "visual_accuracy_blank": accuracy(model, questions, "blank", run.data.blank)["all"]["accuracy"],
        "visual_accuracy_wrong": accuracy(model, questions, "wrong")["all"]["accuracy"],
        "visual_accuracy_novel": accuracy(model, run.questions("novel"))["all"]["accuracy"],
        "words_accuracy_after": accuracy(model, words)["all"]["accuracy"],
        "text_accuracy_after": text_only["all"]["accuracy"],
        "text_accuracy_after_by_kind": text_only,
        "caption_loss_after": mean_loss(model, run.captions("test")),
        "steps_to_95": next((step for step, value in curve if value >= 0.95), None),
        "norm_visual": traced.data["visual"]["state_norm"][::2].tolist(),
        "norm_text": traced.data["text"]["state_norm"][::2].tolist(),
        "cosine_visual": traced.data["visual"]["layer_cosine"].tolist(),
        "cosine_text": traced.data["text"]["layer_cosine"].tolist(),
        "trace": traced.to_dict(),
        "interface_end": run.look(model),
        "attention_mass": probe.plain(attention_mass(model, batch)),
        "gain_end": gain_of(model),
        "stage2_rows": rows,
    } | attention_measures(run, model)


def attention_measures(run: Run, model: MiniLLaVA) -> dict:
    """Signal, content and maps: what a question about one place gets from the tokens of that place."""
    grid, side = run.preset.world.grid, int(run.preset.vision.num_patches**0.5)
    cells = run.data.splits["test"].cells
    block = np.ones((side // grid, side // grid), dtype=int)
    place = np.kron(np.arange(grid * grid).reshape(grid, grid), block).ravel()  # (N,): the cell of each visual token
    rng = np.random.default_rng([run.data.seed, 22])
    samples = world.visual_questions(run.data.splits["test"], ("colour_at", "shape_at"), 1, rng)[:100]
    names = scenes.PLACES[grid]
    asked = np.array([next(i for i, n in enumerate(names) if f"at {n} ?" in s.turns[0][0]) for s in samples])
    batch = run.pool("test", samples).take(range(len(samples)))
    relevant = torch.from_numpy(place[None, :] == asked[:, None])  # (B, N)
    told = torch.from_numpy(cells[: len(samples)][:, place])  # (B, N): what each visual token should know
    shown = run.pool("test", samples[:4]).take(range(4))
    assert shown.features is not None
    answers = []
    for sample, features in zip(samples, shown.features.to(run.device), strict=False):
        ids, _ = render(run.data.tokenizer, [(sample.turns[0][0], None)], len(features))
        answers += model.generate(torch.tensor([ids], device=run.device), END, features=features[None])
    return {
        "signal": probe.plain(signal(model, batch, relevant)),
        "content": probe.plain(content_probe(visual_states(model, batch), told)),
        "maps": attention_map(model, shown)["maps"].tolist(),
        "map_questions": [s.turns[0] for s in samples[:4]],
        "map_answers": [run.data.tokenizer.decode(ids) for ids in answers],
    }


def run_variant(
    preset_json: str, name: str, seed: int, folder: str, rates: dict | None, device: str, show: bool
) -> list[dict]:
    """One variant of one seed: stage 1 once, stage 2 at each rate, each measured. Runs in a worker process."""
    started = time.perf_counter()
    preset = preset_from_json(preset_json)
    run = Run(preset, name, seed, Path(folder) / f"{name}-seed{seed}", device, show)
    stage1_lr = rates["stage1_lr"] if rates else preset.stage1_lrs[0]
    results = []
    for lr in [rates["stage2_lr"]] if rates else preset.stage2_lrs:
        model, first = run.stage1(stage1_lr)  # resumes from its finished state after the first rate
        before = accuracy(model, run.data.text()), accuracy(model, run.data.words("test"))
        rows = run.stage2(model, lr, f"stage2-{stage1_lr:g}-{lr:g}")
        result = {"arm": name, "seed": seed, "stage2_lr": lr} | first | measure(run, model, rows)
        result["text_accuracy_before"] = before[0]["all"]["accuracy"]
        result["words_accuracy_before"] = before[1]["all"]["accuracy"]
        notes = {
            "command": f"minillava reproduce --preset {preset.name}",
            "arm": name,
            "seed": seed,
            "stage1_lr": stage1_lr,
            "stage2_lr": lr,
            "world": asdict(preset.world),
            "visual_accuracy": result["visual_accuracy"],
        }
        save_model(run.folder / f"model-{lr:g}", model, run.data.tokenizer, notes)
        results.append(result | {"rates_chosen": rates is not None})
    for result in results:
        result |= {"seconds": time.perf_counter() - started, "worker_memory_gb": memory_gb()}
    return results


def memory_gb() -> float:
    """GiB that this process held at its peak."""
    unit = 2**30 if sys.platform == "darwin" else 2**20  # ru_maxrss is in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
