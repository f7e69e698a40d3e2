"""Norms of towers from elsewhere, on tiny ones: against norms computed by hand, and what the command refuses."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from minillava import cli, tower_norms
from minillava.lm import LM, LMConfig
from minillava.vit import ViT, ViTConfig


@pytest.fixture
def towers():
    torch.manual_seed(0)
    vision = ViT(ViTConfig(image_size=16, patch_size=4, width=12, depth=3, heads=2)).eval()
    return vision, LM(LMConfig(vocab_size=50, width=16, depth=1, heads=2, kv_heads=1, hidden=32)).eval()


@torch.no_grad()
def test_norms_are_those_of_the_patches(towers):
    vision, lm = towers
    lm.embed_tokens.weight[0] = 0  # an unused row, which T leaves out
    pixels = torch.randint(0, 256, (17, 3, 16, 16), dtype=torch.uint8)  # more than one chunk
    found = tower_norms.tower_norms(vision, lm, pixels, ((0.5,) * 3, (0.5,) * 3))
    images = pixels / 127.5 - 1
    assert found["T"] == pytest.approx(lm.embed_tokens.weight[1:].norm(dim=-1).mean().item(), rel=1e-5)
    assert found["text"]["mean"] == pytest.approx(found["T"], rel=1e-5)
    assert len(found["layers"]) == 4
    for layer, norms in enumerate(found["layers"]):
        expected = vision(images, layer=layer).norm(dim=-1)
        assert norms["mean"] == pytest.approx(expected.mean().item(), rel=1e-5)
        assert norms["std"] == pytest.approx(expected.std().item(), rel=1e-4)
    final = vision.norm(vision(images, layer=3))
    assert found["final"]["mean"] == pytest.approx(final.norm(dim=-1).mean().item(), rel=1e-5)
    made = found["projected"]["penultimate"]
    assert set(made) == set(found["projected"]["final"]) and len(made) == 6
    assert made["MLP, aligned norm"]["mean"] == pytest.approx(found["T"], rel=0.05)  # less by the LayerNorm's eps
    assert made["MLP, norm of gain 1"]["mean"] == pytest.approx(4, rel=0.05)  # √D
    assert made["linear"]["mean"] < found["projected"]["final"]["linear"]["mean"]  # louder in, louder out


def test_four_patches_are_merged_where_they_lie_together():
    merge = tower_norms.MergedLinear(2, 8)
    merge.linear = torch.nn.Identity()
    tokens = torch.arange(16.0)[None, :, None].repeat(1, 1, 2)  # rows of four
    first = merge(tokens)[0, 0]
    assert sorted(first.tolist()) == [0, 0, 1, 1, 4, 4, 5, 5]
    assert merge(torch.zeros(1, 25, 2)).shape == (1, 4, 8)


def test_the_command_prints_and_writes_and_refuses_in_one_line(towers, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tower_norms, "load_vision", lambda name: (towers[0], tower_norms.IMAGENET))
    monkeypatch.setattr(tower_norms, "load_lm", lambda name: towers[1])
    picture = Path(__file__).parents[1] / "examples" / "scene.png"

    def run(*arguments) -> int:
        monkeypatch.setattr(sys, "argv", ["minillava", "norms", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code

    assert run("--image", picture, "--out", tmp_path / "norms.json") == 0
    assert "patches after block 3" in capsys.readouterr().out
    assert json.loads((tmp_path / "norms.json").read_text())["pictures"] == 1
    (tmp_path / "photos" / "of a day").mkdir(parents=True)
    shutil.copy(picture, tmp_path / "photos" / "of a day")
    assert run("--image", tmp_path / "photos") == 0
    capsys.readouterr()
    assert run("--image", tmp_path / "nowhere") == 1
    assert "no PNG or JPEG there" in capsys.readouterr().err


def test_a_name_that_timm_does_not_know_is_refused_in_one_line():
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match="--vision no_such_model: no such file, and timm can't fetch a model"):
        tower_norms.load_vision("no_such_model")


def test_a_timm_model_comes_with_its_own_normalisation(monkeypatch):
    timm = pytest.importorskip("timm")
    create = timm.create_model
    asked = []

    def offline(name, pretrained):
        asked.append(pretrained)
        return create(name, pretrained=False)

    monkeypatch.setattr(timm, "create_model", offline)
    vision, spread = tower_norms.load_vision("vit_tiny_patch16_224")
    assert asked == [True] and vision.config.width == 192
    assert spread == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
