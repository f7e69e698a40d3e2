"""Checkpoints: what is saved comes back bit for bit, whatever is damaged is refused by name, and no moment of a save
leaves half of one."""

import json
import os
import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from minillava import scenes
from minillava.checkpoint import CheckpointError, load_model, load_state, save_model, save_state, write_folder
from minillava.llava import ARMS, LLaVAConfig, MiniLLaVA
from minillava.lm import LMConfig
from minillava.tokenizer import IMAGE, Tokenizer
from minillava.vit import ViTConfig

TOKENIZER = Tokenizer.train(scenes.vocabulary())
CONFIG = LLaVAConfig(
    ViTConfig(width=16, depth=2, heads=2),
    LMConfig(len(TOKENIZER), width=16, depth=1, heads=2, kv_heads=1, hidden=32),
    "gwc",
    visual_words=8,
)

# What the seeded model below answered when this test was written: logits of three pieces at the last token.
GOLDEN = [-0.1530199646949768, -0.015850165858864784, -0.1118050217628479]


def build(arm: str = "gwc", tied: bool = True) -> MiniLLaVA:
    torch.manual_seed(0)
    model = MiniLLaVA(replace(CONFIG, arm=arm, lm=replace(CONFIG.lm, tie_embeddings=tied)))
    model.calibrate(torch.randn(2, CONFIG.vision.num_patches, 16))
    return model.eval()


@torch.no_grad()
def logits(model: MiniLLaVA) -> torch.Tensor:
    pixels = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
    ids = torch.tensor([[4, *[IMAGE] * CONFIG.vision.num_patches, 9, 10, 5]])
    return model(ids, pixel_values=pixels)[0, -1]


@pytest.fixture
def folder(tmp_path) -> Path:
    save_model(tmp_path / "model", build(), TOKENIZER, {"seed": 0})
    return tmp_path / "model"


# ---- model folders


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arm", ARMS)
def test_a_model_comes_back_bit_for_bit(tmp_path, arm, tied):
    model = build(arm, tied)
    save_model(tmp_path / "a", model, TOKENIZER, {"why": "test"})
    loaded, tokenizer, notes = load_model(tmp_path / "a")
    assert loaded.config == model.config and notes == {"why": "test"} and not loaded.training
    assert tokenizer.model == TOKENIZER.model
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
    assert torch.equal(logits(loaded), logits(model))
    assert (loaded.lm.lm_head.weight is loaded.lm.embed_tokens.weight) == tied
    stored = safetensors.torch.load_file(tmp_path / "a" / "model.safetensors")
    assert ("lm.lm_head.weight" in stored) != tied, "a tied table is stored once"
    save_model(tmp_path / "b", loaded, tokenizer, notes)
    for file in ("model.safetensors", "config.json", "tokenizer.model"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_half_precision_halves_the_file_and_rounds_once(tmp_path, folder):
    model = build()
    save_model(tmp_path / "half", model, TOKENIZER, half=True)
    loaded, _, _ = load_model(tmp_path / "half")
    for name, value in model.state_dict().items():
        assert loaded.state_dict()[name].dtype == torch.float32
        assert torch.equal(loaded.state_dict()[name], value.half().float())
    sizes = [(f / "model.safetensors").stat().st_size for f in (tmp_path / "half", folder)]
    assert sizes[0] < 0.6 * sizes[1]


def test_golden_logits(folder):
    """The same seed gives the same model in this version as in the one that wrote the numbers: neither sizes, nor
    initialisation, nor the forward pass has changed. 1e-4 leaves room for another machine's order of summation."""
    model, _, _ = load_model(folder)
    assert logits(model)[[6, 100, 200]].tolist() == pytest.approx(GOLDEN, abs=1e-4)


def rewrite_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def rewrite_weights(folder: Path, change) -> None:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    change(weights)
    safetensors.torch.save_file(weights, folder / "model.safetensors")


def cut(file: Path, share: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])


def nested(folder: Path, part: str, **changes) -> None:
    model = json.loads((folder / "config.json").read_text())["model"]
    rewrite_config(folder, model=model | {part: model[part] | changes})


DAMAGE = {
    "no folder": lambda f: shutil.rmtree(f),
    "a file in its place": lambda f: (shutil.rmtree(f), f.write_text("hello")),
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "no config": lambda f: (f / "config.json").unlink(),
    "no tokenizer": lambda f: (f / "tokenizer.model").unlink(),
    "weights cut in half": lambda f: cut(f / "model.safetensors", 0.5),
    "weights cut to a few bytes": lambda f: cut(f / "model.safetensors", 0.0001),
    "empty weights": lambda f: cut(f / "model.safetensors", 0),
    "tokenizer cut": lambda f: cut(f / "tokenizer.model", 0.5),
    "config cut": lambda f: cut(f / "config.json", 0.5),
    "config is a list": lambda f: (f / "config.json").write_text("[1, 2]"),
    "config is not text": lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"),
    "config is deep": lambda f: (f / "config.json").write_text("[" * 100_000),
    "a tensor is missing": lambda f: rewrite_weights(f, lambda w: w.pop("projector.fc1.weight")),
    "a tensor too many": lambda f: rewrite_weights(f, lambda w: w.update(more=torch.ones(2))),
    "a tensor of another shape": lambda f: rewrite_weights(f, lambda w: w.update({"arm.bias": torch.ones(7)})),
    "the embedding is missing": lambda f: rewrite_weights(f, lambda w: w.pop("lm.embed_tokens.weight")),
    "another format": lambda f: rewrite_config(f, format=99),
    "no format": lambda f: (f / "config.json").write_text("{}"),
    "no model": lambda f: (f / "config.json").write_text('{"format": 1}'),
    "the model is a number": lambda f: rewrite_config(f, model=3),
    "an unknown setting": lambda f: nested(f, "lm", colour="red"),
    "a size of the wrong type": lambda f: nested(f, "vision", width="wide"),
    "no heads": lambda f: nested(f, "lm", heads=0),
    "another depth": lambda f: nested(f, "vision", depth=3),
    "an unknown arm": lambda f: rewrite_config(
        f, model=json.loads((f / "config.json").read_text())["model"] | {"arm": "leg"}
    ),
    "another image token": lambda f: rewrite_config(
        f, model=json.loads((f / "config.json").read_text())["model"] | {"image_token_id": 9}
    ),
    "a smaller tokenizer": lambda f: (f / "tokenizer.model").write_bytes(Tokenizer.train(["red", "blue"]).model),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_one_error_that_names_it(folder, damage):
    DAMAGE[damage](folder)
    with pytest.raises(CheckpointError, match=str(folder)) as caught:
        load_model(folder)
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


# ---- no moment leaves half of one


class Killed(BaseException):
    """Like a kill, it is no Exception that anybody would handle."""


def dying_at(line: int, die):
    """A trace function that calls `die` at the n-th line of this package's checkpoint code."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.endswith("checkpoint.py") or "minillava" not in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
            if count == line:
                die()
        return trace

    return trace


def interrupted(function, line: int, die) -> bool:
    """Run `function` until the n-th line; whether it ended before."""
    before = sys.gettrace()
    sys.settrace(dying_at(line, die))
    try:
        function()
    except Killed:
        return False
    finally:
        sys.settrace(before)
    return True


def raise_killed():
    raise Killed


def write(folder: Path, what: str) -> None:
    def fill(partial: Path) -> None:
        (partial / "a.txt").write_text(what)
        (partial / "b.txt").write_text(what)

    write_folder(folder, fill)


def read(folder: Path) -> set[str]:
    from minillava.checkpoint import settle

    settle(folder)
    return {(folder / name).read_text() for name in ("a.txt", "b.txt")}


@pytest.mark.parametrize("how", ["exception", "kill"])
def test_whatever_line_a_save_dies_on_the_old_or_the_new_folder_is_there(tmp_path, how):
    if how == "kill" and not hasattr(os, "fork"):
        pytest.skip("a process can't be forked here")
    seen, line, ended = set(), 1, False
    while not ended:
        folder = tmp_path / str(line) / "model"
        write(folder, "old")
        if how == "exception":
            ended = interrupted(lambda f=folder: write(f, "new"), line, raise_killed)
        else:
            child = os.fork()
            if child == 0:  # no clean-up of any kind: the process is gone at that line
                interrupted(lambda f=folder: write(f, "new"), line, lambda: os._exit(9))
                os._exit(0)
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        left = read(folder)
        assert left in ({"old"}, {"new"}), f"line {line} leaves {left}"
        seen |= left
        write(folder, "newer")  # and the next save finds nothing in its way
        assert read(folder) == {"newer"}
        if how == "exception":
            assert sorted(p.name for p in folder.parent.iterdir()) == ["model"], "nothing lies about"
        line += 1
    assert seen == {"old", "new"} and line > 10


def test_a_model_folder_whose_save_was_killed_still_loads(tmp_path, folder):
    """Between the two renames: the old one was moved aside, the new one is not there yet."""
    folder.rename(folder.with_name(".model.old"))
    model, _, _ = load_model(folder)
    assert torch.equal(logits(model), logits(build()))


# ---- training states


def state(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_a_state_brings_back_weights_moments_and_chance(tmp_path):
    model, optimizer = state(0)
    save_state(tmp_path, 3, {"lr": 1}, model, optimizer)
    drawn = torch.rand(4)
    other, other_optimizer = state(1)
    assert load_state(tmp_path, {"lr": 1}, other, other_optimizer) == 3
    assert torch.equal(torch.rand(4), drawn)
    for m, o in ((model, optimizer), (other, other_optimizer)):
        torch.manual_seed(7)
        m(torch.randn(5, 3)).square().sum().backward()
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_last_state_has_weights_and_no_moments(tmp_path):
    model, optimizer = state(0)
    save_state(tmp_path / "going on", 3, {}, model, optimizer)
    save_state(tmp_path / "finished", 3, {}, model, None)
    other, other_optimizer = state(1)
    assert load_state(tmp_path / "finished", {}, other, other_optimizer) == 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    size = {
        name: (tmp_path / name / "step-000003" / "optimizer.pt").stat().st_size for name in ("going on", "finished")
    }
    moments = 2 * sum(p.numel() * 4 for p in model.parameters())
    assert size["going on"] - size["finished"] >= moments


def test_only_the_newest_state_stays_and_a_million_is_newer_than_what_came_before(tmp_path):
    model, optimizer = state(0)
    for step in (5, 999_999, 1_000_000):
        save_state(tmp_path, step, {}, model, optimizer)
        assert [p.name for p in tmp_path.glob("step-*")] == [f"step-{step:06d}"]
        assert load_state(tmp_path, {}, model, optimizer) == step


def test_a_run_without_a_state_starts_at_nought(tmp_path):
    model, optimizer = state(0)
    (tmp_path / ".step-000004.partial-17").mkdir()  # what a kill leaves of a save
    assert load_state(tmp_path, {}, model, optimizer) == load_state(tmp_path / "none", {}, model, optimizer) == 0


class Malice:
    """What a stranger's pickle may do: run anything."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return (Path.write_text, (self.file, "you have been had"))


STATE_DAMAGE = {
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "no optimiser": lambda f: (f / "optimizer.pt").unlink(),
    "no state": lambda f: (f / "state.json").unlink(),
    "weights cut": lambda f: cut(f / "model.safetensors", 0.5),
    "optimiser cut": lambda f: cut(f / "optimizer.pt", 0.5),
    "optimiser empty": lambda f: cut(f / "optimizer.pt", 0),
    "state cut": lambda f: cut(f / "state.json", 0.5),
    "state of no format": lambda f: (f / "state.json").write_text('{"step": 3, "config": {}}'),
    "state without config": lambda f: (f / "state.json").write_text('{"format": 1, "step": 3}'),
    "state without step": lambda f: (f / "state.json").write_text('{"format": 1, "config": {}}'),
    "another model": lambda f: safetensors.torch.save_file({"x": torch.ones(1)}, f / "model.safetensors"),
    "another optimiser": lambda f: torch.save(
        {"optimizer": torch.optim.AdamW([torch.ones(1)]).state_dict(), "rng": torch.get_rng_state()}, f / "optimizer.pt"
    ),
    "no random state": lambda f: torch.save({"optimizer": state(0)[1].state_dict()}, f / "optimizer.pt"),
}


@pytest.mark.parametrize("damage", STATE_DAMAGE)
def test_a_damaged_state_is_one_error_that_names_it(tmp_path, damage):
    save_state(tmp_path, 3, {}, *state(0))
    STATE_DAMAGE[damage](tmp_path / "step-000003")
    with pytest.raises(CheckpointError, match=str(tmp_path / "step-000003")) as caught:
        load_state(tmp_path, {}, *state(1))
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_strangers_pickle_is_not_run(tmp_path, writer):
    save_state(tmp_path, 3, {}, *state(0))
    evil, victim = {"optimizer": Malice(tmp_path / "victim"), "rng": 0}, tmp_path / "step-000003" / "optimizer.pt"
    if writer == "torch":
        torch.save(evil, victim)
    else:
        victim.write_bytes(pickle.dumps(evil))
    with pytest.raises(CheckpointError, match=r"step-000003: cannot resume"):
        load_state(tmp_path, {}, *state(1))
    assert not (tmp_path / "victim").exists()
    function, arguments = evil["optimizer"].__reduce__()  # what an ordinary unpickler would call
    function(*arguments)
    assert (tmp_path / "victim").exists(), "the trap works: what the pickle asks for was not done, and could have been"
