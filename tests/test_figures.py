"""Figures and tables show the numbers they are given, in the house's colours, and nothing is cut off or covered."""

import io
import xml.etree.ElementTree as ElementTree
from itertools import combinations, pairwise

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from rich.console import Console

from minillava import figures, style
from minillava.probe import MODALITIES, Trace

L = 3


def build_trace(seed=0, layers=L) -> Trace:
    """Numbers of the right shapes and signs; visual tokens loud, text tokens quiet."""
    rng = np.random.default_rng(seed)
    data = {}
    for modality, norm in zip(MODALITIES, (40.0, 1.0), strict=True):
        rows = {"state_norm": norm + np.arange(2 * layers + 1.0), "layer_cosine": rng.uniform(0.2, 1, layers)}
        rows["norm"], rows["update"] = rows["state_norm"][:-1], rng.uniform(0.5, 3, 2 * layers)
        rows["angle"], rows["turn"] = rng.uniform(1, 2, 2 * layers), rng.uniform(0.01, 1.4, 2 * layers)
        rows["input_cosine"] = rng.uniform(0, 1, 2 * layers + 1)
        for key in list(rows):
            rows[f"{key}_std"] = 0.3 * rows[key]
        for key in figures.PREDICTIONS:
            rows[key] = rows["turn"] * rng.uniform(0.8, 1.2, 2 * layers)
        data[modality] = rows
    steps = [f"block{i}.{branch}" for i in range(layers) for branch in ("attn", "mlp")]
    return Trace(steps, {"visual": 64, "text": 30}, data, {"turn": 1e-15, "cosine": 1e-15})


def build_signal(layers=L) -> dict:
    rng = np.random.default_rng(1)
    scale = np.array([4.0, 0.25, 1.0])
    result = {"scale": scale, "norm_visual": 20 * scale, "norm_text": 0.5, "relevant_share": 0.25}
    return result | {key: rng.uniform(0, 1, (3, layers)) for key in ("difference", "standardised", "mass")}


def build_maps(layers=L, samples=3):
    rng = np.random.default_rng(2)
    maps = rng.uniform(0, 0.05, (samples, layers, 4, 4))
    pictures = rng.integers(0, 256, (samples, 3, 32, 32), dtype=np.uint8)
    captions = ["what colour is at north? red (truth: red)", "how many? two", "a question that goes on " * 6]
    return maps, pictures, captions[:samples]


ARMS = {arm: build_trace(seed) for seed, arm in enumerate(style.ARM_COLOURS)}
CONTENT = {arm: {"accuracy": np.linspace(0.9, 0.5, L + 1), "chance": 0.2} for arm in ("base", "aligned")}
FIGURES = {
    "norms of one arm": lambda: figures.plot_norms({"base": build_trace()}),
    "norms": lambda: figures.plot_norms(ARMS),
    "cosines of one arm": lambda: figures.plot_cosines({"base": build_trace()}),
    "cosines": lambda: figures.plot_cosines(ARMS),
    "steps": lambda: figures.plot_steps(build_trace()),
    "steps of a deep model": lambda: figures.plot_steps(build_trace(layers=30)),
    "predictions": lambda: figures.plot_predictions(build_trace()),
    "maps": lambda: figures.plot_attention_maps(*build_maps()),
    "maps of one sample": lambda: figures.plot_attention_maps(*build_maps(samples=1), layers=[0, 2]),
    "signal": lambda: figures.plot_signal(build_signal()),
    "signal of a deep model": lambda: figures.plot_signal(build_signal(layers=30)),
    "content": lambda: figures.plot_content(CONTENT),
}


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off_or_covered(name):
    """Panels with their labels and titles, legends and captions lie inside the figure and beside one another."""
    figure = FIGURES[name]()
    with style.in_style():
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
    parts = {f"panel {i}": panel.get_tightbbox(renderer) for i, panel in enumerate(figure.axes)}
    parts |= {f"legend {i}": legend.get_window_extent(renderer) for i, legend in enumerate(figure.legends)}
    captions = [text for sub in figure.findobj(matplotlib.figure.SubFigure) for text in sub.texts]
    parts |= {text.get_text(): text.get_window_extent(renderer) for text in captions}
    for part, box in parts.items():
        assert box.x0 > -1 and box.y0 > -1, f"{part} is cut off on the left or below"
        assert box.x1 < figure.bbox.width + 1 and box.y1 < figure.bbox.height + 1, f"{part} is cut off"
    for (a, first), (b, second) in combinations(parts.items(), 2):
        overlap = np.minimum(first.max, second.max) - np.maximum(first.min, second.min)
        assert (overlap <= 1).any(), f"{a} and {b} overlap"


@pytest.mark.parametrize("name", FIGURES)
def test_every_axis_says_its_unit(name):
    figure = FIGURES[name]()
    for panel in figure.axes:
        if panel.images:  # a picture or a map: its axes are patches, and its label says which
            assert panel.get_xlabel() == "image" or panel.get_xlabel().startswith("layer ")
            continue
        labels = [panel.get_xlabel(), panel.get_ylabel()]
        shared = not panel.yaxis.get_tick_params()["labelleft"] or not panel.get_xlabel()  # or a colour bar
        assert all("[" in label and "]" in label for label in labels if label)
        assert all(labels) or (any(labels) and shared)


def test_curves_are_the_numbers_in_the_house_colours():
    trace = ARMS["gwc"]
    panels = figures.plot_cosines(ARMS).axes
    for panel, modality in zip(panels, MODALITIES, strict=True):
        line = next(line for line in panel.lines if line.get_label() == "gwc")
        np.testing.assert_array_equal(line.get_ydata(), trace.data[modality]["layer_cosine"])
        np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3])
        assert line.get_color() == style.ARM_COLOURS["gwc"]
    (panel,) = figures.plot_norms({"base": trace}).axes
    for line in panel.lines:
        np.testing.assert_array_equal(line.get_ydata(), trace.data[line.get_label()]["state_norm"])
        np.testing.assert_array_equal(line.get_xdata(), np.arange(7) / 2)
        assert line.get_color() == style.MODALITY_COLOURS[line.get_label()]
    panels = figures.plot_predictions(trace).axes
    for panel, key in zip(panels, figures.PREDICTIONS, strict=True):
        line = next(line for line in panel.lines if line.get_label() == "text")
        np.testing.assert_allclose(line.get_xdata(), np.degrees(trace.data["text"][key]))
        np.testing.assert_allclose(line.get_ydata(), np.degrees(trace.data["text"]["turn"]))


def test_signal_is_drawn_in_order_of_the_norm_and_marks_the_trained_one():
    result = build_signal()
    panel = figures.plot_signal(result).axes[0]
    np.testing.assert_array_equal(panel.lines[0].get_xdata(), [5, 20, 80])
    np.testing.assert_array_equal(panel.lines[0].get_ydata(), result["standardised"][[1, 2, 0], 0])
    marks = {line.get_label(): line.get_xdata()[0] for line in panel.lines[L:]}
    assert marks == {"norm of text": 0.5, "visual norm, as trained": 20}


def test_attention_maps_share_one_scale_and_show_each_picture():
    maps, pictures, captions = build_maps()
    panels = [
        panel for panel in figures.plot_attention_maps(maps, pictures, captions, layers=[0, 2]).axes if panel.images
    ]
    for i, sample in enumerate(np.split(np.array(panels, dtype=object), 3)):
        np.testing.assert_array_equal(sample[0].images[0].get_array(), pictures[i].transpose(1, 2, 0))
        for panel, layer in zip(sample[1:], (0, 2), strict=True):
            np.testing.assert_array_equal(panel.images[0].get_array(), maps[i, layer])
            assert panel.images[0].get_clim() == (0, maps[:, [0, 2]].max())
            assert panel.get_xlabel() == f"layer {layer + 1}"
    with pytest.raises(ValueError, match="3 maps, 3 pictures and 2 captions must be as many"):
        figures.plot_attention_maps(maps, pictures, captions[:2])


def test_a_branch_that_does_nothing_can_be_drawn_and_printed():
    """Its angle is NaN, its turn 0 and its update 0, which has no logarithm."""
    trace = build_trace()
    for rows in trace.data.values():
        for key, value in (("update", 0.0), ("update_std", 0.0), ("turn", 0.0), ("angle", np.nan)):
            rows[key][2] = value
        for key in figures.PREDICTIONS:
            rows[key][2] = np.nan
    for figure in (figures.plot_steps(trace), figures.plot_predictions(trace)):
        assert style.png(figure)
    assert " – " in printed(trace)


def printed(trace: Trace) -> str:
    console = Console(file=io.StringIO(), width=80)
    figures.show(trace, console)
    return console.file.getvalue()


def test_tables_fit_a_terminal_and_hold_the_numbers():
    trace = build_trace()
    text = printed(trace)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for modality in MODALITIES:
        assert f"{np.degrees(trace.data[modality]['turn'][3]):.1f}" in text
        assert f"{trace.data[modality]['layer_cosine'][1]:.3f}" in text
    assert "1 attn" in text and "3 mlp" in text and "block" not in text


def test_the_same_figure_gives_the_same_svg():
    first, second = (style.svg(figures.plot_norms(ARMS)) for _ in range(2))
    assert first == second and first.startswith("<svg")
    assert ElementTree.fromstring(first).tag.endswith("svg")
    assert style.png(figures.plot_norms(ARMS)).startswith(b"\x89PNG")


def test_no_global_state_is_left_behind():
    before = dict(matplotlib.rcParams)
    style.svg(figures.plot_steps(build_trace()))
    assert dict(matplotlib.rcParams) == before


# Machado, Oliveira and Fernandes 2009, full severity, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def oklab(linear: np.ndarray) -> np.ndarray:
    """Ottosson's perceptual colour space: equal distances look equally different."""
    lms = np.array(
        [
            [0.41222147, 0.53633254, 0.05144599],
            [0.21190350, 0.68069955, 0.10739696],
            [0.08830246, 0.28171884, 0.62997870],
        ]
    )
    lab = np.array(
        [
            [0.21045426, 0.79361779, -0.00407205],
            [1.97799850, -2.42859221, 0.45059371],
            [0.02590404, 0.78277177, -0.80867577],
        ]
    )
    return lab @ np.cbrt(lms @ linear)


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colours_can_be_told_apart(blindness):
    """Black to white is 1 in Oklab; .02 is about the smallest difference that people see."""
    for palette in (style.MODALITY_COLOURS, style.ARM_COLOURS):
        seen = {}
        for name, colour in palette.items():
            rgb = np.array(to_rgb(colour))
            linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
            seen[name] = oklab(np.clip(BLINDNESS[blindness] @ linear, 0, 1))
        for a, b in combinations(seen, 2):
            assert np.linalg.norm(seen[a] - seen[b]) > 0.05, f"{a} and {b}"
    assert len(set(style.ARM_MARKERS.values())) == len(style.ARM_COLOURS)


def test_an_unknown_arm_has_no_colour():
    with pytest.raises(ValueError, match="arm 'loud' has no colour: the house knows base, default"):
        figures.plot_norms({"base": build_trace(), "loud": build_trace()})


def test_states_lie_half_a_layer_apart():
    x = figures.depths(build_trace(), "state_norm", first=0)
    assert all(b - a == 0.5 for a, b in pairwise(x))


def test_theory_draws_in_the_same_colours():
    """It may not import this package, so it writes them out; so does the explorer."""
    from pathlib import Path

    from theory.report import COLOURS

    assert COLOURS == style.MODALITY_COLOURS
    page = (Path(__file__).parents[1] / "docs" / "explorer.html").read_text()
    assert all(f"--{modality}: {colour};" in page for modality, colour in COLOURS.items())
