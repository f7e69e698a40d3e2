"""The command line: every verb says what it does, and whatever is wrong is one line on stderr and exit code 1."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

import minillava
from minillava import cli, scenes
from minillava.checkpoint import save_model
from minillava.data import Pool
from minillava.experiment import cache_folder
from minillava.llava import LLaVAConfig, MiniLLaVA
from minillava.lm import LM, LMConfig
from minillava.memory import estimate, saved_bytes
from minillava.objectives import CellPool, CellReader, cell_loss, next_token_loss
from minillava.presets import PRESETS, tiny
from minillava.tokenizer import Tokenizer, world_tokenizer
from minillava.vit import ViT, ViTConfig
from minillava.world import build_split, instruction_samples, language_samples

TOKENIZER = Tokenizer.train(scenes.vocabulary())


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINILLAVA_CACHE", str(tmp_path_factory.mktemp("cache")))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model folder, a data folder, and damaged things."""
    folder = tmp_path_factory.mktemp("place")
    torch.manual_seed(0)
    sizes = LMConfig(len(TOKENIZER), width=16, depth=2, heads=2, kv_heads=1, hidden=32)
    model = MiniLLaVA(LLaVAConfig(ViTConfig(width=16, depth=2, heads=2), sizes, "gwc"))
    save_model(folder / "model", model, TOKENIZER)
    data = folder / "data"
    data.mkdir()
    records = []
    for name, rgb in (("red", (220, 30, 30)), ("blue", (30, 30, 220)), ("green", (30, 190, 30))):
        Image.new("RGB", (40, 40), rgb).save(data / f"{name}.png")
        turns = [{"from": "human", "value": "<image>\nwhat colour ?"}, {"from": "gpt", "value": name}]
        records.append({"id": name, "image": f"{name}.png", "conversations": turns})
    (data / "data.json").write_text(json.dumps(records))
    bad = folder / "bad"
    bad.mkdir()
    (bad / "data.json").write_text(json.dumps([records[0] | {"image": "gone.png"}, records[1] | {"image": None}]))
    (folder / "corrupt.png").write_bytes((data / "red.png").read_bytes()[:60])
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def command(place, monkeypatch, capsys):
    """Run a command in the place: (exit code, stdout, stderr)."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "argv", ["minillava", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


# ---- help, and what is wrong


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_explains_itself(command, verb):
    code, out, _ = command(verb, "--help")
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", out).split())
    assert code == 0 and f"minillava {verb}" in shown
    first = " ".join((cli.VERBS[verb].__doc__ or "").split("\n")[0].split())
    assert first in shown
    assert verb in command("--help")[1]


GENERATE = ("generate", "--model", "model")
TRAIN = ("train", "--data", "data", "--out", "run", "--init", "model")
WRONG = {
    "model folder missing": (("generate", "--model", "nowhere"), "nowhere.*not found"),
    "model folder empty": (("generate", "--model", "empty"), "empty/config.json: not found"),
    "model is a file": (("generate", "--model", "corrupt.png"), "corrupt.png.*not found"),
    "image missing": ((*GENERATE, "--image", "nowhere.png"), "nowhere.png: no such image"),
    "image is a folder": ((*GENERATE, "--image", "data"), "data: no such image"),
    "image corrupt": ((*GENERATE, "--image", "corrupt.png"), "corrupt.png: corrupt"),
    "image of another kind": ((*GENERATE, "--image", "data/data.json"), "neither PNG nor JPEG"),
    "top-p too large": ((*GENERATE, "--top-p", "1.5", "--temperature", "1"), r"top_p in \(0, 1\], got .* 1.5"),
    "top-p nought": ((*GENERATE, "--top-p", "0"), "top_p in"),
    "temperature negative": ((*GENERATE, "--temperature", "-1"), "temperature must be"),
    "temperature no number": ((*GENERATE, "--temperature", "nan"), "temperature must be"),
    "temperature endless": ((*GENERATE, "--temperature", "inf"), "temperature must be"),
    "no token to answer with": ((*GENERATE, "--max-new-tokens", "0"), "max_new_tokens must be at least 1, got 0"),
    "less than no token": ((*GENERATE, "--max-new-tokens", "-5"), "max_new_tokens must be"),
    "image mark without image": ((*GENERATE, "--prompt", "<image> what ?"), "1 <image> marks, but"),
    "two image marks": (
        (*GENERATE, "--prompt", "<image> <image>", "--image", "data/red.png"),
        "2 <image> marks, but an answer sees one picture",
    ),
    "no seeds": (("reproduce", "--seeds", "0"), "--seeds 0: at least 1"),
    "no jobs": (("reproduce", "--preset", "tiny", "--jobs", "0"), "jobs must be at least 1"),
    "unknown arm": (("reproduce", "--arms", "leg"), "--arms leg: unknown; choose from base, default,"),
    "data folder missing": (("train", "--data", "nowhere", "--out", "run", "--init", "model"), "nowhere: no .json"),
    "data folder empty": (("train", "--data", "empty", "--out", "run", "--init", "model"), "empty: no .json"),
    "data folder bad": (("train", "--data", "bad", "--out", "run", "--init", "model"), "check-data bad"),
    "init missing": (("train", "--data", "data", "--out", "run", "--init", "nowhere"), "nowhere.*not found"),
    "arm of stage 2": ((*TRAIN, "--stage", "2", "--arm", "base"), "has the arm 'gwc', not 'base'"),
    "tower of stage 1": ((*TRAIN, "--train-vision"), "stage 1 trains projector and arm only"),
    "check without model": (("check-data", "data", "--model", "nowhere"), "nowhere.*not found"),
    "no scene to probe": (("probe", "--model", "model", "--images", "0"), "--images 0: at least 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line(command, name):
    words, expected = WRONG[name]
    code, out, err = command(*words)
    assert code == 1 and out == ""
    assert re.fullmatch(rf"minillava: [^\n]*{expected}[^\n]*\n", err), err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--steps", "0"), "steps"),
        (("--batch-size", "0"), "batch_size"),
        (("--save-every", "0"), "save_every"),
        (("--lr", "-1"), "lr"),
        (("--precision", "fp16"), "precision|fp32"),
    ],
)
def test_settings_that_cannot_train_are_told(command, words, expected):
    code, _, err = command(*TRAIN, *words)
    assert code in (1, 2) and re.search(expected, err) and "Traceback" not in err


def test_an_unknown_verb_or_option_is_told(command):
    for words in (("teach",), ("generate", "--colour", "red"), ("reproduce", "--preset", "huge")):
        code, _, err = command(*words)
        assert code == 2 and "Traceback" not in err


# ---- doing it


def test_train_then_generate_and_a_batch_equals_its_rows(command, place):
    options = ("--steps", "90", "--batch-size", "3", "--lr", "1e-2", "--device", "cpu")
    code, out, err = command("train", "--data", "data", "--out", "run1", "--init", "model", *options)
    assert code == 0, err
    assert "3 samples, loss" in out and (place / "run1" / "model").is_dir()
    stage2 = ("train", "--stage", "2", "--data", "data", "--out", "run2", "--init", "run1/model")
    code, out, err = command(*stage2, "--validation", "data", *options)
    assert code == 0, err
    before, after = map(float, re.search(r"validation loss ([\d.]+) -> ([\d.]+)", out).groups())
    assert after < before
    files = [f"data/{name}.png" for name in ("red", "blue", "green")]
    ask = ("generate", "--model", "run2/model", "--prompt", "what colour ?")
    _, together, _ = command(*ask, "--image", *files)
    alone = [command(*ask, "--image", file)[1].strip() for file in files]
    assert together.splitlines() == [f"{file}: {said}" for file, said in zip(files, alone, strict=True)]
    assert alone == ["red", "blue", "green"], "it learnt them by heart"


def test_sampling_has_a_seed(command):
    def say(seed: int) -> str:
        return command(*GENERATE, "--temperature", "2", "--top-p", "0.9", "--seed", str(seed))[1]

    assert say(1) == say(1) and len({say(seed) for seed in range(4)}) > 1


def test_check_data_says_by_its_exit_code(command):
    code, out, _ = command("check-data", "data", "--model", "model")
    assert code == 0 and out.splitlines()[-1].endswith("0 problem(s)")
    code, out, _ = command("check-data", "bad", "--model", "model")
    assert code == 1 and "gone.png" in out and "2 problem(s)" in out and len(out.splitlines()) == 3
    code, out, _ = command("check-data", "nowhere", "--model", "model", "--quick")
    assert code == 1 and "nowhere" in out


def test_probe_writes_what_it_measures(command, place):
    code, out, err = command("probe", "--model", "model", "--images", "4", "--out", "probed", "--attention")
    assert code == 0, err
    assert "projector" in out and "attention of text on the image" in out
    found = json.loads((place / "probed" / "probe.json").read_text())
    assert found["arm"] == "gwc" and found["attention"].keys() == {"mass", "uniform", "queries"}
    assert {p.name for p in (place / "probed").iterdir()} == {"probe.json", "steps.svg", "predictions.svg"}


@pytest.mark.slow
def test_reproduce_ends_with_a_table_and_a_report(command, place):
    words = ("reproduce", "--preset", "tiny", "--arms", "gwc", "gwc", "--jobs", "1", "--out", "tiny", "--device", "cpu")
    code, out, err = command(*words)
    assert code == 0, err
    assert (place / "tiny" / "report.html").is_file() and (place / "tiny" / "results.json").is_file()
    assert out.count("gwc") == 2, "one row for each rate, though the arm was named twice"


def test_ctrl_c_saves_and_ends_with_130(place):
    words = [*TRAIN[:3], "--out", "stopped", "--init", "model", "--steps", "1000000", "--batch-size", "1"]
    code = f"import sys; sys.path.insert(0, {str(Path(minillava.__file__).parents[1])!r}); "
    code += "from minillava.cli import main; main()"
    process = subprocess.Popen([sys.executable, "-c", code, *words], cwd=place, stderr=subprocess.PIPE, text=True,
                               stdout=subprocess.DEVNULL)  # fmt: skip
    metrics, patience = place / "stopped" / "metrics.jsonl", time.monotonic() + 500
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < patience:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=500)
    assert process.returncode == 130
    last = err.strip().splitlines()[-1]
    step = re.fullmatch(r"minillava: stage 1 stopped after step (\d+); the same command resumes", last).group(1)
    assert "Traceback" not in err
    assert [p.name for p in (place / "stopped").glob("step-*")] == [f"step-{int(step):06d}"]


# ---- memory


@pytest.mark.parametrize("name", PRESETS)
def test_memory_is_estimated_for_every_training(command, name):
    code, out, err = command("memory", "--preset", name)
    assert code == 0, err
    for training in ("vision", "language", "stage 1", "stage 2"):
        assert re.search(rf"{training}\s", out)


def test_hours_are_timed_here(command):
    code, out, err = command("memory", "--preset", "tiny", "--time", "--device", "cpu")
    assert code == 0, err
    hours = [float(value) for value in re.findall(r"(?:vision|language|stage \d) +\d+ +6 +\S+ +\S+ +(\S+)", out)]
    assert len(hours) == 4 and min(hours) > 0
    total = float(re.search(r"(\S+) hours of training", out)[1])
    assert total == pytest.approx(sum(hours), rel=0.02)


def test_the_estimate_is_what_autograd_keeps():
    """Counted without storage, against what a real training step of `tiny` keeps on this CPU: within a tenth."""
    preset = tiny()
    tokenizer, N = world_tokenizer(cache_folder()), preset.vision.num_patches
    rows = {row["training"]: row["activations"] * 2**30 for row in estimate(preset)}
    split = build_split(preset.world, "train", 0)
    torch.manual_seed(0)
    kept = {}

    reader = CellReader(ViT(preset.vision), preset.world.grid)
    cells = CellPool(split.pixels, split.cells).batch(0, preset.vision_training.batch_size, 0)
    kept["vision"] = saved_bytes(reader, lambda: cell_loss(reader, cells), False)

    def longest(pool: Pool, size: int):
        return pool.take(pool.lengths.argsort(descending=True)[:size].numpy())

    lm = LM(LMConfig(**vars(preset.lm) | {"vocab_size": len(tokenizer)}))
    words = longest(Pool(language_samples(preset.world, 60, 0), tokenizer, N), preset.language_training.batch_size)
    kept["language"] = saved_bytes(lm, lambda: next_token_loss(lm, words), False)

    model = MiniLLaVA(LLaVAConfig(preset.vision, lm.config, "gwc"))
    features = torch.randn(len(split.cells), N, preset.vision.width)
    questions = longest(
        Pool(instruction_samples(preset.world, split, 0), tokenizer, N, features=features), preset.stage2.batch_size
    )
    for stage in (1, 2):
        model.set_trainable(stage)
        kept[f"stage {stage}"] = saved_bytes(model, lambda: next_token_loss(model, questions), False)
    assert {name: rows[name] / kept[name] for name in rows} == pytest.approx(dict.fromkeys(rows, 1.0), rel=0.1)
