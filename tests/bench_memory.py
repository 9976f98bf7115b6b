"""What the chunked logprob head saves: `python tests/bench_memory.py [chunk]` (CPU, minutes).

Qwen3's vocabulary, hidden 512, float32, one thread. Every measurement is a process of its own: the
peak of its resident memory above what it held before and what the head's own gradient takes, and
CPU seconds. Demanded (issue 3): at 4,096 tokens at most 1/6 of the plain way's peak, flat as tokens
grow, at most 1.4 times its time, gradients equal to 1e-5.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo_ba import Config, Response, response_logprobs

V, H, TEMPERATURE = 151_936, 512, 0.7


class HeadOnly:
    """A model whose body gives the same hidden states to any input."""

    device = torch.device("cpu")

    def __init__(self, tokens):
        torch.manual_seed(0)
        self.hidden = torch.randn(1, tokens + 1, H).requires_grad_()
        self.head = torch.nn.Linear(H, V, bias=False)
        self.response = Response(
            torch.zeros(1, dtype=torch.long), torch.randint(V, (tokens,)), torch.zeros(tokens), ""
        )

    def base_model(self, **_):
        return SimpleNamespace(last_hidden_state=self.hidden)

    def get_output_embeddings(self):
        return self.head

    def backward(self, chunk):
        logprobs, _ = response_logprobs(self, [self.response], TEMPERATURE, chunk)
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()

    def gradients(self, chunk):
        self.hidden.grad = self.head.weight.grad = None
        self.backward(chunk)
        return torch.cat([self.hidden.grad.flatten(), self.head.weight.grad.flatten()])


def memory(field):
    """Resident bytes of this process: VmRSS now, VmHWM at most since the last clear_refs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def measure(tokens, chunk):
    torch.set_num_threads(1)
    HeadOnly(16).backward(chunk)  # first calls load libraries
    model = HeadOnly(tokens)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: man proc
    before, start = memory("VmRSS"), time.process_time()
    model.backward(chunk)
    seconds = time.process_time() - start
    return {"bytes": memory("VmHWM") - before - 4 * V * H, "seconds": seconds}


def in_a_process(tokens, chunk):
    command = [sys.executable, __file__, str(tokens), str(chunk)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(chunk):
    print(f"V = {V:,}, hidden {H}; peak beyond the head's gradient, all at once and by {chunk}")
    print(f"{'tokens':>8}{'plain':>11}{'chunked':>11}{'ratio':>8}{'CPU seconds':>21}{'ratio':>8}")
    for tokens in (1024, 2048, 4096):
        plain, chunked = in_a_process(tokens, 0), in_a_process(tokens, chunk)
        print(
            f"{tokens:8,}{plain['bytes'] / 1e6:8,.0f} MB{chunked['bytes'] / 1e6:8,.0f} MB"
            f"{chunked['bytes'] / plain['bytes']:8.3f}{plain['seconds']:11.1f}"
            f"{chunked['seconds']:10.1f}{chunked['seconds'] / plain['seconds']:8.2f}",
            flush=True,
        )
    model = HeadOnly(1024)
    plain, chunked = model.gradients(0), model.gradients(chunk)
    print(f"gradients: relative difference {((chunked - plain).norm() / plain.norm()).item():.1e}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
    else:
        main(int(sys.argv[1]) if len(sys.argv) == 2 else Config().logprob_chunk)
