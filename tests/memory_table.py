"""The README's memory table, from the same function that checks a run's plan at start-up:

python tests/memory_table.py
"""

import contextlib
import io
import sys
from pathlib import Path

from transformers import Qwen2Config, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo_ba import check_memory, memory_plan, parse

MODELS = {  # as in the hub's config.json
    "Qwen3-1.7B": Qwen3Config(
        vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "Qwen2.5-Math-7B": Qwen2Config(
        vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
    ),
}  # fmt: skip
GPUS = {"1 x 24 GB": (1, 23.6), "1 x 80 GB": (1, 79.2), "8 x 80 GB": (8, 79.2)}  # count, GiB each


def verdict(config, model_config, world, gpu_gib, use_vllm=True):
    """What the start-up check says: nothing, or why not."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        try:
            check_memory(config, model_config, world, gpu_gib, use_vllm)
        except SystemExit:
            return stderr.getvalue().strip().partition(" GiB the ")[2]
    return "fits"


def main():
    print(
        "| model | GPUs | parameters | gradients | optimizer | activations | update | vLLM's share | |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, model_config in MODELS.items():
        config = parse(["--preset", f"{name.lower()}-dapo"])
        for gpus, (world, gpu_gib) in GPUS.items():
            plan = memory_plan(config, model_config, world)
            del plan["vLLM weights"], plan["KV cache"]
            parts = [*plan.values(), sum(plan.values()) + 2, config.vllm_memory * gpu_gib]
            print(f"| {name} | {gpus} | " + " | ".join(f"{part:.1f}" for part in parts)
                  + f" | {verdict(config, model_config, world, gpu_gib)} |")  # fmt: skip


if __name__ == "__main__":
    main()
