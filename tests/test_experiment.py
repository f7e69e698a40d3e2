"""The experiment as a whole, at a size that learns nothing: what is in results.json, that arms differ in their arm
alone, that a second call trains nothing, and that learning rates are chosen honestly."""

import json
import math
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minillava
from minillava import experiment
from minillava.checkpoint import CheckpointError
from minillava.duration import trainings
from minillava.experiment import Run, content_key, load_world, preset_from_json, preset_to_json
from minillava.presets import PRESETS, VARIANTS, Preset, paper_slice, tiny
from minillava.reproduce import WIDENINGS, reproduce, search
from minillava.world import WorldConfig

SHORT = replace(tiny().stage1, steps=4, batch_size=4, eval_every=2, log_every=2, save_every=2)
TINY = replace(
    tiny(),
    world=WorldConfig(train_scenes=24, eval_scenes=8),
    vision_training=SHORT,
    language_training=SHORT,
    stage1=SHORT,
    stage2=SHORT,
    language_samples=24,
    variants=("base", "gwc"),
)
MEASURED = ("seconds", "resumed", "peak_memory_gb", "worker_memory_gb", "tokens_per_second")  # differ between two runs


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINILLAVA_CACHE", str(tmp_path_factory.mktemp("cache")))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def results(out) -> dict:
    return reproduce(TINY, out, jobs=1)


def without_times(value):
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in MEASURED}
    return [without_times(v) for v in value] if isinstance(value, list | tuple) else value


def weights(folder: Path) -> dict[str, tuple]:
    """Every training state: what a second training would write again."""
    states = folder.rglob("step-*/model.safetensors")
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in states}


def test_the_file_is_what_is_returned_in_strict_json(results, out):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    written = json.loads((out / "results.json").read_text(), parse_constant=refuse)
    assert written == json.loads(json.dumps(results))


def test_what_was_promised_is_there(results):
    depth = TINY.lm.depth
    for key in ("vit_cell_accuracy", "lm_text_accuracy", "seconds", "peak_memory_gb"):
        assert isinstance(results[key], float)
    assert [(run["arm"], run["seed"], run["stage2_lr"]) for run in results["runs"]] == [
        (arm, 0, lr) for arm in ("base", "gwc") for lr in TINY.stage2_lrs
    ]
    for run in results["runs"]:
        for key in ("visual_accuracy", "visual_accuracy_blank", "text_accuracy_before", "text_accuracy_after"):
            assert 0 <= run[key] <= 1
        assert 0 < run["stage1_caption_loss"] < 2 * math.log(TINY.lm.vocab_size)
        assert run["steps_to_95"] is None or run["steps_to_95"] in (2, 4)
        assert len(run["norm_visual"]) == len(run["norm_text"]) == depth + 1
        assert len(run["cosine_visual"]) == len(run["cosine_text"]) == depth
        assert [row["step"] for row in run["stage2_rows"] if "visual_accuracy" in row] == [2, 4]
        assert run["rates_chosen"] is False
    assert 0 < results["peak_memory_gb"] < 64 and results["seconds"] > sum(r["seconds"] for r in results["towers"])


def test_trainings_are_counted(results, out):
    times = trainings(TINY)
    assert times["vision"] + times["language"] == len(results["towers"])
    assert len(list(out.rglob("stage1-*"))) == times["stage 1"]  # with the stage 1 of base that `discrete` looks at
    assert len(list(out.rglob("stage2-*"))) == times["stage 2"]


def test_aligned_tokens_start_at_the_norm_of_text(results):
    """The one number that a model that learnt nothing can show: N1 at the interface."""
    start = {run["arm"]: run["interface_start"] for run in results["runs"]}
    ratio = {arm: look["visual"]["mean"] / look["vocabulary"]["mean"] for arm, look in start.items()}
    assert ratio["gwc"] == pytest.approx(1, rel=1e-2) and abs(ratio["base"] - 1) > 0.05


def test_a_second_call_trains_nothing_and_says_the_same(results, out):
    before = weights(out) | weights(experiment.cache_folder())
    assert len(before) == 2 * (1 + len(TINY.stage2_lrs)) + 2, "each stage, and the two towers"
    again = reproduce(TINY, out, jobs=1)
    assert weights(out) | weights(experiment.cache_folder()) == before
    assert without_times(again) == without_times(results)


@pytest.mark.slow
def test_workers_say_the_same_as_one_process(results, tmp_path):
    """Every stage is trained again, in another process; the towers come from the cache. One thread here and one there:
    the same bits."""
    one = replace(TINY, variants=("gwc",), stage2_lrs=TINY.stage2_lrs[:1])
    (run,) = reproduce(one, tmp_path, jobs=2)["runs"]
    (same,) = [r for r in results["runs"] if r["arm"] == "gwc" and r["stage2_lr"] == one.stage2_lrs[0]]
    for key in ("stage1_caption_loss", "norm_visual", "cosine_text"):
        assert run[key] == same[key]


def test_another_experiment_does_not_go_on_in_the_same_folder(results, out):
    other = replace(TINY, world=replace(TINY.world, kinds=("count",)))
    with pytest.raises(CheckpointError, match=r"was trained with experiment=.* or another output folder"):
        reproduce(other, out, jobs=1)


def test_arms_of_a_seed_share_projector_and_data_and_seeds_do_not(tmp_path):
    def start(name: str, seed: int):
        load_world.cache_clear()  # as in a fresh worker: towers come from the disk, or from this process
        run = Run(TINY, name, seed, tmp_path)
        model = run.build()
        stage1, stage2 = (run.training_pools[stage].batch(0, 8, seed) for stage in (1, 2))
        return model, [*stage1.sample_ids, *stage2.sample_ids], stage2.input_ids

    model, order, ids = start("base", 0)
    for name in ("gwc", "discrete", "aligned-frozen"):
        other, other_order, other_ids = start(name, 0)
        again = Run(TINY, name, 0, tmp_path).build()  # the second one of its process
        assert torch.equal(again.projector.fc1.weight, other.projector.fc1.weight)
        assert order == other_order and torch.equal(ids, other_ids)
        for part in ("projector", "lm", "vision"):
            ours, theirs = (getattr(m, part).state_dict() for m in (model, other))
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    other, other_order, _ = start("base", 1)
    assert order != other_order
    assert not torch.equal(model.projector.fc1.weight, other.projector.fc1.weight)
    assert torch.equal(model.lm.embed_tokens.weight, other.lm.embed_tokens.weight), "towers are of seed 0 for all"
    own = Run(replace(TINY, pretrain_seeds=True), "base", 1, tmp_path).build()
    assert not torch.equal(model.lm.embed_tokens.weight, own.lm.embed_tokens.weight)


def test_building_a_model_twice_gives_two_models(tmp_path):
    """Stage 2 trains the language model in place; the next learning rate must not find it trained."""
    run = Run(TINY, "base", 0, tmp_path)
    first = run.build()
    with torch.no_grad():
        first.lm.embed_tokens.weight.zero_()
    assert run.build().lm.embed_tokens.weight.abs().sum() > 0


def test_rates_are_chosen_by_variant_and_seeds_have_their_own_towers(tmp_path):
    """The procedure of `paper`: its sizes are replaced, its steps are not."""
    preset = replace(
        paper_slice(),
        world=replace(paper_slice().world, train_scenes=12, eval_scenes=4),
        vision=tiny().vision,
        lm=tiny().lm,
        variants=("base", "gwc"),
        stage1_lrs=(1e-3, 1e-2),
        stage2_lrs=(1e-3,),
        language_samples=12,
    )
    preset = replace(preset, vision=replace(preset.vision, image_size=48))
    results = reproduce(preset, tmp_path, jobs=1)
    assert results["rates"].keys() == {"base", "gwc"}
    for arm, chosen in results["rates"].items():
        for stage in ("stage1", "stage2"):
            losses = {float(value): loss for value, loss in chosen[stage]["losses"].items()}
            assert losses[chosen[f"{stage}_lr"]] == min(losses.values())
            assert chosen[stage]["interior"] == (min(losses) < chosen[f"{stage}_lr"] < max(losses))
        runs = [run for run in results["runs"] if run["arm"] == arm]
        assert [run["seed"] for run in runs] == list(preset.seeds)
        assert {(run["stage1_lr"], run["stage2_lr"]) for run in runs} == {(chosen["stage1_lr"], chosen["stage2_lr"])}
        assert all(run["rates_chosen"] for run in runs)
        assert runs[0]["stage1_caption_loss"] != runs[1]["stage1_caption_loss"]
    assert sorted((row["tower"], row["seed"]) for row in results["towers"]) == [
        (tower, seed) for tower in ("language", "vision") for seed in preset.seeds
    ]
    grown = {
        stage: sum(len(row[stage]["losses"]) - len(grid) for row in results["rates"].values())
        for stage, grid in (("stage1", preset.stage1_lrs), ("stage2", preset.stage2_lrs))
    }
    times = trainings(preset)
    assert len(list(tmp_path.glob("*/stage1-*"))) == times["stage 1"] + grown["stage1"]
    assert len(list(tmp_path.glob("*/stage2-*"))) == times["stage 2"] + sum(grown.values())
    assert times["vision"] + times["language"] == len(results["towers"])
    assert preset.select and preset.pretrain_seeds and paper_slice().vision == PRESETS["paper"]().vision


# ---- choosing

grids = st.lists(st.sampled_from([1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2]), min_size=1, max_size=4, unique=True)


@given(grids, st.floats(-6, 0), st.floats(0.1, 9))
def test_the_search_finds_an_interior_optimum_or_says_that_it_did_not(grid, log_optimum, scale):
    asked = []

    def loss(value: float) -> float:
        asked.append(value)
        return scale * abs(math.log10(value) - log_optimum)

    found = search(grid, loss)
    assert len(asked) == len(set(asked)) and len(asked) <= len(grid) + WIDENINGS, "nothing is tried twice"
    assert set(grid) <= set(asked)
    assert loss(found["best"]) == min(map(loss, list(asked)))
    assert found["interior"] == (min(asked) < found["best"] < max(asked))
    reach = 10 ** (-0.45 * WIDENINGS)  # three steps by a factor of about 3
    if len(grid) > 1 and min(grid) * reach * 3 < 10**log_optimum < max(grid) / reach / 3:
        assert found["interior"]
    assert {f"{value:g}" for value in asked} >= found["losses"].keys()


@given(grids, st.sampled_from([math.inf, math.nan]))
def test_a_rate_that_diverges_is_never_chosen(grid, broken):
    """Everything above 5e-4 diverges: the search goes down, and writes None where there was no loss."""
    found = search(grid, lambda value: broken if value > 5e-4 else -value)
    if any(value is not None for value in found["losses"].values()):
        assert found["best"] <= 5e-4
    assert all((loss is None) == (float(value) > 5e-4) for value, loss in found["losses"].items())
    json.dumps(found, allow_nan=False)


# ---- settings


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name):
    preset = PRESETS[name]()
    assert preset_from_json(preset_to_json(preset)) == preset
    assert preset_from_json(json.dumps(asdict(preset.with_seeds(3)))).seeds == (0, 1, 2)
    assert set(preset.variants) <= VARIANTS.keys()


def test_the_key_of_the_cache_changes_with_every_setting():
    parts: list[tuple] = [("vision", {"a": 1}), ("vision", {"a": 2}), ("language", {"a": 1}), ("vision", {"b": 1})]
    parts += [("vision", asdict(TINY.world)), ("vision", asdict(replace(TINY.world, grid=3)))]
    assert len({content_key(*part) for part in parts}) == len(parts)
    assert content_key({"a": 1, "b": 2}) == content_key({"b": 2, "a": 1})


@pytest.mark.parametrize("field", ["world", "vision", "lm", "language_samples", "vision_training", "language_training"])
def test_the_key_of_a_run_changes_with_what_it_stands_on(tmp_path, field):
    changed = {
        "world": replace(TINY.world, eval_scenes=9),
        "vision": replace(TINY.vision, depth=3),
        "lm": replace(TINY.lm, depth=3),
        "language_samples": 25,
        "vision_training": replace(SHORT, lr=2e-3),
        "language_training": replace(SHORT, lr=2e-3),
    }
    run = Run(TINY, "base", 0, tmp_path)
    assert Run(replace(TINY, **{field: changed[field]}), "base", 0, tmp_path).key != run.key
    assert Run(replace(TINY, name="other", seeds=(0, 1)), "base", 0, tmp_path).key == run.key
    assert Run(TINY, "aligned", 0, tmp_path).key != Run(TINY, "aligned-low", 0, tmp_path).key


def test_no_job_is_too_few(tmp_path):
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        reproduce(TINY, tmp_path, jobs=0)


# ---- docs/results.md


def paths(value, prefix: str = "") -> set[str]:
    """Every key with its place, such as 'runs[].trace.data'."""
    if isinstance(value, dict):
        return {prefix} | {p for k, v in value.items() for p in paths(v, f"{prefix}.{k}" if prefix else k)}
    if isinstance(value, list):
        return {prefix} | {p for v in value[:40] for p in paths(v, f"{prefix}[]")}
    return {prefix}


def test_the_page_documents_every_key_and_no_other(results):
    """A path `a.*` in the page stands for all keys below a, whose names are data: settings, kinds of question."""
    page = (Path(minillava.__file__).parents[1] / "docs" / "results.md").read_text()
    documented = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    assert len(documented) == len(set(documented))
    written = {re.sub(r"(\[\])+$", "", p) for p in paths(json.loads(json.dumps(results)))} - {""}

    def stands_for(entry: str, path: str) -> bool:
        pattern = re.escape(entry).replace(r"\.\*", r"([.\[].*)?").replace(r"<any>", r"[^.]+")
        return re.fullmatch(pattern, path) is not None

    missing = [path for path in sorted(written) if not any(stands_for(entry, path) for entry in documented)]
    assert missing == []
    written |= {"rates.base.stage1_lr"}  # with `select` only, see the test of rates above
    chosen = [entry for entry in documented if entry.startswith("rates.")]
    idle = [entry for entry in documented if not any(stands_for(entry, path) for path in written)]
    assert [entry for entry in idle if entry not in chosen] == []


def test_every_field_of_a_preset_is_in_the_results(results):
    assert results["preset"].keys() == {field.name for field in fields(Preset)}
