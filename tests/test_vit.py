"""The vision tower: patches in their places, a residual stream that is handed out as it is, clear refusals."""

import math

import pytest
import torch
import torch.nn.functional as F

from minillava.vit import ViT, ViTConfig

TINY = {"image_size": 16, "patch_size": 4, "width": 24, "depth": 3, "heads": 3}


def make_vit(seed: int = 0, **changes) -> ViT:
    """A tiny ViT in which every tensor matters: no zero bias, no unit norm."""
    torch.manual_seed(seed)
    vit = ViT(ViTConfig(**TINY | changes))
    for p in vit.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return vit


def images(batch: int = 2, size: int = 16) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("layer", [-4, -3, -2, -1, 0, 1, 2, 3])
@torch.no_grad()
def test_features_are_the_patches_of_the_chosen_residual_state_bit_by_bit(class_token, layer):
    vit = make_vit(class_token=class_token)
    observed, states = vit(images(), layer=layer, return_states=True)
    by_config = make_vit(class_token=class_token, feature_layer=layer)(images())
    stream = [
        states["embedding"],
        *(states[f"block{i}.mlp"] for i in range(3)),
    ]  # one state before and after each block
    assert torch.equal(observed, stream[layer][:, int(class_token) :])
    assert torch.equal(vit(images(), layer=layer), observed)
    assert torch.equal(by_config, observed)
    assert observed.shape == (2, 16, 24)


@pytest.mark.parametrize("class_token", [False, True])
@torch.no_grad()
def test_states_are_the_residual_stream(class_token):
    """Each state is the one before plus its branch, recomputed here from the weights with plain softmax attention."""
    vit = make_vit(class_token=class_token)
    _, states = vit(images(), return_states=True)
    assert list(states)[:5] == ["embedding", "block0.attn", "block0.mlp", "block0.q", "block0.k"]
    before = states["embedding"]
    for i, block in enumerate(vit.blocks):
        x = block.norm1(before)
        q, k, v = (
            x @ w.T + b for w, b in zip(block.attn.qkv.weight.chunk(3), block.attn.qkv.bias.chunk(3), strict=True)
        )
        heads = []
        for h in range(3):
            here = slice(8 * h, 8 * h + 8)
            torch.testing.assert_close(states[f"block{i}.q"][:, h], q[..., here], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(states[f"block{i}.k"][:, h], k[..., here], rtol=1e-5, atol=1e-5)
            heads.append((q[..., here] @ k[..., here].mT / math.sqrt(8)).softmax(-1) @ v[..., here])
        branch = block.attn.proj(torch.cat(heads, -1))
        # two fp32 evaluations of the same sums, in another order: some 24 roundings of values of size 1 to 10
        torch.testing.assert_close(states[f"block{i}.attn"], before + branch, rtol=1e-5, atol=1e-5)
        before = states[f"block{i}.attn"]
        branch = block.mlp.fc2(F.gelu(block.mlp.fc1(block.norm2(before))))
        torch.testing.assert_close(states[f"block{i}.mlp"], before + branch, rtol=1e-5, atol=1e-5)
        before = states[f"block{i}.mlp"]


@pytest.mark.parametrize("class_token", [False, True])
@torch.no_grad()
def test_each_patch_of_the_image_becomes_its_own_token_row_by_row(class_token):
    vit, x = make_vit(class_token=class_token), images()
    kernel = vit.patch_embed.proj.weight.flatten(1)  # (D, 3·p·p)
    tokens = F.unfold(x, kernel_size=4, stride=4).mT @ kernel.T + vit.patch_embed.proj.bias  # (B, N, D)
    if class_token:
        tokens = torch.cat([vit.cls_token.expand(2, 1, 24), tokens], dim=1)
    torch.testing.assert_close(vit.embed(x), tokens + vit.pos_embed, rtol=1e-5, atol=1e-5)
    touched = x.clone()
    touched[:, :, 4:8, 8:12] += 1  # second row, third column: patch 6 of 4 × 4
    changed = (vit.embed(touched) != vit.embed(x)).any(-1)
    assert changed.nonzero()[:, 1].tolist() == [6 + class_token] * 2


def test_blocks_above_the_feature_layer_run_only_when_observed():
    vit, ran = make_vit(feature_layer=1), []
    for i, block in enumerate(vit.blocks):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    vit(images())
    assert ran == [0]
    vit(images(), return_states=True)
    assert ran == [0, 0, 1, 2]


@torch.no_grad()
def test_branches_see_only_the_direction_of_a_token():
    """S1: scaling the residual leaves its branches as they were, up to ε: LayerNorm's ρ moves by less than ε/2σ²."""
    block = make_vit().blocks[0].double()
    h = torch.randn(1, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sigma2 = h.var(-1, correction=0).min().item()
    small, large = block.attn(block.norm1(h))[0], block.attn(block.norm1(100 * h))[0]
    change = ((large - small).norm() / small.norm()).item()
    assert 0 < change < 20 * 1e-6 / (2 * sigma2)  # 20: how much softmax and the projections may amplify it


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "heads=5 must divide width=24"),
        ({"patch_size": 5}, "patch_size=5 must divide image_size=16"),
        ({"feature_layer": 4}, "layer 4 is not there: 3 blocks have residual states 0 to 3"),
        ({"feature_layer": -5}, "layer -5 is not there"),
    ],
)
def test_bad_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ViT(ViTConfig(**TINY | changes))


@pytest.mark.parametrize("shape", [(1, 3, 20, 20), (1, 1, 16, 16), (3, 16, 16), (1, 16, 16, 3)])
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"images must be \(B, 3, 16, 16\), got"):
        make_vit()(torch.zeros(shape))
    with pytest.raises(ValueError, match="layer 7 is not there"):
        make_vit()(images(), layer=7)
