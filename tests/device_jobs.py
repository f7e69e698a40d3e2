"""What test_device.py does on a pretended device: `python device_jobs.py experiment`, in this folder.

Each job does the same on the CPU and compares: another device must not change what is found.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pretend_gpu import pretend_gpu
from test_finetune import CONFIG, QUESTION, write_folder, write_start
from test_hf import picture, write_family
from test_smol import SIZES, make_parts

import minillava
from minillava import hf, hf_probe, smol
from minillava.checkpoint import load_model
from minillava.duration import time_steps
from minillava.experiment import preset_to_json, run_variant
from minillava.finetune import finetune
from minillava.generate import answer
from minillava.presets import PRESETS
from minillava.reproduce import reproduce


def refuses(device: str) -> None:
    """The pretended device itself: what a GPU refuses it refuses, what a GPU takes it takes."""
    there, here = torch.arange(6.0, device=device).view(2, 3), torch.ones(2, 3)
    for mix in (lambda: there + here, lambda: torch.where(here > 0, there, here), lambda: there @ here.mT):
        with pytest.raises(RuntimeError, match="on the CPU"):
            mix()
    with pytest.raises(RuntimeError, match="on the CPU"):
        here[there.long() % 2]
    with pytest.raises(RuntimeError, match="on the CPU"):
        there[0] += torch.ones(3)
    with pytest.raises((TypeError, RuntimeError)):
        there.numpy()
    assert (there * torch.tensor(2.0)).device == there.device == torch.zeros_like(there).device  # one number may travel
    assert there[torch.tensor([1])].tolist() == [[3.0, 4.0, 5.0]]
    assert there.cpu().device == here.device and torch.equal(there.cpu(), torch.arange(6.0).view(2, 3))


def experiment(device: str) -> None:
    """From towers to measures, with arms of every kind; and the choice of rates."""
    preset = replace(PRESETS["tiny"](), stage2_lrs=(1e-3,))
    with tempfile.TemporaryDirectory() as out:
        for name in ("discrete", "scale", "post-norm"):
            results = [
                run_variant(preset_to_json(preset), name, 0, f"{out}/{d}", None, d, False) for d in ("cpu", device)
            ]
            cpu, other = (run for (run,) in results)
            for key in ("stage1_caption_loss", "caption_loss_after", "norm_visual", "cosine_text"):
                assert other[key] == pytest.approx(cpu[key], rel=1e-3), (name, key)
        small = replace(preset, variants=("gwc",), stage1_lrs=(1e-3,), select=True, pretrain_seeds=True)
        assert reproduce(small, Path(out) / "selected", 1, device)["rates"]["gwc"]


def folder(device: str) -> None:
    """Both stages on a folder of pictures, the tower trained too; then an answer, greedy and sampled."""
    with tempfile.TemporaryDirectory() as out:
        data, start = write_folder(Path(out) / "data"), write_start(Path(out) / "start")
        config = replace(CONFIG, steps=4)
        finetune(data, start, Path(out) / "1", config, 1, "gwc", device=device, show=False)
        options = {"validation": data, "train_vision": True, "device": device, "show": False}
        finetune(data, Path(out) / "1/model", Path(out) / "2", config, 2, **options)
        answers = [
            answer(*load_model(Path(out) / "2/model", d)[:2], QUESTION, [data / "blue.png"], temperature=t)
            for d, t in (("cpu", 0.0), (device, 0.0), (device, 1.0))
        ]
        assert answers[0] == answers[1]


def durations(device: str) -> None:
    assert all(row["step"] > 0 for row in time_steps(PRESETS["tiny"](), device, steps=1))


def real_towers(device: str) -> None:
    """An arm of the preset `smol`, on tiny towers."""
    with tempfile.TemporaryDirectory() as out:
        runs = [smol.run_arm(make_parts(), SIZES, "gwc", 0, Path(out) / d, d, show=False) for d in ("cpu", device)]
    at_end = [run["measures"]["after stage 2"] for run in runs]
    assert at_end[1] == pytest.approx(at_end[0], rel=1e-3)


def hugging_face(device: str) -> None:
    """Models from elsewhere: probed with all that can be asked for, aligned, trained for one step."""
    with tempfile.TemporaryDirectory() as out:
        picture().save(Path(out) / "picture.png")
        asked = hf_probe.Asked([Path(out) / "picture.png"], ["what is on the table ?"])
        for family in hf.FAMILIES:
            source = str(write_family(family, Path(out) / family))
            probed = [hf_probe.probe_hf(source, asked, {}, d, True, ("norm-matched",)) for d in ("cpu", device)]
            cpu, other = ([*run["interface"]["visual"].values(), *run["attention"]["mass"]] for run in probed)
            assert other == pytest.approx(cpu, rel=1e-3), family
            model, processor = hf.load(source, device=device)
            norm = minillava.align(model)
            inputs = hf.make_inputs(processor, picture(), "what is on the table ?", device)
            model(**inputs).logits.float().square().mean().backward()
            assert norm.weight.grad is not None and norm.weight.grad.device == next(model.parameters()).device


if __name__ == "__main__":
    with pretend_gpu() as pretended:
        globals()[sys.argv[1]](pretended)
