"""The one training loop: stopped anywhere it ends in the same bits; its step is what the equations say; it stops when
it must."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minillava
from minillava import scenes, world
from minillava.checkpoint import CheckpointError
from minillava.data import Pool, normalize
from minillava.evaluate import accuracy
from minillava.llava import LLaVAConfig, MiniLLaVA
from minillava.lm import LM, LMConfig
from minillava.objectives import next_token_loss
from minillava.tokenizer import END, IGNORE, Tokenizer, render
from minillava.train import TrainConfig, TrainingError, clip_gradients, fit, learning_rate, parameter_groups
from minillava.vit import ViTConfig

TOKENIZER = Tokenizer.train(scenes.vocabulary())
SIZES = LMConfig(len(TOKENIZER), width=16, depth=1, heads=2, kv_heads=1, hidden=32)
VISION = ViTConfig(width=16, depth=2, heads=2)
CONFIG = TrainConfig(steps=12, batch_size=4, lr=1e-2, save_every=5, log_every=1, seed=3)

SCRIPT = """
import os, sys, torch
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import importlib.util
spec = importlib.util.spec_from_file_location("tests_of_train", sys.argv[2])
tests = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = tests
spec.loader.exec_module(tests)
torch.set_num_threads(1)
tests.run(Path(sys.argv[3]), tests.striking(int(sys.argv[4]), int(sys.argv[5])))
"""


@pytest.fixture(autouse=True)
def one_thread():
    """Sums over threads have no fixed order; bits are promised for the same number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def text_pool(n: int = 24) -> Pool:
    replayed, _ = scenes.split_text_questions()
    samples = world.text_only(replayed, n, 1, np.random.default_rng(0))
    for i, sample in enumerate(samples):  # conversations of one to three turns: very different numbers of answers
        sample.turns += sample.turns * (i % 3)
    return Pool(samples, TOKENIZER, 0)


def striking(number: int, at: int):
    """The next-token loss, and a signal to this very process in the middle of step `at`."""
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        value = next_token_loss(model, batch)
        if calls == at:
            os.kill(os.getpid(), number)
        return value

    return loss


def run(folder: Path | None, loss=next_token_loss, config=CONFIG, seed: int = 0, **more) -> tuple[LM, list[dict]]:
    torch.manual_seed(seed)
    model = LM(SIZES)
    rows = fit(model, loss, text_pool(), config, folder, show=False, **more)
    return model, rows


def in_process(folder: Path, number: int, at: int) -> int:
    root = str(Path(minillava.__file__).parents[1])
    return subprocess.run([sys.executable, "-c", SCRIPT, root, __file__, str(folder), str(int(number)), str(at)],
                          capture_output=True, timeout=300).returncode  # fmt: skip


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def steps(rows: list[dict]) -> list[int]:
    return [row["step"] for row in rows]


def on_disk(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ---- stopped and resumed


def test_a_killed_run_ends_in_the_same_bits(tmp_path):
    """kill -9 in the middle of step 8: steps 6 and 7 were logged but not saved, and are done again."""
    straight, rows = run(None)
    assert in_process(tmp_path, signal.SIGKILL, 8) == -signal.SIGKILL
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-000005"] and len(on_disk(tmp_path)) == 7
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "loss": {"a": 1}')  # the kill tore the line that it was writing
    resumed, more = run(tmp_path)
    assert same_bits(straight, resumed)
    assert steps(more) == steps(on_disk(tmp_path)) == list(range(1, 13)), "no step is lost, none is there twice"
    measured = ("loss", "lr", "grad_norm")
    assert [[row[k] for k in measured] for row in more] == [[row[k] for k in measured] for row in rows]


@pytest.mark.parametrize("at", [1, 5, 9, 12])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_an_interrupted_run_saves_and_ends_in_the_same_bits(tmp_path, number, at):
    handler = signal.getsignal(number)
    straight, _ = run(None)
    with pytest.raises(KeyboardInterrupt, match=f"cats stopped after step {at}"):
        run(tmp_path, striking(number, at), label="cats")
    assert signal.getsignal(number) == handler, "the handlers that were there are there again"
    assert [p.name for p in tmp_path.glob("step-*")] == [f"step-{at:06d}"], "it is the step of the signal that is saved"
    resumed, rows = run(tmp_path)
    assert same_bits(straight, resumed) and steps(rows) == list(range(1, 13))


def test_ctrl_c_of_a_process_leaves_a_state(tmp_path):
    assert in_process(tmp_path, signal.SIGINT, 6) != 0
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-000006"]
    assert same_bits(run(tmp_path)[0], run(None)[0])


def test_a_finished_run_is_not_trained_again(tmp_path):
    first, rows = run(tmp_path)
    stamp = (tmp_path / "step-000012" / "model.safetensors").stat().st_mtime_ns

    def never(model, batch):
        raise AssertionError("trained again")

    again, same_rows = run(tmp_path, never, seed=1)  # another start, which the saved state replaces
    assert same_bits(first, again) and rows == same_rows and not again.training
    assert (tmp_path / "step-000012" / "model.safetensors").stat().st_mtime_ns == stamp


@given(st.sampled_from([f for f in asdict(CONFIG) if f != "precision"]))
def test_another_setting_is_another_run(tmp_path_factory, field):
    folder = tmp_path_factory.getbasetemp() / "settings"
    run(folder)
    old = getattr(CONFIG, field)
    new = (not old) if isinstance(old, bool) else old + 1
    with pytest.raises(CheckpointError, match=rf"step-000012: was trained with {field}={old} \(now {new}\)"):
        run(folder, config=replace(CONFIG, **{field: new}))


def test_a_run_is_also_what_it_is_about(tmp_path):
    run(tmp_path, about={"arm": "gwc", "data": "cats"})
    with pytest.raises(CheckpointError, match=r"data='cats' \(now 'dogs'\); use the same settings, or another output"):
        run(tmp_path, about={"arm": "gwc", "data": "dogs"})
    with pytest.raises(CheckpointError, match=r"arm='gwc' \(now None\)"):
        run(tmp_path)


def llava(arm: str = "gwc") -> MiniLLaVA:
    torch.manual_seed(0)
    return MiniLLaVA(LLaVAConfig(VISION, SIZES, arm))


def picture_pool(model: MiniLLaVA, n: int = 32) -> Pool:
    split = world.build_split(world.WorldConfig(eval_scenes=n), "test", 0)
    samples = world.visual_questions(split, ("colour_at", "count"), 2, np.random.default_rng(0))
    with torch.no_grad():
        features = model.vision(normalize(torch.from_numpy(split.pixels)))
    return Pool(samples, TOKENIZER, VISION.num_patches, features=features)


@pytest.mark.parametrize("arm", ["base", "default", "gwc", "discrete"])
def test_both_stages_resume(tmp_path, arm):
    def both(folder: Path | None, stops: bool) -> MiniLLaVA:
        model = llava(arm)
        pool = picture_pool(model)
        model.calibrate(pool.features)
        for stage in (1, 2):
            model.set_trainable(stage)
            before = {name: p.clone() for name, p in model.named_parameters()}
            place = folder / f"stage{stage}" if folder else None
            if stops:
                with pytest.raises(KeyboardInterrupt):
                    fit(model, striking(signal.SIGINT, 7), pool, CONFIG, place, show=False)
            fit(model, next_token_loss, pool, CONFIG, place, show=False)
            moved = {name.split(".")[0] for name, p in model.named_parameters() if not torch.equal(p, before[name])}
            assert moved == {"projector", "lm", "arm"} - ({"lm"} if stage == 1 else set()) - (
                {"arm"} if arm == "base" else set()
            )
        return model

    assert same_bits(both(None, False), both(tmp_path, True))


# ---- one step


def mean_loss_in_double(model, batch):
    logits = model(model.embed_tokens(batch.input_ids), batch.document_ids)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize(("size", "parts"), [(4, 2), (2, 4), (1, 8)])
def test_accumulation_changes_nothing_but_memory(size, parts):
    """In fp64, so that 1e-9 tells rounding (1e-16, amplified by AdamW's division) from a wrong weight of a part."""
    pool, results = text_pool(), []
    assert len({pool.batch(i, size, 3).supervised for i in range(8)}) > 2, "the parts have different numbers of answers"
    for config in (replace(CONFIG, batch_size=8), replace(CONFIG, batch_size=size, accumulate=parts)):
        torch.manual_seed(0)
        model = LM(SIZES).double()
        rows = fit(model, mean_loss_in_double, pool, config, show=False)
        results.append((model.state_dict(), rows))
    (whole, rows), (split, other_rows) = results
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], rtol=0, atol=1e-9)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in other_rows], rel=1e-9)


class Recorder:
    """A pool that remembers which batches it was asked for."""

    def __init__(self):
        self.pool, self.asked = text_pool(), []

    def batch(self, step, batch_size, seed):
        self.asked.append((step, batch_size, seed))
        return self.pool.batch(step, batch_size, seed)


def test_the_order_of_batches_is_a_function_of_the_step(tmp_path):
    config = replace(CONFIG, steps=6, accumulate=2)
    recorder = Recorder()
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        fit(LM(SIZES), striking(signal.SIGINT, 7), recorder, config, tmp_path, show=False)
    fit(LM(SIZES), next_token_loss, recorder, config, tmp_path, show=False)
    assert recorder.asked == [(i, 4, 3) for i in range(12)]


configs = st.builds(
    TrainConfig, steps=st.integers(2, 400), lr=st.floats(1e-5, 1.0), warmup=st.floats(0, 0.9), seed=st.just(0)
)


@given(configs)
def test_the_rate_warms_up_to_its_peak_and_falls_to_a_tenth(config):
    rates = [learning_rate(step, config) for step in range(config.steps)]
    warm = max(1, round(config.warmup * config.steps))
    assert max(rates) == pytest.approx(config.lr) == rates[min(warm, config.steps) - 1]
    assert rates[0] == pytest.approx(config.lr / warm), "the first step already moves"
    assert np.allclose(np.diff(rates[:warm]), config.lr / warm, rtol=1e-6, atol=1e-12), "linear"
    assert all(a >= b for a, b in zip(rates[warm:], rates[warm + 1 :], strict=False))
    assert min(rates[warm:], default=config.lr) >= 0.1 * config.lr
    if warm < config.steps:
        assert learning_rate(config.steps, config) == pytest.approx(0.1 * config.lr)


def test_the_rate_is_what_the_optimiser_gets():
    """With AdamW a first step is sign(gradient) · rate: the size of the first move is the first rate, per group."""
    model = llava("aligned")
    pool = picture_pool(model)
    model.set_trainable(1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    config = replace(CONFIG, steps=1, weight_decay=0.0, gain_lr=0.25)
    fit(model, next_token_loss, pool, config, show=False)
    moves = {name: (p - before[name]).abs().max().item() for name, p in model.named_parameters()}
    assert moves["projector.fc1.weight"] == pytest.approx(learning_rate(0, config), rel=1e-3)
    assert moves["arm.weight"] == pytest.approx(0.25 * learning_rate(0, config), rel=1e-3)


@pytest.mark.parametrize("arm", ["base", "gwc", "scale", "discrete"])
def test_every_trainable_parameter_is_in_one_group(arm):
    model = llava(arm)
    model.set_trainable(2)
    groups = parameter_groups(model, replace(CONFIG, weight_decay=0.3, gain_lr=0.5))
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    for group in groups:
        assert {p.dim() > 1 for p in group["params"]} == {group["weight_decay"] == 0.3}
    slow = [id(p) for group in groups if group["rate"] == 0.5 for p in group["params"]]
    assert slow == ([id(model.arm.weight), id(model.arm.bias)] if arm == "gwc" else [])


def gradients(arm: str) -> MiniLLaVA:
    model = llava(arm)
    model.set_trainable(2)
    next_token_loss(model, picture_pool(model).take(range(8))).backward()
    return model


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_compensation_does_not_shrink_everybodys_step(max_norm):
    """G3: aligned and gwc have the same gradients but for the projector's, and get the same clipping factor."""
    plain, compensated = gradients("aligned"), gradients("gwc")
    gain = plain.arm.weight.abs().mean().item()
    first = plain.projector.fc1.weight.grad
    torch.testing.assert_close(compensated.projector.fc1.weight.grad * gain, first, rtol=1e-4, atol=1e-4)
    assert gain < 0.5, "else there is nothing to compensate"
    norms = [clip_gradients(model, max_norm) for model in (plain, compensated)]
    assert norms[0]["grad_norm"] == pytest.approx(norms[1]["grad_norm"], rel=1e-4)
    assert norms[1]["grad_norm_upstream"] * gain == pytest.approx(norms[0]["grad_norm_upstream"], rel=1e-4)
    for (name, a), (_, b) in zip(plain.named_parameters(), compensated.named_parameters(), strict=True):
        if a.grad is not None:
            factor = gain if name.startswith("projector.") else 1.0
            atol = 1e-5 * a.grad.abs().max().item()
            torch.testing.assert_close(b.grad * factor, a.grad, rtol=1e-4, atol=atol)


@given(st.floats(1e-3, 1e3))
def test_clipping_scales_all_by_one_factor(max_norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    before = torch.cat([p.grad.flatten() for p in model.parameters()]).clone()
    norms = clip_gradients(model, max_norm)
    after = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert norms["grad_norm"] == pytest.approx(before.norm().item(), rel=1e-6)
    expected = before if before.norm() <= max_norm else before * (max_norm / before.norm())
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=0)


# ---- when it must stop


def breaking(kind: str, at: int):
    """The next-token loss, broken from step `at` on: in the loss itself, or only in a gradient."""
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        value = next_token_loss(model, batch)
        if calls < at:
            return value
        weight = model.layers[0].mlp.up_proj.weight
        if kind == "weight":
            with torch.no_grad():
                weight[0, 0] = math.nan
            return next_token_loss(model, batch)
        return value * math.inf if kind == "loss" else value + (weight.sum() * 0).sqrt()

    return loss


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("loss", "the first non-finite gradient is that of 'embed_tokens.weight'"),
        ("weight", "'layers.0.mlp.up_proj.weight' holds non-finite weights"),
        ("gradient", "the first non-finite gradient is that of 'layers.0.mlp.up_proj.weight'; try a lower"),
    ],
)
def test_it_stops_at_the_first_number_that_is_none(tmp_path, kind, where):
    """Step 10 would be saved, so a step that broke it must not be taken."""
    with pytest.raises(TrainingError, match="dogs, step 10: the loss is ") as caught:
        run(tmp_path, breaking(kind, 10), label="dogs")
    assert where in str(caught.value)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-000005"]
    assert same_bits(run(tmp_path)[0], run(None)[0]), "what was saved before is sound"


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"batch_size": 0}, {"accumulate": 0}, {"save_every": 0}, {"log_every": -1}, {"lr": 0.0},
     {"lr": math.nan}, {"lr": math.inf}, {"precision": "fp16"}],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_train_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        replace(CONFIG, **wrong)


# ---- the rest of the loop


def test_bf16_autocast_trains_fp32_weights():
    model, rows = run(None, config=replace(CONFIG, precision="bf16", steps=40))
    _, exact = run(None, config=replace(CONFIG, steps=40))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert rows[0]["loss"] != exact[0]["loss"], "autocast was on"
    assert rows[0]["loss"] == pytest.approx(exact[0]["loss"], rel=2**-7), "within bf16's rounding"
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_it_takes_the_same_steps():
    """Two models in one process, as the arms of an experiment are."""
    for seed in (0, 1):
        model, rows = run(None, config=replace(CONFIG, compile=True), seed=seed)
        plain, expected = run(None, seed=seed)
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-3)
        assert model.state_dict().keys() == plain.state_dict().keys()


def test_what_is_logged_and_when(tmp_path):
    config = replace(CONFIG, steps=10, log_every=4, eval_every=3)
    seen = []

    def evaluate() -> dict:
        seen.append(1)
        return {"score": len(seen)}

    _, rows = run(tmp_path, config=config, evaluate=evaluate)
    assert steps(rows) == [1, 3, 4, 6, 8, 9, 10] and rows == on_disk(tmp_path)
    assert {row["step"]: row["score"] for row in rows if "score" in row} == {3: 1, 6: 2, 9: 3, 10: 4}
    assert all({"step", "loss", "lr", "grad_norm", "seconds", "tokens_per_second"} <= row.keys() for row in rows)


def test_measuring_on_the_way_changes_nothing():
    assert same_bits(
        run(None)[0],
        run(None, config=replace(CONFIG, eval_every=2), evaluate=lambda: {"noise": torch.rand(3).sum().item()})[0],
    )


def test_the_gain_is_logged_as_the_paper_tables_it():
    model = llava("gwc")
    model.set_trainable(1)
    rows = fit(model, next_token_loss, picture_pool(model), CONFIG, show=False)
    gain = model.arm.weight.detach()
    assert rows[-1]["gain_mean"] == pytest.approx(gain.abs().mean().item())
    assert rows[-1]["gain_norm"] == pytest.approx(gain.norm().item())
    assert rows[-1]["grad_norm_upstream"] > 0


@pytest.mark.slow
def test_overfitting_32_samples_and_stopping():
    """The end token is supervised: a model that knows its answers by heart also knows where they end."""
    sizes = replace(SIZES, width=64, depth=2, heads=4, kv_heads=2, hidden=128)
    torch.manual_seed(0)
    model = MiniLLaVA(LLaVAConfig(replace(VISION, width=32), sizes, "aligned"))
    pool = picture_pool(model)
    model.set_trainable(2)
    fit(model, next_token_loss, pool, replace(CONFIG, steps=320, batch_size=32, lr=2e-3), show=False)
    assert accuracy(model, pool)["all"]["accuracy"] == 1.0
    prompts = [render(TOKENIZER, [(s.turns[0][0], None)], VISION.num_patches)[0] for s in pool.samples]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    answers = model.generate(ids, END, (ids != 0).long(), features=pool.features, max_new_tokens=20)
    assert [TOKENIZER.decode(a) for a in answers] == [s.turns[0][1] for s in pool.samples]
    assert max(map(len, answers)) < 20, "each stopped by itself"
