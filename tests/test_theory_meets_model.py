"""The theory against the model: every branch, layer and token of a random and of a trained MiniLLaVA.

The states are float32; they and their differences are taken to float64, where the step formula has to explain each
turn to rounding (R1, R5). S1, S2, N1-N3 and G1-G3 are tested on its own blocks, NormAlign and torch's optimisers.
"""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import minillava
import theory
from minillava.checkpoint import load_model
from minillava.llava import LLaVAConfig, MiniLLaVA
from minillava.lm import LM, LMConfig, build_mask, build_positions, rotary_table
from minillava.norm_align import NormAlign
from minillava.train import clip_gradients
from minillava.vit import ViT, ViTConfig

EPS = np.finfo(float).eps
CHECKPOINTS = sorted(path.parent for path in (Path(minillava.__file__).parent / "checkpoint").rglob("config.json"))


def random_model(arm: str = "base", depth: int = 3, seed: int = 0) -> MiniLLaVA:
    """Small, with weights large enough for updates of the size of the tokens."""
    torch.manual_seed(seed)
    vit = ViT(ViTConfig(image_size=16, patch_size=8, width=32, depth=3, heads=4))
    lm = LM(LMConfig(vocab_size=40, width=24, depth=depth, heads=3, kv_heads=1, hidden=32))
    for parameter in [*vit.parameters(), *lm.parameters()]:
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    return MiniLLaVA(LLaVAConfig(vit.config, lm.config, arm, image_token_id=3), vit, lm).eval()


@pytest.fixture(params=["random", "trained"])
def model(request) -> MiniLLaVA:
    if request.param == "random":
        return random_model()
    if not CHECKPOINTS:
        pytest.skip("no trained checkpoint ships with this version")
    return load_model(CHECKPOINTS[0])[0]


def batch(model: MiniLLaVA, rows: int = 2, text: int = 6):
    """Images of noise between random words: (input_ids, pixel_values)."""
    random = torch.Generator().manual_seed(1)
    config = model.config
    N, size = config.vision.num_patches, config.vision.image_size
    words = torch.randint(4, config.lm.vocab_size, (rows, 2 * text), generator=random)
    image = torch.full((rows, N), config.image_token_id)
    pixels = torch.randn((rows, 3, size, size), generator=random)
    return torch.cat([words[:, :text], image, words[:, text:]], dim=1), pixels


@torch.no_grad()
def streams(model: MiniLLaVA) -> dict[str, list[np.ndarray]]:
    """The residual states of both towers, in order, in float64."""
    ids, pixels = batch(model)
    records = {
        "vision": model.vision(pixels, return_states=True)[1],
        "lm": model(ids, pixel_values=pixels, return_states=True)[1],
    }
    return {
        tower: [state.double().numpy() for name, state in record.items() if name.split(".")[-1] not in ("q", "k")]
        for tower, record in records.items()
    }  # fmt: skip


def test_the_exact_formula_explains_every_turn(model):
    """R1, R5: nothing is left over at any branch, layer and token."""
    for states in streams(model).values():
        assert len(states) >= 3
        for before, after in pairwise(states):
            delta = after - before
            n, C = np.linalg.norm(before, axis=-1), np.linalg.norm(delta, axis=-1)
            phi, turn = theory.angle_between(before, delta), theory.angle_between(before, after)
            # h' − h is rounded once in float64: EPS of ‖h'‖ or ‖h‖, whichever is larger, against ‖h'‖.
            slack = 64 * EPS * (1 + n / np.linalg.norm(after, axis=-1))
            assert (np.abs(theory.step_angle(n, C, phi) - turn) <= slack).all()
            assert (np.abs(theory.norm_after(n, C, phi) / np.linalg.norm(after, axis=-1) - 1) <= slack).all()
            assert (np.abs(theory.adjacent_cosine(n, C, phi) - np.cos(turn)) <= slack).all()


def without_eps(module: torch.nn.Module) -> None:
    for part in module.modules():
        if hasattr(part, "eps"):
            part.eps = 0.0


def branches(model: MiniLLaVA, layer: int, tower: str):
    """The attention branch and the MLP branch of one block, as functions of the residual state (B, T, D)."""
    if tower == "vision":
        block = model.vision.blocks[layer]
        return (lambda h: block.attn(block.norm1(h))[0]), (lambda h: block.mlp(block.norm2(h)))
    block, config = model.lm.layers[layer], model.lm.config

    def attend(h):
        documents = torch.ones(h.shape[:2], dtype=torch.long)
        rotary = rotary_table(build_positions(documents), config.width // config.heads, config.rope_theta)
        return block.self_attn(block.input_layernorm(h), rotary, build_mask(documents), None)[0]

    return attend, (lambda h: block.mlp(block.post_attention_layernorm(h)))


@torch.no_grad()
@pytest.mark.parametrize("tower", ["vision", "lm"])
def test_a_branch_ignores_every_tokens_scale_and_a_layer_does_not(model, tower):
    """S1: bit for bit for powers of two at ε = 0, each token with its own; the layer's update moves by over 1 %."""
    without_eps(model)
    states = streams(model)[tower]
    for layer in range((len(states) - 1) // 2):
        h = torch.tensor(states[2 * layer], dtype=torch.float32)
        alpha = torch.randint(-6, 7, (*h.shape[:2], 1), generator=torch.Generator().manual_seed(2)).float().exp2()
        attend, mlp = branches(model, layer, tower)
        assert torch.equal(attend(alpha * h), attend(h)) and torch.equal(mlp(alpha * h), mlp(h))

        def layer_update(x, attend=attend, mlp=mlp):
            update = attend(x)
            return update + mlp(x + update)

        # Both branches of the layer are invariant, and yet the layer is not.
        near, far = layer_update(h), layer_update(64 * h)
        assert ((near - far).norm(dim=-1) / near.norm(dim=-1)).max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("alpha", [0.25, 8.0])
def test_epsilon_breaks_the_scale_by_no_more_than_its_bound(model, alpha):
    """S2 on the LM's own RMSNorm, where σ is the root mean square."""
    state = streams(model)["lm"][0]
    norm = model.lm.layers[0].input_layernorm
    near, far = (norm(torch.tensor(scale * state, dtype=torch.float32)).double().numpy() for scale in (1.0, alpha))
    rms = np.sqrt((state**2).mean(axis=-1))
    change = np.linalg.norm(far - near, axis=-1)
    whole = np.linalg.norm(norm.weight.detach().double().numpy() * state / rms[..., None], axis=-1)
    effect = theory.scale_effect(rms, alpha, norm.eps)
    assert (np.abs(change / whole - effect.change) <= 1e-6).all()  # float32 rounds the outputs
    assert (effect.change <= effect.bound).all()


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1e-2])
def test_norm_align_has_the_jacobian_and_the_norm_of_the_theory(eps):
    """N1, N2."""
    random = torch.Generator().manual_seed(3)
    align = NormAlign(12, gain=0.02, eps=eps).double()
    gain = align.weight[0].item()  # made in float32
    h = 0.1 * torch.randn(12, generator=random, dtype=torch.float64)
    J = torch.autograd.functional.jacobian(align, h).numpy()
    np.testing.assert_allclose(J, theory.layernorm_jacobian(h.numpy(), gain, eps), atol=1e-12)
    rho = 1 - theory.shrinkage(h.numpy().std(), eps)
    np.testing.assert_allclose(align(h).detach().norm().item(), gain * math.sqrt(12) * rho, rtol=1e-12)
    with torch.no_grad():
        align.weight.uniform_(0.01, 0.05, generator=random)
    low, high = theory.output_norm_bounds(h.numpy(), align.weight.detach().numpy(), eps)
    assert low <= align(h).norm().item() <= high


def test_targeted_gain_is_the_theorys():
    """N2: T from the embedding, g = T/√D."""
    rows = torch.randn(30, 16, generator=torch.Generator().manual_seed(4))
    rows[::7] = 0
    gain = NormAlign.to_text(rows).weight[0].item()
    assert gain == pytest.approx(theory.alignment_gain(theory.target_norm(rows.numpy()), 16), rel=1e-6)


def upstream_gradients(compensate: bool, gain: float, steps: int = 12):
    """A linear layer below a NormAlign, a fixed reading above: its gradients while the inputs change."""
    random = torch.Generator().manual_seed(5)
    below = torch.nn.Linear(6, 8, dtype=torch.float64)
    with torch.no_grad():
        below.weight.normal_(generator=random)
        below.bias.zero_()
    align = NormAlign(8, gain=gain, compensate=compensate).double()
    reading = torch.randn(8, generator=random, dtype=torch.float64)
    gradients, own = [], []
    for _ in range(steps):
        x = torch.randn(4, 6, generator=random, dtype=torch.float64)
        below.zero_grad(), align.zero_grad()
        (align(below(x)) @ reading).tanh().sum().backward()
        gradients.append(below.weight.grad.clone())
        own.append(align.weight.grad.clone())
    return torch.stack(gradients), torch.stack(own)


def run_optimizer(kind, gradients, **options) -> torch.Tensor:
    """The weight's path under given gradients, from 1."""
    weight = torch.nn.Parameter(torch.ones_like(gradients[0]))
    optimizer, path = kind([weight], **options), []
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        path.append(weight.detach().clone())
    return torch.stack(path)


def test_compensation_multiplies_the_upstream_gradient_alone():
    """The paper's E and G4: κ = 1/max(mean|g|, δ) upstream, the gain's own gradient untouched."""
    gain = 1 / 64
    plain, own = upstream_gradients(False, gain)
    compensated, own_too = upstream_gradients(True, gain)
    torch.testing.assert_close(compensated, float(theory.compensation_factor(gain)) * plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(own, own_too, rtol=0, atol=0)


def test_optimisers():
    """G1: SGD takes κ as a learning rate. G2: Adam does not notice it, bit for bit for κ = 64; ε becomes ε/κ."""
    kappa = 64
    plain, _ = upstream_gradients(False, 1 / kappa)
    compensated = kappa * plain
    sgd = run_optimizer(torch.optim.SGD, compensated, lr=1e-3)
    torch.testing.assert_close(sgd, run_optimizer(torch.optim.SGD, plain, lr=kappa * 1e-3), rtol=1e-13, atol=0)
    options = {"lr": 1e-3, "weight_decay": 0.1, "foreach": False}
    adam = [run_optimizer(torch.optim.AdamW, g, eps=0.0, **options) for g in (plain, compensated)]
    assert torch.equal(*adam)
    pairs = ((plain, 1e-6 / kappa), (compensated, 1e-6))
    torch.testing.assert_close(
        *(run_optimizer(torch.optim.AdamW, g, eps=eps, **options) for g, eps in pairs), rtol=1e-13, atol=0
    )
    coupled = [run_optimizer(torch.optim.Adam, g, lr=1e-3, eps=0.0, weight_decay=0.1) for g in (plain, compensated)]
    assert not torch.allclose(*coupled, rtol=1e-4)
    no_decay = run_optimizer(torch.optim.AdamW, plain, lr=1e-3, eps=1e-8, weight_decay=0.0)
    steps = (torch.cat([torch.ones_like(plain[:1]), no_decay[:-1]]) - no_decay) / 1e-3
    np.testing.assert_allclose(steps.numpy(), theory.adam_steps(plain.numpy(), eps=1e-8), atol=1e-9)


def test_clipping_slows_the_rest_and_the_house_rule_does_not():
    """G3 with torch's clipping; and `clip_gradients`, which measures the norm before compensation."""
    model = random_model("gwc")
    random = torch.Generator().manual_seed(6)
    gradients = {name: torch.randn(p.shape, generator=random) for name, p in model.named_parameters()}
    upstream = [name for name in gradients if name.startswith(("projector.", "vision."))]
    kappa = float(theory.compensation_factor(model.arm.weight.detach().abs().mean().item()))

    def clipped(factor, clip):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name] * (factor if name in upstream else 1)
        clip()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def by_torch():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)

    squares = {name: gradient.double().square().sum().item() for name, gradient in gradients.items()}
    effect = theory.clip_effect(sum(squares[name] for name in upstream) / sum(squares.values()), kappa)
    plain, compensated = clipped(1, by_torch), clipped(kappa, by_torch)
    house = [
        clipped(1, lambda: clip_gradients(random_twin(model), 1e-2)),
        clipped(kappa, lambda: clip_gradients(model, 1e-2)),
    ]
    for name in gradients:
        expected = effect.upstream if name in upstream else effect.rest
        torch.testing.assert_close(compensated[name], float(expected) * plain[name], rtol=1e-4, atol=0)
        assert torch.allclose(house[1][name], (kappa if name in upstream else 1) * house[0][name], rtol=1e-4, atol=0)


def random_twin(model: MiniLLaVA) -> torch.nn.Module:
    """The same parameters under a module without compensation, so that `clip_gradients` takes them as they are."""
    twin = torch.nn.Module()
    for name in ("vision", "lm", "projector"):
        twin.add_module(name, getattr(model, name))
    twin.register_parameter("gain", model.arm.weight)
    twin.register_parameter("bias", model.arm.bias)
    return twin


def gradient_at_the_normalised_token(model: MiniLLaVA, gain: float) -> float:
    """‖∂loss/∂x̂‖ for y = g·x̂ and a loss on the last text token."""
    ids, pixels = batch(model)
    with torch.no_grad():
        text = model.lm.embed_tokens(ids)
        x = model.projector(model.vision(pixels))
        x = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True, unbiased=False)
    x.requires_grad_()
    places = (ids == model.config.image_token_id)[..., None]
    logits = model.lm(text.masked_scatter(places, gain * x))
    torch.nn.functional.cross_entropy(logits[:, -1], ids[:, 0]).backward()
    return x.grad.norm().item()


def test_the_gradient_does_not_vanish_with_the_gain():
    """N3: exactly unchanged through one layer, at ε = 0; deeper it stays far above a factor g/1."""
    ratios = {}
    for depth in (1, 3):
        model = random_model(depth=depth)
        without_eps(model)
        gain = float(theory.alignment_gain(0.5, model.config.lm.width))
        ratios[depth] = gradient_at_the_normalised_token(model, gain) / gradient_at_the_normalised_token(model, 1.0)
    assert ratios[1] == pytest.approx(1, abs=1e-3)
    assert ratios[3] > 3 * gain


def test_the_gradient_in_a_trained_model():
    """N3 where it matters; the ratio is printed, and is a finite number that is not g."""
    if not CHECKPOINTS:
        pytest.skip("no trained checkpoint ships with this version")
    trained = load_model(CHECKPOINTS[0])[0]
    target = theory.target_norm(trained.lm.embed_tokens.weight.detach().numpy())
    gain = float(theory.alignment_gain(target, trained.config.lm.width))
    ratio = gradient_at_the_normalised_token(trained, gain) / gradient_at_the_normalised_token(trained, 1.0)
    print(f"gradient at g = T/√D = {gain:.4f} over g = 1: {ratio:.3f}")
    assert math.isfinite(ratio) and ratio > 2 * gain
