"""MiniLLaVA: visual tokens in their places, the arms, what trains, and generation that padding does not change."""

import ast
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import minillava
from minillava.llava import ARMS, SHARPNESS, LLaVAConfig, MiniLLaVA, pick
from minillava.lm import LM, LMConfig
from minillava.norm_align import text_norm
from minillava.vit import ViT, ViTConfig

IMAGE, END, N, D = 3, 2, 4, 24  # N visual tokens for each image
TOKENS = [i for i in range(4, 40)]
VISION = {"image_size": 8, "patch_size": 4, "width": 16, "depth": 2, "heads": 2}
LANGUAGE = {"vocab_size": 40, "width": D, "depth": 2, "heads": 3, "kv_heads": 1, "hidden": 32}


def make_llava(arm: str = "base", seed: int = 0, **lm_changes) -> MiniLLaVA:
    """A tiny MiniLLaVA with weights large enough that what it says depends on what it sees."""
    torch.manual_seed(seed)
    vit, lm = ViT(ViTConfig(**VISION)), LM(LMConfig(**LANGUAGE | lm_changes))
    for p in [*vit.parameters(), *lm.parameters()]:
        torch.nn.init.normal_(p, std=0.3) if p.dim() > 1 else torch.nn.init.ones_(p)
    return MiniLLaVA(LLaVAConfig(vit.config, lm.config, arm, IMAGE, visual_words=10), vit, lm)


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pixels(n: int, seed: int = 1) -> torch.Tensor:
    return draw(n, 3, 8, 8, seed=seed)


def prompt(*parts: int | str) -> list[int]:
    """Token ids, with "image" standing for its N placeholders."""
    return [i for part in parts for i in ([IMAGE] * N if part == "image" else [part])]


def left_pad(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    document_ids = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, document_ids


# ---- visual tokens in their places

segments = st.lists(st.one_of(st.just("image"), st.sampled_from(TOKENS)), min_size=1, max_size=8)
batches = st.lists(segments, min_size=1, max_size=4)


@given(batches)
@torch.no_grad()
def test_scatter_puts_every_visual_token_in_its_place_and_nothing_else_moves(rows):
    """Any layout: text-only rows, several images in a row, images side by side, padding before them."""
    model, images = make_llava(), sum(row.count("image") for row in rows)
    assume(images)
    ids, _ = left_pad([prompt(*row) for row in rows])
    features = draw(images, N, 16)
    embeds = model.embed(ids, features=features)
    visual = iter(model.visual_tokens(features=features).flatten(0, 1))
    for b in range(len(rows)):
        for t in range(ids.shape[1]):
            expected = next(visual) if ids[b, t] == IMAGE else model.lm.embed_tokens.weight[ids[b, t]]
            assert torch.equal(embeds[b, t], expected)
    assert next(visual, None) is None


@given(batches, st.integers(-2, 2), st.integers(-3, 3), st.booleans())
def test_a_count_that_is_off_names_the_first_row_that_cannot_be_served(rows, images_off, tokens_off, named):
    """Images too many or too few, and a row that lost or gained some placeholders."""
    model, images = make_llava(), sum(row.count("image") for row in rows) + images_off
    assume(images >= 1 and (images_off or tokens_off))
    ids = [prompt(*row) for row in rows]
    spoiled = max(range(len(rows)), key=lambda i: rows[i].count("image"))
    ids[spoiled] = ids[spoiled] + [IMAGE] * tokens_off if tokens_off > 0 else ids[spoiled][-tokens_off:]
    assume(all(ids))
    counts = [row.count(IMAGE) for row in ids]
    assume(sum(counts) != images * N or any(count % N for count in counts))
    left, first = images, len(ids) - 1
    for i, count in enumerate(counts):
        left -= count / N
        if count % N or left < 0:
            first = i
            break
    names = [f"scene-{i}" for i in range(len(ids))] if named else None
    who = f"sample 'scene-{first}'" if named else f"row {first}"
    with pytest.raises(ValueError) as error:
        model(left_pad(ids)[0], features=draw(images, N, 16), sample_ids=names)
    assert str(error.value) == (
        f"{who}: {counts[first]} image tokens; the batch has {sum(counts)} image tokens "
        f"for {images} image(s) of {N} visual tokens ({images * N})"
    )


def test_placeholders_without_an_image_are_refused():
    ids, _ = left_pad([[5, 6], prompt("image", 5)])
    with pytest.raises(ValueError, match=r"sample 'b': 4 image tokens; .* for 0 image\(s\)"):
        make_llava()(ids, sample_ids=["a", "b"])


@torch.no_grad()
def test_features_stand_for_pixels_and_may_be_pooled():
    model, ids = make_llava(), torch.tensor([prompt(5, "image", 6)])
    assert torch.equal(model(ids, pixel_values=pixels(1)), model(ids, features=model.vision(pixels(1))))
    pooled = model.vision(pixels(1)).view(1, 2, 2, 16).mean(2)  # two tokens for the image instead of four
    ids = torch.tensor([[5, IMAGE, IMAGE, 6]])
    assert torch.equal(model.embed(ids, features=pooled)[0, 1:3], model.visual_tokens(features=pooled)[0])


@torch.no_grad()
def test_text_alone_is_the_language_model_alone():
    model, ids = make_llava(), torch.tensor([[5, 6, 7]])
    assert torch.equal(model(ids), model.lm(model.lm.embed_tokens(ids)))


@pytest.mark.parametrize("arm", ARMS)
@torch.no_grad()
def test_observed_forward_is_the_same_forward(arm):
    model = make_llava(arm)
    ids, document_ids = left_pad([prompt("image", 5), prompt(6, 7, "image", 8)])
    logits, states = model(ids, document_ids, pixel_values=pixels(2), return_states=True)
    assert torch.equal(logits, model(ids, document_ids, pixel_values=pixels(2)))
    assert torch.equal(states["embedding"], model.embed(ids, pixel_values=pixels(2)))


# ---- arms


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("autocast", [False, True])
def test_every_arm_trains_and_generates_in_fp32_and_under_bf16_autocast(arm, autocast):
    model = make_llava(arm)
    model.set_trainable(stage=2, train_vision=True)
    ids, document_ids = left_pad([prompt("image", 5), prompt(6, 7, "image", 8), [9, 10]])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(ids, document_ids, pixel_values=pixels(2))
        loss = logits[document_ids > 0].float().logsumexp(-1).mean()
        rows = model.generate(ids, END, document_ids, pixel_values=pixels(2), max_new_tokens=3)
    assert logits.dtype == (torch.bfloat16 if autocast else torch.float32)
    loss.backward()
    silent = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()}
    unused = {n for n, _ in model.named_parameters() if n.startswith(("vision.blocks.1.", "vision.norm."))}
    assert silent == unused  # what is above the feature layer, and no more
    assert model.projector.fc1.weight.grad.any()
    assert len(rows) == 3 and all(0 <= token < 40 for row in rows for token in row)


@torch.no_grad()
def test_arms_decide_how_loud_visual_tokens_are():
    """T for `aligned`, `gwc` and (in the mean, on its calibration batch) `scale`; √D for `default`; ρ ≥ 1 − ε/2σ²."""
    features = draw(6, N, 16)
    for arm in ARMS:
        model = make_llava(arm)
        model.calibrate(features)
        raw = model.projector(features)
        norms = model.visual_tokens(features=features).norm(dim=-1)
        T = text_norm(model.lm.embed_tokens.weight)
        rho_loss = 1e-5 / (2 * raw.var(-1, correction=0).min().item())
        if arm == "base":
            assert torch.equal(norms, raw.norm(dim=-1))
        elif arm == "scale":
            assert norms.mean().item() == pytest.approx(T, rel=1e-6)
            torch.testing.assert_close(norms / raw.norm(dim=-1), torch.full_like(norms, model.arm.factor))
        elif arm == "discrete":
            assert norms.mean().item() == pytest.approx(raw.norm(dim=-1).mean().item(), rel=1e-5)
            assert model.arm.scores(raw).std().item() == pytest.approx(SHARPNESS, rel=1e-5)
            model.calibrate(features, visual_norm=7.5)
            asked = model.visual_tokens(features=features).norm(dim=-1).mean().item()
            assert asked == pytest.approx(7.5, rel=1e-5)
        else:
            target = math.sqrt(D) if arm == "default" else T
            assert ((norms / target - 1).abs() < rho_loss + 1e-6).all()
        assert getattr(model.arm, "compensate", False) == (arm == "gwc")


@torch.no_grad()
def test_calibration_touches_only_the_arm_and_twice_is_once():
    for arm in ARMS:
        model, features = make_llava(arm), draw(6, N, 16)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.calibrate(features)
        once = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        changed = {name for name in before if not torch.equal(before[name], once[name])}
        assert changed == {"scale": {"arm.factor"}, "discrete": {"arm.keys", "arm.words"}}.get(arm, set())
        model.calibrate(features)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, once[name], rtol=1e-6, atol=0)


@torch.no_grad()
def test_a_discrete_token_lies_in_the_hull_of_the_visual_words():
    model = make_llava("discrete")
    model.arm.words.copy_(torch.nn.functional.pad(torch.eye(10), (0, D - 10)))  # word i is the unit vector i
    tokens = model.visual_tokens(features=10 * draw(2, N, 16))
    assert (tokens >= 0).all() and not tokens[..., 10:].any()
    torch.testing.assert_close(tokens.sum(-1), torch.ones(2, N))


def test_aligned_and_gwc_differ_in_the_gradient_to_the_projector_alone():
    ids, grads = torch.tensor([prompt("image", 5, 6)]), {}
    for arm in ("aligned", "gwc"):
        model = make_llava(arm)
        logits = model(ids, pixel_values=pixels(1))
        logits.logsumexp(-1).sum().backward()
        grads[arm] = (logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        mean_gain = model.arm.weight.abs().mean().item()
    assert torch.equal(grads["aligned"][0], grads["gwc"][0])
    for name, grad in grads["aligned"][1].items():
        factor = 1 / mean_gain if name.startswith(("projector", "vision")) else 1
        off = (grads["gwc"][1][name] - factor * grad).abs().max()
        assert off <= 1e-5 * factor * grad.abs().max(), name  # sums of cancelling terms, each rounded once more


# ---- what trains


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("train_vision", [False, True])
@pytest.mark.parametrize("train_gain", [False, True])
def test_exactly_what_the_policy_says_gets_gradients(arm, stage, train_vision, train_gain):
    model = make_llava(arm)
    line = model.set_trainable(stage, train_vision, train_gain)
    parts = {"projector", *(["arm"] if train_gain else []), *(["lm"] if stage == 2 else [])}
    parts |= {"vision"} if stage == 2 and train_vision else set()
    model(torch.tensor([prompt("image", 5, 6)]), pixel_values=pixels(1)).logsumexp(-1).sum().backward()
    above = ("vision.blocks.1.", "vision.norm.")  # over the feature layer, so nothing flows there
    for name, p in model.named_parameters():
        assert (p.grad is not None) == (name.split(".")[0] in parts and not name.startswith(above)), name
    sizes = {
        part: sum(p.numel() for p in getattr(model, part).parameters()) for part in ("vision", "projector", "arm", "lm")
    }
    said = [f"{part} ({size:,})" for part, size in sizes.items() if part in parts and size]
    assert line == f"stage {stage} trains " + ", ".join(said)


def test_there_are_two_stages():
    with pytest.raises(ValueError, match="stage must be 1 or 2, got 3"):
        make_llava().set_trainable(3)


# ---- generation


def greedy_without_cache(model: MiniLLaVA, row: list[int], images, max_new_tokens: int) -> list[int]:
    new: list[int] = []
    while len(new) < max_new_tokens:
        logits = model(torch.tensor([row + new]), pixel_values=images)[0, -1]
        logits[IMAGE] = -math.inf
        new.append(int(logits.argmax()))
        if new[-1] == END:
            return new[:-1]
    return new


@settings(max_examples=20)
@given(batches, st.integers(0, 50), st.sampled_from(ARMS))
@torch.no_grad()
def test_a_left_padded_batch_with_images_generates_what_its_rows_generate_alone_without_a_cache(rows, seed, arm):
    model = make_llava(arm, seed)
    counts = [row.count("image") for row in rows]
    images = pixels(sum(counts), seed) if sum(counts) else None
    prompts = [prompt(*row) for row in rows]
    ids, document_ids = left_pad(prompts)
    batch = model.generate(ids, END, document_ids, pixel_values=images, max_new_tokens=6)
    shares = images.split(counts) if images is not None else [None] * len(rows)
    for row, share, new in zip(prompts, shares, batch, strict=True):
        share = share if share is not None and len(share) else None
        assert new == greedy_without_cache(model, row, share, 6)


@torch.no_grad()
def test_generation_sees_the_image_and_stops_at_the_end_token():
    model, ids = make_llava(), torch.tensor([prompt("image", 5)])
    said = {tuple(model.generate(ids, END, pixel_values=pixels(1, seed), max_new_tokens=8)[0]) for seed in range(10)}
    assert len(said) > 1
    row = max(said, key=len)
    seed = next(
        s for s in range(10) if tuple(model.generate(ids, END, pixel_values=pixels(1, s), max_new_tokens=8)[0]) == row
    )
    end = row[3]  # call this one the end, and the same words stop before its first appearance
    stopped = model.generate(ids, end, pixel_values=pixels(1, seed), max_new_tokens=8)[0]
    assert stopped == list(row[: row.index(end)])
    assert model.generate(ids, END, pixel_values=pixels(1), max_new_tokens=0) == [[]]


@torch.no_grad()
def test_image_tokens_are_never_sampled():
    """Whatever the model would say first, call that one the image token: it must say something else."""
    for seed in range(10):
        model = make_llava(seed=seed)
        favourite = model.generate(torch.tensor([[5, 6]]), END, max_new_tokens=1)[0]
        if not favourite:
            continue
        model.config.image_token_id = favourite[0]
        hot = torch.Generator().manual_seed(seed)
        text = torch.tensor([[7 if favourite[0] != 7 else 8, 6]] * 50)
        greedy = model.generate(torch.tensor([[t for t in (5, 6) if t != favourite[0]]]), END, max_new_tokens=8)
        sampled = model.generate(text, END, max_new_tokens=8, temperature=100.0, generator=hot)
        assert not any(favourite[0] in row for row in greedy + sampled)


def test_a_prompt_that_ends_in_padding_is_refused():
    with pytest.raises(ValueError, match="pad on the left"):
        make_llava().generate(torch.tensor([[5, 6], [7, 0]]), END, torch.tensor([[1, 1], [1, 0]]))


@torch.no_grad()
def test_sampling_follows_its_seed():
    model, ids = make_llava(), torch.tensor([[5, 6]] * 8)

    def sample(seed):
        generator = torch.Generator().manual_seed(seed)
        return model.generate(ids, END, temperature=2.0, max_new_tokens=5, generator=generator)

    assert sample(0) == sample(0) != sample(1)


@given(st.lists(st.floats(-8, 8), min_size=2, max_size=12), st.floats(0.1, 5), st.floats(0.01, 1), st.integers(0, 99))
def test_a_draw_comes_from_the_smallest_set_that_holds_top_p(logits, temperature, top_p, seed):
    scores = torch.tensor(logits)
    weights = (scores.double() / temperature).softmax(-1)
    token = int(pick(scores[None], temperature, top_p, torch.Generator().manual_seed(seed)))
    better = weights[weights > weights[token] * (1 + 1e-6)].sum().item()  # equals are no better, in whatever order
    assert better < top_p + 1e-6  # the token's turn came before the mass was full (fp32 sums of at most 12)
    assert int(pick(scores[None], 0, top_p)) == int(scores.argmax())


def test_draws_have_the_frequencies_of_softmax_at_that_temperature():
    logits, draws = torch.tensor([2.0, 1.0, 0.0, -1.0]), 20_000
    for temperature, top_p, kept in ((1.0, 1.0, 4), (0.5, 1.0, 4), (1.0, 0.8, 2)):
        expected = (logits / temperature).softmax(-1)
        expected[kept:] = 0
        expected /= expected.sum()
        tokens = pick(logits.expand(draws, 4), temperature, top_p, torch.Generator().manual_seed(0))
        counts = torch.bincount(tokens, minlength=4)
        spread = (draws * expected * (1 - expected)).sqrt()
        assert ((counts - draws * expected).abs() <= 5 * spread).all()  # five standard deviations of a binomial


@pytest.mark.parametrize(("temperature", "top_p"), [(-0.1, 1.0), (1.0, 0.0), (1.0, 1.1)])
def test_impossible_sampling_is_refused(temperature, top_p):
    with pytest.raises(ValueError, match=r"temperature must be >= 0 and top_p in \(0, 1\]"):
        pick(torch.zeros(1, 4), temperature, top_p)


# ---- construction


def test_config_survives_json():
    config = make_llava("gwc").config
    assert LLaVAConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_arms_and_towers_that_the_config_does_not_describe_are_refused():
    with pytest.raises(
        ValueError, match="unknown arm 'louder': choose one of base, default, aligned, gwc, scale, discrete"
    ):
        make_llava("louder")
    with pytest.raises(ValueError, match="but the config says"):
        MiniLLaVA(LLaVAConfig(), vision=ViT(ViTConfig(**VISION)))
    with pytest.raises(ValueError, match="but the config says"):
        MiniLLaVA(LLaVAConfig(), lm=LM(LMConfig(**LANGUAGE)))


def test_the_model_fits_one_sitting_and_can_be_copied_out():
    """Under 1,000 lines together, about 300 each; they import torch, the standard library and each other downward."""
    allowed = {"vit": set(), "lm": set(), "norm_align": {"layer_norm"}, "llava": {"lm", "norm_align", "vit"}}
    lines = {}
    for name, below in allowed.items():
        source = (Path(minillava.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
        lines[name] = len(source.splitlines())
        modules = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
        modules |= {a.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for a in node.names}
        ours = {module for module in modules if module.startswith("minillava")}
        assert ours == {f"minillava.{module}" for module in below}
        roots = {module.split(".")[0] for module in modules - ours}
        assert roots <= {"__future__", "dataclasses", "itertools", "math", "torch"}
    assert sum(lines.values()) < 1000 and max(lines.values()) <= 320, lines
