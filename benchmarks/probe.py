"""What the probe adds to a plain forward pass of a Hugging Face model, and that its memory does not grow with pictures.

    python benchmarks/probe.py [--width 1024] [--layers 12] [--rounds 7]

A LLaVA with random weights in float32, as many visual tokens as LLaVA-1.5 has (576), one picture and a short prompt.
Plain and probed passes take turns in one process; the ratio of their medians is the result. The share is smaller for
wider models: a forward pass costs D² a token, norms and angles cost D.
"""

import argparse
import resource
import time
from statistics import median

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from minillava import hf
from minillava.probe import trace_observations


def build(width: int, layers: int) -> tuple[LlavaForConditionalGeneration, dict[str, torch.Tensor]]:
    vision = CLIPVisionConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=336,
        patch_size=14,
    )
    text = LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
    )
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=999))
    ids = torch.tensor([[1] + [999] * 576 + list(range(2, 34))])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 3, 336, 336)}
    return model.eval(), inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model, inputs = build(arguments.width, arguments.layers)
    parts = hf.find_parts(model)

    def plain() -> None:
        with torch.no_grad():
            model(**inputs, use_cache=False, logits_to_keep=1)

    def probed() -> None:
        trace_observations([hf.observe(model, parts, inputs).observation])

    seconds: dict[str, list[float]] = {"plain": [], "probed": []}
    for function in (plain, probed):
        function()
    for _ in range(arguments.rounds):
        for name, function in (("plain", plain), ("probed", probed)):
            start = time.process_time()  # of this process alone: others on the machine do not count
            function()
            seconds[name].append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace_observations(hf.observe(model, parts, inputs).observation for _ in range(10))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    ratio = median(seconds["probed"]) / median(seconds["plain"])
    print(f"plain {median(seconds['plain']):.2f} s, probed {median(seconds['probed']):.2f} s of CPU: {ratio - 1:+.1%}")
    print(f"memory after ten more pictures: {grown / 2**10:+.0f} MiB on a peak of {peak / 2**10:.0f} MiB")


if __name__ == "__main__":
    main()
