"""Real input: a folder of pictures and conversations trains through the same code, and what comes out answers."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from minillava import scenes
from minillava.checkpoint import CheckpointError, fingerprint, load_model, save_model
from minillava.evaluate import mean_loss
from minillava.finetune import finetune, folder_pool
from minillava.generate import answer
from minillava.llava import ARMS, LLaVAConfig, MiniLLaVA
from minillava.lm import LMConfig
from minillava.objectives import next_token_loss
from minillava.tokenizer import Tokenizer
from minillava.train import TrainConfig
from minillava.vit import ViTConfig

TOKENIZER = Tokenizer.train(scenes.vocabulary())
SIZES = LMConfig(len(TOKENIZER), width=32, depth=1, heads=2, kv_heads=1, hidden=64)
CONFIG = TrainConfig(steps=20, batch_size=4, lr=1e-2, log_every=5, save_every=20)
COLOURS = {"red": (220, 30, 30), "blue": (30, 60, 220), "green": (20, 160, 60), "yellow": (230, 210, 40)}
QUESTION = "what colour is the sky ?"


def message(role: str, value: str) -> dict:
    return {"from": role, "value": value}


def write_folder(folder: Path, text: bool = True, pictures: bool = True) -> Path:
    """Four one-coloured pictures, PNG and JPEG, of different sizes, one of them in a sub-folder; and one text."""
    folder.mkdir(parents=True)
    records = []
    for i, (name, rgb) in enumerate(COLOURS.items() if pictures else ()):
        file = f"more/{name}.png" if i == 3 else f"{name}.{'png' if i % 2 else 'jpg'}"
        (folder / file).parent.mkdir(exist_ok=True)
        Image.new("RGB", (20 + 30 * i, 40), rgb).save(folder / file)
        turns = [message("human", f"<image>\n{QUESTION}"), message("gpt", name)]
        records.append({"id": name, "image": file, "conversations": turns})
    if text:
        turns = [message("human", "what is one plus one ?"), message("gpt", "two")]
        records.append({"id": "sum", "conversations": turns})
    (folder / "data.json").write_text(json.dumps(records))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("folder") / "pictures")


def write_start(folder: Path) -> Path:
    torch.manual_seed(0)
    model = MiniLLaVA(LLaVAConfig(ViTConfig(width=16, depth=2, heads=2), SIZES, "aligned", visual_words=8))
    save_model(folder, model, TOKENIZER)
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    return write_start(tmp_path_factory.mktemp("models") / "start")


@pytest.fixture(scope="module")
def trained(data, start, tmp_path_factory) -> tuple[Path, dict, dict]:
    out = tmp_path_factory.mktemp("trained")
    first = finetune(data, start, out / "1", replace(CONFIG, steps=20), 1, show=False)
    config = replace(CONFIG, steps=150, lr=1e-2)
    second = finetune(data, out / "1" / "model", out / "2", config, 2, validation=data, show=False)
    return out, first, second


def test_both_stages_learn_from_a_folder(trained):
    _, first, second = trained
    assert first["samples"] == 4, "stage 1 trains on pictures; the text has nothing for it to learn"
    assert second["samples"] == 5
    assert first["loss_last"] < first["loss_first"]
    assert second["loss_last"] < 0.2 * second["loss_first"]
    assert second["validation_after"] < 0.2 * second["validation_before"]


def test_the_stages_train_what_they_say(trained, start):
    out, _, _ = trained
    models = [load_model(f)[0] for f in (start, out / "1" / "model", out / "2" / "model")]
    for part, stages in {"vision": [], "projector": [1, 2], "arm": [1, 2], "lm": [2]}.items():
        states = [fingerprint(*getattr(model, part).state_dict().values()) for model in models]
        assert [stage for stage in (1, 2) if states[stage] != states[stage - 1]] == stages, part


def test_what_comes_out_answers_about_the_pictures(trained, data):
    out, _, _ = trained
    model, tokenizer, notes = load_model(out / "2" / "model")
    files = [data / record["image"] for record in json.loads((data / "data.json").read_text())[:4]]
    assert answer(model, tokenizer, QUESTION, files) == list(COLOURS)
    assert [answer(model, tokenizer, QUESTION, [file])[0] for file in files] == list(COLOURS), "a batch equals its rows"
    assert answer(model, tokenizer, "what is one plus one ?", []) == ["two"]
    assert notes == {"stage": 2, "data": "pictures", "steps": 150, "lr": 1e-2, "seed": 0}


def test_validation_is_measured_on_the_way(data, start, tmp_path):
    config = replace(CONFIG, steps=4, eval_every=2)
    result = finetune(data, start, tmp_path, config, 2, validation=data, show=False)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    measured = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    assert measured.keys() == {2, 4} and measured[4] == pytest.approx(result["validation_after"])
    assert result["validation_before"] > measured[2] > measured[4]


def test_features_of_the_frozen_tower_are_what_pixels_give(data, start):
    """One look before training, or one at each step: the same losses and gradients, to the rounding of fp32."""
    model, tokenizer, _ = load_model(start)
    model.set_trainable(2)
    losses, gradients = [], []
    for frozen in (True, False):
        pool = folder_pool(data, model, tokenizer, frozen)
        assert (pool.features is None) != frozen and (pool.pixels is None) == frozen
        losses.append(mean_loss(model, pool))
        model.zero_grad()
        next_token_loss(model, pool.take(range(5))).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5)


def test_the_tower_can_be_trained_in_stage_2(data, start, tmp_path):
    finetune(data, start, tmp_path, replace(CONFIG, steps=3), 2, train_vision=True, show=False)
    before, after = load_model(start)[0].vision, load_model(tmp_path / "model")[0].vision
    assert not torch.equal(before.patch_embed.proj.weight, after.patch_embed.proj.weight)
    with pytest.raises(ValueError, match="stage 1 trains projector and arm only"):
        finetune(data, start, tmp_path / "x", CONFIG, 1, train_vision=True, show=False)


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_can_be_chosen_in_stage_1(data, start, tmp_path, arm):
    config = replace(CONFIG, steps=2)
    finetune(data, start, tmp_path / "1", config, 1, arm=arm, show=False)
    model, _, _ = load_model(tmp_path / "1" / "model")
    assert model.config.arm == arm
    other = next(a for a in ARMS if a != arm)
    with pytest.raises(ValueError, match=f"has the arm '{arm}', not '{other}'; the arm is chosen in stage 1"):
        finetune(data, tmp_path / "1" / "model", tmp_path / "2", config, 2, arm=other, show=False)


def test_stages_and_arms_start_from_the_same_projector(data, start, tmp_path):
    """The seed alone decides where stage 1 begins: with so small a rate that nothing moves, arms hold the same one."""
    still = replace(CONFIG, steps=1, lr=1e-30, weight_decay=0.0)
    for name, arm, seed in (("a", "base", 0), ("b", "gwc", 0), ("c", "base", 1)):
        finetune(data, start, tmp_path / name, replace(still, seed=seed), 1, arm=arm, show=False)
    projectors = {n: fingerprint(*load_model(tmp_path / n / "model")[0].projector.state_dict().values()) for n in "abc"}
    assert projectors["a"] == projectors["b"] != projectors["c"]


def test_a_run_folder_belongs_to_one_training(data, start, tmp_path):
    """Another stage, arm, data or start in the same folder is refused: it would silently be the old training."""
    config = replace(CONFIG, steps=2)
    finetune(data, start, tmp_path / "run", config, 1, show=False)
    finetune(data, start, tmp_path / "run", config, 1, show=False)  # the same again: nothing is left to do
    other_data = write_folder(tmp_path / "other")
    records = json.loads((other_data / "data.json").read_text())
    (other_data / "data.json").write_text(json.dumps(records[1:]))
    other_start = tmp_path / "start"
    torch.manual_seed(1)
    save_model(other_start, MiniLLaVA(load_model(start)[0].config), TOKENIZER)
    for what, arguments in {
        "stage=1": (data, start, tmp_path / "run", config, 2),
        "arm='aligned'": (data, start, tmp_path / "run", config, 1, "gwc"),
        "data=": (other_data, start, tmp_path / "run", config, 1),
        "init=": (data, other_start, tmp_path / "run", config, 1),
    }.items():
        with pytest.raises(CheckpointError, match=f"was trained with .*{what}.*another output folder"):
            finetune(*arguments, show=False)


def test_folders_of_text_alone(start, tmp_path):
    texts = write_folder(tmp_path / "texts", pictures=False)
    result = finetune(texts, start, tmp_path / "2", replace(CONFIG, steps=20), 2, show=False)
    assert result["loss_last"] < result["loss_first"]
    with pytest.raises(ValueError, match="texts: no sample has a picture, and stage 1 trains on pictures only"):
        finetune(texts, start, tmp_path / "1", CONFIG, 1, show=False)


def test_a_batch_that_happens_to_hold_no_picture_trains(start, data, tmp_path):
    """One sample a batch: in stage 2 some steps see text alone, in stage 1 none may (it would have no gradient)."""
    config = replace(CONFIG, steps=10, batch_size=1)
    for stage in (1, 2):
        assert finetune(data, start, tmp_path / str(stage), config, stage, show=False)["samples"] == 3 + stage


def test_empty_folders_say_so(start, data, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "data.json").write_text("[]")
    with pytest.raises(ValueError, match="the pool is empty"):
        finetune(empty, start, tmp_path / "2", CONFIG, 2, show=False)
    with pytest.raises(ValueError, match="the pool is empty"):
        finetune(data, start, tmp_path / "3", CONFIG, 2, validation=empty, show=False)


def test_fingerprints_tell_bits_apart():
    a = torch.from_numpy(np.arange(6.0))
    b = a.clone()
    b[3] = np.nextafter(b[3].item(), 9)
    assert fingerprint(a) == fingerprint(a.clone()) != fingerprint(b)
    assert fingerprint(a, b) != fingerprint(b, a)
