"""What the chunks of the logprob head save: `python tests/bench_memory.py` (CPU, minutes).

Qwen3's vocabulary, hidden 512, float32, one thread. Every measurement is a process of its own: CPU
seconds, and the peak of its memory beyond what it held before and what the head's gradient takes.
The plain way's grows with the tokens; ours may not, beyond one chunk (2,048 tokens). The logits
are computed twice: 4/3 of the plain way's work.
"""

import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo_ba import Response, response_logprobs

V, H, TEMPERATURE = 151_936, 512, 0.7


def backward(tokens, chunked):
    """Of the logprobs' weighted sum, with a model whose body gives the same hidden states to any
    input. Returns the gradients' first values, seconds, and bytes beyond the head's gradient."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden, head = torch.randn(1, tokens + 1, H).requires_grad_(), torch.nn.Linear(H, V, bias=False)
    response = Response(torch.zeros(1).long(), torch.randint(V, (tokens,)), torch.zeros(tokens))
    model = SimpleNamespace(
        device=torch.device("cpu"), get_output_embeddings=lambda: head,
        base_model=lambda **_: SimpleNamespace(last_hidden_state=hidden),
    )  # fmt: skip
    peak, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    if chunked:
        logprobs = response_logprobs(model, [response], TEMPERATURE)
    else:
        logits = F.linear(hidden[0, :-1], head.weight) / TEMPERATURE
        logprobs = -F.cross_entropy(logits, response.ids, reduction="none")
    (logprobs * torch.linspace(-1, 1, tokens)).sum().backward()
    seconds = time.process_time() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 - 4 * V * H
    return torch.cat([hidden.grad[0], head.weight.grad[:1000]]), seconds, peak


def in_a_process(*args):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(backward, *args).result()


def main():
    print(f"{'tokens':>8}{'plain':>11}{'chunked':>11}{'ratio':>8}{'CPU seconds':>21}{'ratio':>8}")
    for tokens in (1024, 2048, 4096):
        plain, seconds, peak = in_a_process(tokens, False)
        ours, our_seconds, our_peak = in_a_process(tokens, True)
        print(f"{tokens:8,}{peak / 1e6:8,.0f} MB{our_peak / 1e6:8,.0f} MB{our_peak / peak:8.3f}"
              f"{seconds:11.1f}{our_seconds:10.1f}{our_seconds / seconds:8.2f}"
              f"   gradients differ by {((ours - plain).norm() / plain.norm()).item():.0e}",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
