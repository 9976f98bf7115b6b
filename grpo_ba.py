"""GRPO with Balanced Aggregation (Zeng et al., arXiv:2605.04077), in one file.

GRPO samples G responses per prompt, scores each with a verifier, normalises the rewards within
the group into advantages, and averages the clipped token losses. HOW the tokens are averaged is
the paper's subject. For one group, with l[i,t] the loss of token t of response i, |o_i| its
length, and k the number of responses with a positive advantage:

    sequence (GRPO)   1/G * sum_i 1/|o_i| * sum_t l[i,t]        every response weighs the same
    token    (DAPO)   1/sum_i |o_i| * sum_i sum_t l[i,t]        every token weighs the same
    balanced (BA)     k/G * mean of l over the tokens of positive responses
                      + (G-k)/G * mean of l over the tokens of negative responses

Run it:

    python grpo_ba.py                                  # laptop: a toy policy, two minutes
    python grpo_ba.py --aggregation all                # the three rules side by side, one picture
    python grpo_ba.py --model DIR --train_data FILE.jsonl --eval_data FILE.jsonl
    python grpo_ba.py                                  # one GPU: Qwen3-1.7B on DAPO-Math-17k
    torchrun --nproc-per-node 8 grpo_ba.py             # one node, eight GPUs

Left out on purpose: KL penalty and reference model, reward models, dynamic sampling, overlong
penalties, LoRA, FSDP and tensor parallelism, asynchronous rollouts, more than one node.
Read from top to bottom: nothing is used before the section that explains it.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import time
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers as hf
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from verify import Verifier, fail, normalise, parse_tests

# ----------------------------------------------------------------------------------------
# 1. Config: every knob with one line of help; `--preset` names a set of flags, and the flags given
#    override it. Sizes: P prompts, G responses per prompt, B = P*G responses, T tokens.


def arg(default, text, choices=None):
    return field(
        default=default, metadata={"help": text, "choices": choices} if choices else {"help": text}
    )


@dataclass
class Config:
    # what to run
    preset: str = arg("", "named settings: toy, small, qwen3-1.7b-dapo ... (default: by hardware)")
    name: str = arg("", "the run's folder is runs/NAME (default: made from the settings)")
    resume: str = arg("", "continue the run in this folder, from its last checkpoint")
    seed: int = arg(0, "seed of data order, sampling, evaluation, and of the toy's warm-up")
    report_to: str = arg("", "mirror the metrics to: tensorboard, wandb, or both with a comma")
    # model and data
    model: str = arg("", "transformers checkpoint, folder or hub id (preset toy makes its own)")
    train_data: str = arg("", "problems: .jsonl/.json/.parquet/.arrow file or hub id[:config]")
    eval_data: str = arg("", "held-out problems: a file, hub id or eval.py benchmark; empty: none")
    exclude_data: str = arg("", "more evaluation sets, comma-separated, to keep out of training")
    instruction: str = arg(
        "suffix", "where the boxed instruction goes", ["suffix", "system", "none"]
    )
    enable_thinking: bool = arg(False, "let Qwen3's chat template open a <think> block")
    max_prompt_tokens: int = arg(1024, "longer prompts are dropped and counted")
    max_response_tokens: int = arg(128, "a response is cut here (finish reason: length)")
    # the method
    aggregation: str = arg("balanced", "sequence, token, balanced, or all to compare the three")
    prompts_per_step: int = arg(4, "P, prompts per rollout")
    group_size: int = arg(8, "G, responses per prompt")
    minibatches: int = arg(1, "optimizer steps per rollout and epoch, of P/minibatches groups each")
    epochs: int = arg(1, "passes over each rollout")
    normalize_std: bool = arg(True, "divide advantages by the group's standard deviation")
    clip_low: float = arg(0.2, "the ratio is clipped below at 1 - clip_low")
    clip_high: float = arg(0.28, "the ratio is clipped above at 1 + clip_high (DAPO's clip-higher)")
    tis_cap: float = arg(2.0, "truncated importance sampling, trainer over engine; 0: off")
    temperature: float = arg(1.0, "sampling temperature, of the trainer's logprobs too")
    # the optimizer
    steps: int = arg(100, "rollouts to train on")
    lr: float = arg(1e-6, "AdamW learning rate, constant after the warm-up")
    lr_warmup_steps: int = arg(0, "steps of linear learning-rate warm-up")
    weight_decay: float = arg(0.0, "AdamW weight decay")
    max_grad_norm: float = arg(1.0, "gradients are clipped to this norm")
    # evaluation and checkpoints
    eval_every: int = arg(10, "evaluate before every so many steps, and at the end")
    eval_problems: int = arg(256, "held-out problems per evaluation, one response each")
    save_every: int = arg(10, "checkpoint every so many steps, and at the end")
    # the machine
    engine: str = arg("auto", "who samples; auto: vllm with CUDA", ["auto", "vllm", "transformers"])
    vllm_memory: float = arg(0.4, "share of the GPU that vLLM may take while it samples")
    rollout_rows: int = arg(256, "rows that the transformers engine decodes at once")
    micro_batch_tokens: int = arg(
        4096, "padded tokens per forward pass; never changes the gradient"
    )
    logprob_chunk: int = arg(512, "tokens per chunk of the V-wide logits; 0: all at once")
    gradient_checkpointing: bool = arg(False, "recompute activations in the backward pass")
    zero: bool = arg(False, "shard the optimizer state over the ranks (ZeRO-1)")
    # the toy
    toy_world: str = arg("rambler", "the toy's world", ["rambler", "guesser"])
    toy_seeds: int = arg(1, "seeds per rule with --aggregation all")
    cache_dir: str = arg("~/.cache/grpo_ba", "where the warmed-up toy policy is kept")


# Presets are flags. The paper's own batch and length settings are not public to us: these are the
# field's (README has a table of what is whose).
GPU = (
    "--max_prompt_tokens 1024 --prompts_per_step 128 --group_size 8 --minibatches 4 --steps 400 "
    "--lr 1e-6 --eval_data math500 --exclude_data aime24,aime25,math500,olympiadbench,minerva_math "
    "--eval_every 20 --save_every 20 --gradient_checkpointing "
)
QWEN3 = GPU + "--model Qwen/Qwen3-1.7B --max_response_tokens 8192 --micro_batch_tokens 32768 "
QWEN25 = GPU + (
    "--model Qwen/Qwen2.5-Math-7B --instruction system --max_response_tokens 3072 --zero "
    "--micro_batch_tokens 8192 "
)
DAPO = "--train_data open-r1/DAPO-Math-17k-Processed:all"
POLARIS = "--train_data POLARIS-Project/Polaris-Dataset-53K"
PRESETS = {
    "toy": "--max_prompt_tokens 64 --max_response_tokens 200 --prompts_per_step 8 --minibatches 2 "
    "--steps 40 --lr 2e-4 --eval_every 4 --save_every 4 --micro_batch_tokens 1024 --logprob_chunk 0 "
    "--instruction none",
    "small": "--steps 20 --lr 5e-6 --eval_every 5 --eval_problems 32 --save_every 5",
    "qwen3-1.7b-dapo": QWEN3 + DAPO,
    "qwen3-1.7b-polaris": QWEN3 + POLARIS,
    "qwen2.5-math-7b-dapo": QWEN25 + DAPO,
    "qwen2.5-math-7b-polaris": QWEN25 + POLARIS,
}
FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}


def check(c):
    """Refuses what cannot work, before anything is loaded."""
    counts = "prompts_per_step minibatches epochs steps eval_every eval_problems save_every "
    counts += "toy_seeds max_prompt_tokens max_response_tokens rollout_rows"
    for words, least, bound, names in (
        ("at least 2", 2, math.inf, "group_size"),
        ("at least 1", 1, math.inf, counts),
        ("0 or more, and finite", 0, math.inf, "lr weight_decay tis_cap"),
        ("0 or more, and less than 2**63", 0, 2**63, "seed lr_warmup_steps logprob_chunk"),
        ("more than 0, and finite", 1e-9, math.inf, "temperature max_grad_norm clip_high"),
        ("between 0 and 1", 1e-9, 1, "clip_low vllm_memory"),
    ):
        for name in names.split():
            if not least <= getattr(c, name) < bound:
                fail(f"--{name} {getattr(c, name)}: must be {words}")
    if c.aggregation not in (*AGGREGATIONS, "all"):
        fail(f"--aggregation {c.aggregation}: unknown; choose {', '.join(AGGREGATIONS)} or all")
    world, longest = world_size(), c.max_prompt_tokens + c.max_response_tokens
    if c.prompts_per_step % (c.minibatches * world):
        fail(f"--prompts_per_step {c.prompts_per_step}: must be a multiple of minibatches x ranks "
             f"= {c.minibatches} x {world}; a minibatch is whole groups, as many on each rank")  # fmt: skip
    if c.rollout_rows < c.group_size:
        fail(f"--rollout_rows {c.rollout_rows}: must be at least group_size = {c.group_size}, since "
             "the responses to one prompt share its prefill")  # fmt: skip
    if c.micro_batch_tokens < longest:
        fail(f"--micro_batch_tokens {c.micro_batch_tokens}: must be at least {longest}, since one "
             "row can have max_prompt_tokens + max_response_tokens")  # fmt: skip
    if bool(c.model) != bool(c.train_data):
        fail("--model and --train_data belong together: give both, or neither for the toy")
    for name in ("train_data", "eval_data"):
        path = Path(getattr(c, name))
        if path.suffix in FILE_FORMATS and not path.is_file():
            fail(f"--{name} {path}: there is no such file; give one that exists")
    check_engine(c.engine)
    for tool in filter(None, c.report_to.split(",")):
        if tool not in ("tensorboard", "wandb"):
            fail(f"--report_to {tool}: unknown; choose tensorboard, wandb, or both with a comma")
        if not importlib.util.find_spec(tool):
            fail(f"--report_to {tool}: not installed; pip install {tool}, or leave the flag out")
    odd = Path(c.name).name != c.name or len(c.name.encode()) > 200 or Path("runs", c.name).exists()
    if c.name and not c.resume and odd:
        fail(f"--name {c.name}: must be a new folder name in runs/; choose another, or --resume it")
    if c.aggregation == "all" and (world > 1 or c.resume or c.name):
        fail("--aggregation all: names its own runs, in one process; leave out --name and --resume")


def check_engine(kind):
    if kind == "vllm" and not importlib.util.find_spec("vllm"):
        fail("--engine vllm: not installed; pip install -r requirements.txt vllm==0.32.0")


def world_size():
    return int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun


def print0(*args):
    """Prints on rank 0 only, above any progress bar."""
    if int(os.environ.get("RANK", "0")) == 0:
        tqdm.write(" ".join(map(str, args)))


# ----------------------------------------------------------------------------------------
# 2. Prompts: data sets become a list of problems {"problem", "answer"} or, for code,
#    {"problem", "tests", "func_name"}; a chat template turns a problem into token ids, once.

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."  # Qwen's words
DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'


def read_rows(source, split="train", revision=None):
    """Rows and column names of a local file or of a hub data set `id[:config]`."""
    suffix, number = Path(source).suffix, 0
    try:
        if suffix == ".jsonl":  # not through arrow, which refuses answers of mixed types
            lines = Path(source).read_text(encoding="utf-8-sig").split("\n")  # U+2028 ends no line
            rows = []
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(json.loads(line))
                    if not isinstance(rows[-1], dict):
                        raise ValueError("not a JSON object")
            return rows, set().union(*(row.keys() for row in rows))
        from datasets import load_dataset

        if suffix in FILE_FORMATS:
            data = load_dataset(FILE_FORMATS[suffix], data_files=source, split="train")
        else:
            hub_id, _, name = source.partition(":")
            data = load_dataset(hub_id, name or None, split=split, revision=revision)
    except Exception as error:  # noqa: BLE001 - datasets raises a dozen kinds; all mean this
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        reason = f"line {number}: {reason}" if isinstance(error, ValueError) and number else reason
        fail(f"data {source}: cannot be read ({reason}); give a local .jsonl, .json, .parquet or "
             ".arrow file with columns problem and answer (eval.py: --data DIR), or a hub id that "
             "can be reached")  # fmt: skip
    return data, set(data.column_names)


def load_problems(source, excluded=frozenset()):
    """Problems of one data set: each text once, with one verifiable answer, in file order.

    Schemas: `problem`/`answer` (POLARIS-53K and ours; `tests` instead of `answer` for code),
    open-r1/DAPO-Math-17k-Processed (`prompt`/`solution`), BytedTsinghua-SIA/DAPO-Math-17k (chat
    `prompt`/`reward_model`; its 1.79 M rows repeat about 17.4 k problems, DAPO issue #36).
    """
    rows, columns = read_rows(source)
    found, untouched = {}, 0  # problem text -> the different rows with it, in file order
    for number, row in enumerate(rows, start=1):
        text = row.get("problem")
        if "problem" in columns and columns & {"answer", "tests"}:
            keys = ("tests", "func_name") if row.get("tests") else ("answer",)
            row = {key: row.get(key) for key in keys}
        elif {"prompt", "solution"} <= columns:
            text, row = row.get("prompt"), {"answer": row.get("solution")}
        elif {"prompt", "reward_model"} <= columns:
            try:
                whole = row["prompt"][-1]["content"]
                row = {"answer": row["reward_model"]["ground_truth"]}
            except (KeyError, IndexError, TypeError):
                fail(f"data {source}: row {number} lacks DAPO-Math-17k's prompt messages or "
                     "reward_model.ground_truth; mend or drop it")  # fmt: skip
            # Not lstrip, which takes a SET of characters and eats into the problem.
            text = whole.removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX)
            untouched += text == whole
        else:
            fail(f"data {source}: the columns are {sorted(columns)}; needed are problem and answer "
                 "(or tests), or one of the two DAPO-Math-17k forms")  # fmt: skip
        if not isinstance(text or "", str):
            fail(f"data {source}: the problem of row {number} is not text but {str(text)[:60]}")
        if "answer" in row:
            row["answer"] = gold_text(row["answer"])
        text = (text or "").strip().encode("utf-8", "replace").decode()  # JSON may hold surrogates
        same_text = found.setdefault(text, [])
        if row not in same_text:
            same_text.append(row)
    problems, dropped = [], Counter()
    for text, same_text in found.items():
        if len(same_text) > 1:
            dropped["with conflicting answers"] += 1
        elif not text or not is_verifiable(same_text[0]):
            dropped["without a verifiable answer"] += 1
        elif " ".join(text.split()) in excluded:
            dropped["in an evaluation set"] += 1
        else:
            problems.append({"problem": text, **same_text[0]})
    dropped["repeated rows"] = len(rows) - len(found)
    dropped["without DAPO's instruction, kept whole"] = untouched
    counts = ", ".join(f"{n:,} {what}" for what, n in dropped.items() if n)
    print0(f"{source}: {len(rows):,} rows, {len(problems):,} problems ({counts or 'none dropped'})")
    if not problems:
        fail(f"data {source}: no usable problem is left of {len(rows):,} rows ({counts})")
    return problems


def gold_text(gold):
    """A gold is text, or a list of texts of which any is right."""
    if isinstance(gold, list):
        return [gold_text(one) for one in gold]
    return "" if gold is None else str(gold).strip()


def is_verifiable(row):
    """Something a rule can check: not empty, and no essay (POLARIS keeps some proof tasks)."""
    if "tests" in row:
        try:
            return bool(parse_tests(row["tests"], row["func_name"]))
        except ValueError:
            return False
    golds = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    short = all(len(g) <= 300 and len(g.split()) <= 20 and normalise(g) for g in golds)
    return bool(golds) and short


def load_tokenizer(path):
    tokenizer = load_from_hub(hf.AutoTokenizer, path)
    if not tokenizer.chat_template:
        fail(f"--model {path}: its tokenizer has no chat template, so no prompt can be built")
    return tokenizer


def load_from_hub(cls, path, **kwargs):
    try:
        return cls.from_pretrained(os.path.expanduser(path), **kwargs)
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).splitlines()[0][:200]
        fail(f"--model {path}: cannot be loaded ({reason}); give --model the folder of a transformers "
             "checkpoint (and --train_data or --data local files), or hub ids that can be reached")  # fmt: skip


def encode_prompt(tokenizer, problem, instruction="suffix", enable_thinking=False):
    """Token ids of one prompt; eval.py uses the same function, so training and evaluation agree.

    problem: text, put into one user message with Qwen's boxed instruction where `instruction`
    says; or ready chat messages, used as they are.
    """
    messages = problem
    if isinstance(problem, str):
        text = f"{problem}\n{BOXED}" if instruction == "suffix" else problem
        messages = [{"role": "user", "content": text}]
        if instruction == "system":
            messages.insert(0, {"role": "system", "content": BOXED})
    # Without thinking, Qwen3's template pre-fills an empty think block (transformers#37949).
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=enable_thinking, return_dict=False
    )


def encode_problems(problems, tokenizer, config):
    """Adds `prompt_ids` to each problem; prompts over max_prompt_tokens are dropped and counted."""
    for problem in problems:
        instruction = "none" if "tests" in problem else config.instruction
        problem["prompt_ids"] = encode_prompt(
            tokenizer, problem["problem"], instruction, config.enable_thinking
        )
    kept = [p for p in problems if len(p["prompt_ids"]) <= config.max_prompt_tokens]
    if len(kept) < len(problems):
        limit = config.max_prompt_tokens
        print0(f"dropped {len(problems) - len(kept):,} prompts of more than {limit} tokens")
    if not kept:
        fail(f"--max_prompt_tokens {config.max_prompt_tokens}: no prompt is that short; raise it")
    return kept


# ----------------------------------------------------------------------------------------
# 3. Rollout: two engines with one interface. Prompts go in as token ids and the sampled ids are
#    kept, so no text is ever tokenised twice; every sampling field is explicit, so no checkpoint's
#    generation_config can change the policy (trl#6789).


@dataclass(frozen=True)
class Sampling:
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0  # training must keep 1, -1 and 0: else the logprobs are another policy's
    top_k: int = -1
    min_p: float = 0.0


@dataclass
class Response:
    prompt_ids: torch.Tensor  # [prompt tokens]
    ids: torch.Tensor  # [|o|], the stop token included: it is a token like any other
    logprobs: torch.Tensor  # [|o|], under the distribution it was sampled from
    finish_reason: str  # "stop", or "length" when cut at max_tokens


def sample_seed(*key):
    """A seed from what is sampled - (seed, step, prompt, response) - and not from where: the
    rollout is the same on any number of ranks, and a resumed run repeats it."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "big") >> 1


def stop_token_ids(path, tokenizer):
    """All tokens that end a response. Qwen3 has two, and the tokenizer names only one."""
    try:
        stops = hf.GenerationConfig.from_pretrained(os.path.expanduser(path)).eos_token_id
    except OSError:  # a checkpoint need not have generation_config.json
        stops = None
    stops = set(stops if isinstance(stops, list) else [stops]) | {tokenizer.eos_token_id}
    vocabulary = tokenizer.get_vocab()
    stops |= {vocabulary.get(token) for token in ("<|im_end|>", "<|endoftext|>")}
    return sorted(stops - {None})


class TransformersEngine:
    """Samples from the trainer's own model: batched, with a KV cache, finished rows dropped."""

    def __init__(self, model, stop_ids, rows=256):
        self.model, self.rows = model, rows
        self.stops = torch.tensor(stop_ids, device=model.device)

    def load_weights(self, model):
        """Nothing to push: it samples from the model that is trained."""

    def sleep(self):
        """Nothing to release: the KV cache goes with each call."""

    @torch.no_grad()
    def generate(self, prompts, n, sampling, seeds, progress=""):
        """n responses to each prompt, prompt by prompt: list of len(prompts) * n Responses.

        prompts: lists of token ids; seeds: one per response. A response depends on the weights,
        its prompt and its seed, not on its neighbours in the batch.
        """
        self.model.eval()
        at_once, responses = max(1, self.rows // n), []
        for start in range(0, len(prompts), at_once):
            some = prompts[start : start + at_once]
            some_seeds = seeds[start * n : (start + at_once) * n]
            bar = tqdm(total=sampling.max_tokens, desc=progress, leave=False, delay=2, unit="tok",
                       disable=not progress)  # fmt: skip
            responses += self._generate(some, n, sampling, some_seeds, bar)
            bar.close()
        return responses

    def _generate(self, prompts, n, sampling, seeds, bar):
        model, device = self.model, self.model.device
        filters = sampling_filters(sampling)
        # All the randomness of a response up front, from its own generator: [B, max_tokens].
        uniforms = torch.stack([
            torch.rand(sampling.max_tokens, generator=torch.Generator().manual_seed(seed))
            for seed in seeds
        ]).to(device)  # fmt: skip
        ids = torch.zeros(len(seeds), sampling.max_tokens, dtype=torch.long, device=device)
        logprobs = torch.zeros(len(seeds), sampling.max_tokens, device=device)
        lengths = torch.zeros(len(seeds), dtype=torch.long)
        # Prefill each prompt once, padded on the left, then copy its cache n times.
        padded = [torch.tensor(prompt) for prompt in prompts]
        mask = pad_sequence([torch.ones_like(p) for p in padded], True, 0, "left").to(device)
        padded = pad_sequence(padded, True, 0, "left").to(device)  # any id will do: it is masked
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        output = model(input_ids=padded, attention_mask=mask, position_ids=positions,
                       use_cache=True, logits_to_keep=1)  # fmt: skip
        cache, logits = output.past_key_values, output.logits[:, -1].repeat_interleave(n, dim=0)
        cache.batch_repeat_interleave(n)
        mask = mask.repeat_interleave(n, dim=0)
        position = positions[:, -1:].repeat_interleave(n, dim=0)
        rows = torch.arange(len(seeds), device=device)  # the rows still being written
        for t in range(sampling.max_tokens):
            bar.update()
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            logp = filters(None, logits / sampling.temperature).log_softmax(dim=-1)  # [rows, V]
            # Inverse CDF: the first token at which the cumulative probability passes u.
            cdf = logp.double().exp().cumsum(dim=-1)
            u = uniforms[rows, t].double()[:, None] * cdf[:, -1:]
            token = torch.searchsorted(cdf, u, right=True).clamp(max=cdf.shape[1] - 1)  # [rows, 1]
            ids[rows, t] = token[:, 0]
            logprobs[rows, t] = logp.gather(1, token)[:, 0].float()
            going_on = ~torch.isin(token[:, 0], self.stops)
            if not going_on.all():
                lengths[rows[~going_on].cpu()] = t + 1
                rows, token, mask = rows[going_on], token[going_on], mask[going_on]
                position = position[going_on]
                if len(rows) == 0:
                    break
                cache.batch_select_indices(going_on.nonzero()[:, 0])
            if t + 1 < sampling.max_tokens:
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
                position = position + 1
                output = model(input_ids=token, attention_mask=mask, position_ids=position,
                               past_key_values=cache, use_cache=True)  # fmt: skip
                logits = output.logits[:, -1]
        reasons = ["length" if length == 0 else "stop" for length in lengths]
        lengths[rows.cpu()] = sampling.max_tokens  # who is still writing is cut off
        ids, logprobs = ids.cpu(), logprobs.cpu()
        return [
            Response(torch.tensor(prompts[i // n]), ids[i, :length], logprobs[i, :length], reason)
            for i, (length, reason) in enumerate(zip(lengths.tolist(), reasons))
        ]


def sampling_filters(sampling):
    """top-k, top-p and min-p, in vLLM's order; training uses none of them."""
    filters = hf.LogitsProcessorList()
    if sampling.min_p > 0:
        filters.append(hf.MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        filters.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        filters.append(hf.TopPLogitsWarper(sampling.top_p))
    return filters


class VLLMEngine:
    """vLLM in this very process and on this very GPU: asleep while the trainer works."""

    def __init__(self, path, stop_ids, max_model_len, dtype, memory_share=0.4, seed=0):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in process: weights are handed over
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, where there is no GPU
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm

        self.vllm, self.stop_ids, cuda = vllm, stop_ids, torch.cuda.is_available()
        self.llm = vllm.LLM(
            model=os.path.expanduser(path),
            dtype=dtype,
            seed=seed,
            max_model_len=max_model_len,
            gpu_memory_utilization=memory_share,
            enable_sleep_mode=cuda,
            enforce_eager=not cuda,  # CUDA graphs are worth their memory; a CPU has none
            enable_chunked_prefill=cuda,  # a CPU generator cannot take back a chunk's draw
            generation_config="vllm",  # not the checkpoint's sampling defaults
            logprobs_mode="processed_logprobs",  # after temperature: of the policy that samples
            distributed_executor_backend="external_launcher" if world_size() > 1 else None,
        )

    def load_weights(self, model):
        """Wakes up and takes over the trainer's weights, in memory. Weights first and KV cache
        last, or both models and the cache would be there at once (vllm#15254). A tied lm_head goes
        by both its names: a CPU keeps a repacked copy of it, which would stay as it was. Old
        prefixes are forgotten: they are another policy's."""
        self.llm.wake_up(tags=["weights"])  # frees torch's cached memory first
        weights = iter(model.state_dict().items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()

    def sleep(self):
        """Drops weights and KV cache; load_weights brings them back. (A CPU frees nothing, but goes
        through the same motions.)"""
        self.llm.sleep(level=2)

    def generate(self, prompts, n, sampling, seeds, progress=""):
        """As TransformersEngine.generate."""
        params = [
            self.vllm.SamplingParams(
                seed=seed, temperature=sampling.temperature, top_p=sampling.top_p,
                top_k=sampling.top_k, min_p=sampling.min_p, max_tokens=sampling.max_tokens,
                repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
                stop_token_ids=self.stop_ids, logprobs=0, flat_logprobs=True, detokenize=False,
            )
            for seed in seeds
        ]  # fmt: skip
        repeated = [prompt for prompt in prompts for _ in range(n)]  # prefix caching shares them
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in repeated],
            params,
            use_tqdm=partial(tqdm, leave=False, delay=2) if progress else False,
        )
        sampled = [output.outputs[0] for output in outputs]  # in the order of the prompts
        return [
            Response(torch.tensor(prompt), torch.tensor(one.token_ids),
                     torch.tensor(one.logprobs.logprobs), one.finish_reason)
            for prompt, one in zip(repeated, sampled)
        ]  # fmt: skip


def pick_engine(kind):
    """`auto` means vLLM where there is CUDA and vLLM is installed, else transformers."""
    if kind != "auto" or not torch.cuda.is_available():
        return "transformers" if kind == "auto" else kind
    if importlib.util.find_spec("vllm"):
        return "vllm"
    print0("vLLM is not installed: sampling with transformers, which is many times slower")
    return "transformers"


# ----------------------------------------------------------------------------------------
# 4. Reward: verify.py's workers say 1 or 0 for each response.


def score(verifier, tokenizer, responses, problems):
    """responses: B = P*G, prompt by prompt; problems: P. Returns rewards [P, G] and the texts."""
    texts = [tokenizer.decode(r.ids, skip_special_tokens=True) for r in responses]
    G = len(responses) // max(1, len(problems))
    verdicts = verifier.score(texts, [problem for problem in problems for _ in range(G)])
    return torch.tensor([verdict.reward for verdict in verdicts]).view(len(problems), G), texts


# ----------------------------------------------------------------------------------------
# 5. Advantage: how much better than its group a response did. One number per response.


def group_advantages(rewards, normalize_std=True, eps=1e-6):
    """rewards [P, G] -> advantages [P, G]: (r - mean) / (std + eps) within each group.

    The standard deviation is the population's (ddof 0). TRL and verl use ddof 1, which scales a
    whole group by sqrt((G-1)/G): the same factor for every rule, and for every group of one size.
    A group without spread gets exactly 0, and so does a reward that is its group's mean: the mean
    may be off by a rounding error, which must neither be blown up by a tiny standard deviation
    (NeMo-RL#4161) nor have a sign.
    """
    deviations = rewards - rewards.mean(dim=1, keepdim=True)
    spread = rewards.amax(dim=1, keepdim=True) - rewards.amin(dim=1, keepdim=True)
    deviations = torch.where((deviations.abs() > 1e-5 * spread) & (spread > 0), deviations, 0.0)
    if normalize_std:
        return deviations / (rewards.std(dim=1, correction=0, keepdim=True) + eps)
    return deviations


# ----------------------------------------------------------------------------------------
# 6. Aggregation: the paper. A rule is one number per response: the weight that each of its tokens
#    carries within its group. Group loss = sum_i w_i * sum_t l[i,t]; batch loss = mean over groups.
#    The weights are computed once, over whole groups: nothing below may rescale them. To try a
#    rule of your own, write a fourth function and add it to AGGREGATIONS.


def sequence(advantages, lengths):
    """GRPO:  1/G * sum_i 1/|o_i| * sum_t l[i,t]"""
    G = lengths.shape[1]
    return 1 / (G * lengths.clamp(min=1))  # a response without tokens has nothing to weigh


def token(advantages, lengths):
    """DAPO, over the group as its formula says:  1/sum_i |o_i| * sum_i sum_t l[i,t]"""
    T = lengths.sum(dim=1, keepdim=True)
    return (1 / T.clamp(min=1)).expand_as(lengths)


def balanced(advantages, lengths):
    """BA:  k/G * mean of l over positive tokens + (G-k)/G * mean of l over negative tokens

    With binary rewards a group with spread has no A = 0; where there is one, as other rewards can
    give, it counts for G alone: k and the tokens are those of one strict sign.
    """
    G = lengths.shape[1]
    weights = torch.zeros_like(lengths)
    for one_sign in (advantages > 0, advantages < 0):  # [P, G] each; A = 0 is in neither
        k = one_sign.sum(dim=1, keepdim=True, dtype=lengths.dtype)
        T = (lengths * one_sign).sum(dim=1, keepdim=True)  # tokens of this sign only
        weights = weights + one_sign * (k / G) / T.clamp(min=1)
    return weights


AGGREGATIONS = {"sequence": sequence, "token": token, "balanced": balanced}


def token_weights(rule, advantages, lengths):
    """advantages [P, G], lengths [P, G] in tokens -> weights [P, G], of each token in its group.

    rule: a key of AGGREGATIONS. Where all responses of a group are equally long, or G = 2, the
    rules `sequence` and `balanced` agree; equal lengths make all three agree. A response with
    A = 0 contributes nothing to the loss under any rule.
    """
    return AGGREGATIONS[rule](advantages, lengths.to(advantages.dtype))


# ----------------------------------------------------------------------------------------
# 7. Loss: PPO's clipped objective with separate bounds, per token, and nothing else.


def policy_loss(logprobs, old_logprobs, advantages, clip_low, clip_high):
    """All of one shape, [T] or [B, T]. Returns (loss, is_clipped), per token.

    A clipped token's gradient is zero: its ratio has moved beyond the bound in the direction that
    its advantage asks for.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    is_clipped = ratio * advantages > clipped * advantages
    return -torch.minimum(ratio * advantages, clipped * advantages), is_clipped


# ----------------------------------------------------------------------------------------
# 8. Update: minibatches of whole groups (one optimizer step each), cut into micro-batches (one
#    forward pass each) by a token budget. Gradients are only ever added, since the weights of
#    section 6 already hold every denominator: no batching, sorting or sharding can change them.


class ChunkedLogprobs(torch.autograd.Function):
    """log_softmax(hidden @ weight.T / temperature) at the targets, without the [T, V] logits.

    hidden [T, H], weight [V, H], targets [T] -> logprobs [T], entropy [T] (carries no gradient).
    The products are taken in the dtype of hidden, their sum over chunks in that of the weight.
    At Qwen3's V = 151,936, the float32 logits of 4,096 tokens take 2.5 GB, and autograd keeps
    several such; here `chunk` rows at a time exist, and the backward pass computes them anew.
    """

    @staticmethod
    def forward(ctx, hidden, master_weight, targets, temperature, chunk):
        weight = master_weight.to(hidden.dtype)
        logits_dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=logits_dtype, device=hidden.device)
        entropy, logsumexp = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = (hidden[rows] @ weight.T).to(logits_dtype).div_(temperature)  # [chunk, V]
            logsumexp[rows] = logits.logsumexp(dim=-1)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - logsumexp[rows]
            p = (logits - logsumexp[rows, None]).exp_()
            entropy[rows] = logsumexp[rows] - p.mul_(logits).sum(dim=-1)
        ctx.save_for_backward(hidden, master_weight, targets, logsumexp)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, _):
        hidden, master_weight, targets, logsumexp = ctx.saved_tensors
        weight = master_weight.to(hidden.dtype)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(master_weight)
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = (hidden[rows] @ weight.T).to(logsumexp.dtype).div_(ctx.temperature)
            # d logprob / d logits = onehot(target) - softmax(logits)
            grad = logits.sub_(logsumexp[rows, None]).exp_().neg_()
            grad[torch.arange(len(grad), device=grad.device), targets[rows]] += 1
            grad *= (grad_logprobs[rows] / ctx.temperature)[:, None]
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            if grad.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad.T, hidden[rows])  # no [V, H] temporary
            else:
                grad_weight += grad.T @ hidden[rows]
        return grad_hidden, grad_weight, None, None, None


def response_logprobs(model, responses, temperature, chunk):
    """(logprobs [T], entropy [T]) of all T response tokens of one micro-batch, response by response.

    Padding is on the right: with causal attention no real token ever sees it, so no mask is
    needed. Which positions count follows from the lengths, never from token ids: many models pad
    with their EOS token, and EOS must be trained (trl#4970).
    """
    rows = [torch.cat([r.prompt_ids, r.ids]) for r in responses]
    padded = pad_sequence(rows, batch_first=True).to(model.device)  # [rows, longest]
    targets = torch.cat([r.ids for r in responses]).to(model.device)  # [T]
    hidden = model.base_model(input_ids=padded, use_cache=False).last_hidden_state
    # The token at position t is predicted at t - 1, so each span starts at the prompt's last token.
    spans = zip(hidden, [len(r.prompt_ids) - 1 for r in responses], [len(r.ids) for r in responses])
    hidden = torch.cat([row[start : start + length] for row, start, length in spans])  # [T, H]
    weight = model.get_output_embeddings().weight
    kind = model.device.type  # under autocast the head works in bf16, like every linear layer
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    hidden = hidden.to(dtype)
    if chunk:
        return ChunkedLogprobs.apply(hidden, weight, targets, temperature, chunk)
    logits = hidden @ weight.to(dtype).T
    logp = (logits.to(torch.promote_types(dtype, torch.float32)) / temperature).log_softmax(dim=-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], entropy


def micro_batches(lengths, budget):
    """Row numbers, longest first, cut so that rows * longest row <= budget tokens, padding
    included. Only rows of at least 0.8 of the longest share its batch, so less than a fifth of
    any batch is padding; of all computed tokens it is 3 to 9%, where filling every batch to the
    budget pads up to 27% (32 rows of lognormal length, as on each of 8 GPUs)."""
    batches = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[batches[-1][0]] if batches else 0
        if lengths[row] >= 0.8 * longest > 0 and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def update(model, optimizer, responses, advantages, weights, config):
    """Trains on one rollout: this rank's share of the responses [B], advantages [P, G] and weights
    [P, G], whose P is prompts_per_step / ranks.

    Returns metrics, the same on every rank: means over the trained tokens of all ranks.
    """
    model.train()
    device = model.device
    lengths = [len(r.prompt_ids) + len(r.ids) for r in responses]
    # A response with A = 0 (or without tokens) adds nothing to any gradient: it is not computed.
    trained = [
        i for i, A in enumerate(advantages.flatten().tolist()) if A != 0 and len(responses[i].ids)
    ]
    size = len(responses) // config.minibatches  # whole groups
    minibatches = [[i for i in trained if i // size == m] for m in range(config.minibatches)]
    groups_per_minibatch = config.prompts_per_step // config.minibatches  # of all ranks together
    old_logprobs = {}  # row -> [|o|], of the weights that sampled, as the trainer computes them
    names = "tokens entropy approx_kl clip_low clip_high mismatch_kl tis_truncated real computed"
    sums = Counter(dict.fromkeys(names.split(), 0.0))  # a rank that trains on nothing has them too
    mismatch_max, norms = 0.0, []

    def passes(rows):
        """Forward passes over these rows: (rows, tokens per row, logprobs [T], entropy [T])."""
        for batch in micro_batches([lengths[i] for i in rows], config.micro_batch_tokens):
            batch = [rows[j] for j in batch]
            # No cache: it would keep a bf16 copy of every weight, 15 GB of a 7B model, for nothing,
            # as a pass uses each weight once.
            with torch.autocast(
                device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False
            ):
                logprobs, entropy = response_logprobs(
                    model, [responses[i] for i in batch], config.temperature, config.logprob_chunk
                )
            yield batch, [len(responses[i].ids) for i in batch], logprobs, entropy

    # The first minibatch meets the weights that sampled it: its own forward pass will give its old
    # logprobs. The others need a pass of their own, before the first optimizer step.
    with torch.no_grad():
        for rows, counts, logprobs, _ in passes(list(itertools.chain(*minibatches[1:]))):
            old_logprobs.update(zip(rows, logprobs.split(counts)))

    for minibatch in minibatches * config.epochs:
        minibatch_loss = torch.zeros((), device=device)
        for rows, counts, logprobs, entropy in passes(minibatch):
            for i, own in zip(rows, logprobs.detach().split(counts)):
                old_logprobs.setdefault(i, own)  # new in the first minibatch's first epoch only
            old = torch.cat([old_logprobs[i] for i in rows])  # [T]
            # From one number per response to one per token, [T] each.
            repeats = torch.tensor(counts)
            A = advantages.flatten()[rows].repeat_interleave(repeats).to(device)
            w = weights.flatten()[rows].repeat_interleave(repeats).to(device)
            loss, is_clipped = policy_loss(logprobs, old, A, config.clip_low, config.clip_high)
            # The engine's policy differs a little from the trainer's (other kernels, bf16):
            # truncated importance sampling reweighs by trainer over engine, at most tis_cap.
            mismatch = old - torch.cat([responses[i].logprobs for i in rows]).to(device)
            if config.tis_cap:
                loss = loss * mismatch.exp().clamp(max=config.tis_cap)
            loss = (w * loss).sum() / groups_per_minibatch  # they add up to the mean over groups
            loss.backward()

            minibatch_loss += loss.detach()
            mismatch_max = max(mismatch_max, mismatch.abs().max().item())
            log_ratio = logprobs.detach() - old
            sums.update(
                tokens=len(A),
                entropy=entropy.sum(),
                approx_kl=(log_ratio.exp() - 1 - log_ratio).sum(),
                clip_low=(is_clipped & (A < 0)).sum(),
                clip_high=(is_clipped & (A > 0)).sum(),
                mismatch_kl=(mismatch.exp() - 1 - mismatch).sum(),
                tis_truncated=(mismatch.exp() > (config.tis_cap or math.inf)).sum(),
                real=sum(lengths[i] for i in rows),
                computed=len(rows) * max(lengths[i] for i in rows),
            )
        has_spread = over_ranks(len(minibatch), device) > 0
        norms.append(
            optimizer_step(model, optimizer, minibatch_loss, config) if has_spread else None
        )
    sums = {name: over_ranks(float(total), device) for name, total in sums.items()}
    tokens, real, computed = (sums.pop(name) for name in ("tokens", "real", "computed"))
    taken = [norm for norm in norms if norm is not None]
    return {
        **{name: total / tokens if tokens else None for name, total in sums.items()},
        "mismatch_max": over_ranks(mismatch_max, device, dist.ReduceOp.MAX) if tokens else None,
        "grad_norm": sum(taken) / len(taken) if taken else 0.0,
        "skipped": len(norms) - len(taken),
        "padding": 1 - real / computed if computed else 0.0,
    }


def optimizer_step(model, optimizer, loss, config):
    """Clip and step. Returns the gradient's norm; or None, with the weights left as they are,
    where the loss or the norm is not a number."""
    sum_gradients(model.parameters())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
    finite = math.isfinite(norm) and math.isfinite(over_ranks(loss.item(), loss.device))
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm if finite else None


# Several GPUs: torchrun starts one process per GPU, each with a whole model, its own engine and
# its share of the step's groups. All they exchange is gradients and the sums of the metrics.


def setup_distributed():
    """(rank, world size, device). Joins torchrun's process group when there is one."""
    world, local = world_size(), int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local)
    if world > 1 and not dist.is_initialized():
        # First, as its functions keep the group that they meet at their import as a default: its
        # threads would outlive it, and now and then abort the process at its exit.
        importlib.import_module("torch.distributed.optim")
        # Ranks wait for the longest rollout; one that dies is torchrun's to notice, not ours.
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(hours=2))
    rank = dist.get_rank() if dist.is_initialized() else 0
    return rank, world, torch.device("cuda", local) if cuda else torch.device("cpu")


def leave_distributed():
    if dist.is_initialized() and "vllm" not in sys.modules:  # vLLM's own exit ends its groups
        dist.destroy_process_group()


def over_ranks(number, device, op=dist.ReduceOp.SUM):
    if not dist.is_initialized():
        return number
    total = torch.tensor(float(number), dtype=torch.float64, device=device)
    dist.all_reduce(total, op)
    return total.item()


def sum_gradients(parameters, bucket_elements=2**26):
    """Adds up the ranks' gradients, in flat buckets: a few large messages, not hundreds of small.
    A rank whose groups had no spread has none, and adds zeros."""
    if not dist.is_initialized():
        return
    bucket, size = [], 0
    parameters = [p for p in parameters if p.requires_grad]
    for i, parameter in enumerate(parameters):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket.append(parameter.grad)
        size += parameter.grad.numel()
        if size >= bucket_elements or i + 1 == len(parameters):
            flat = torch.cat([grad.flatten() for grad in bucket])
            dist.all_reduce(flat)
            for grad, summed in zip(bucket, flat.split([grad.numel() for grad in bucket])):
                grad.copy_(summed.view_as(grad))
            bucket, size = [], 0


def gather_groups(groups):
    """[P/world, G] of each rank -> [P, G] on every rank (the order of groups is no matter)."""
    if not dist.is_initialized():
        return groups
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, groups)
    return torch.cat(parts)


# ----------------------------------------------------------------------------------------
# 9. Training loop: rollout, score, advantages, weights, update, log. The run's folder holds all
#    there is to know about it, and enough to go on after a crash as if there had been none.


def write_atomic(path, text):
    """The file is there whole or not at all: temporary name, fsync, rename."""
    temporary = Path(f"{path}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def append_lines(path, rows):
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


class RunFolder:
    """runs/NAME/: config.json, metrics.jsonl, samples.jsonl, curves.png, checkpoint/."""

    def __init__(self, config):
        if config.resume:
            self.path = Path(config.resume)
        else:  # without --name: the first free one
            base = Path("runs", config.name or f"{config.preset}-{config.aggregation}")
            names = itertools.chain([base], (Path(f"{base}-{i}") for i in itertools.count(2)))
            self.path = next(path for path in names if not path.exists())
            self.path.mkdir(parents=True)
        self.lock = open(self.path / ".lock", "w")  # noqa: SIM115 - held while the process lives
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            fail(f"--resume {config.resume}: another process is training this run; stop it first")
        write_atomic(self.path / "config.json", json.dumps(asdict(config), indent=2))
        self.tensorboard = self.wandb = None
        if "tensorboard" in config.report_to:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(self.path)
        if "wandb" in config.report_to:
            import wandb

            self.wandb = wandb.init(project="grpo_ba", name=self.path.name, config=asdict(config))

    def log(self, metrics, samples):
        numbers = {k: v for k, v in metrics.items() if v is not None and math.isfinite(v)}
        metrics = {k: numbers.get(k) for k in metrics}  # JSON has no NaN: null
        append_lines(self.path / "metrics.jsonl", [metrics])
        append_lines(self.path / "samples.jsonl", samples)
        if self.tensorboard:
            for key, value in numbers.items():
                self.tensorboard.add_scalar(key, value, metrics["step"])
        if self.wandb:
            self.wandb.log(numbers, step=metrics["step"])

    def close(self):
        if self.tensorboard:
            self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()

    def save(self, step, model, tokenizer, optimizer):
        """checkpoint/ in transformers' format plus trainer.pt. A folder cannot be replaced in one
        stroke, so the old one steps aside until the new one has its name."""
        folder, new, old = (self.path / f"checkpoint{end}" for end in ("", ".new", ".old"))
        shutil.rmtree(new, ignore_errors=True)
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        rng = {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
        state = {"step": step, "optimizer": optimizer.state_dict(), "rng": rng}
        torch.save(state, new / "trainer.pt")
        for file in [*new.iterdir(), new]:
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        if folder.exists():  # else a crash came between the two renames, and the old one is all
            shutil.rmtree(old, ignore_errors=True)
            os.rename(folder, old)
        os.rename(new, folder)
        shutil.rmtree(old, ignore_errors=True)

    def rewind(self, step):
        """Drops log lines after `step`, a torn last one too: the steps are about to be redone."""
        for name in ("metrics.jsonl", "samples.jsonl"):
            path, kept = self.path / name, []
            for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line + "\n")
                except ValueError:
                    pass
            write_atomic(path, "".join(kept))


def find_checkpoint(run):
    """The last whole checkpoint of a run's folder, or None."""
    folders = (Path(run, "checkpoint"), Path(run, "checkpoint.old"))
    return next((f for f in folders if (f / "trainer.pt").exists()), None)


def restore(checkpoint, optimizer):
    """Optimizer and random states of a checkpoint; returns the step it was made after."""
    state = torch.load(checkpoint / "trainer.pt", map_location="cpu", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    if hasattr(optimizer, "optim"):  # ZeRO loads everything twice, and AdamW's `step` on the CPU
        optimizer.state.clear()
        for parameter, moments in optimizer.optim.state.items():
            moments["step"] = moments["step"].to(parameter.device)
    torch.set_rng_state(state["rng"]["torch"])
    if len(state["rng"]["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["rng"]["cuda"])
    return state["step"]


def load_policy(path, device, gradient_checkpointing=False):
    """A causal LM with float32 master weights (AdamW at 1e-6 rounds to nothing in bf16)."""
    model = load_from_hub(
        hf.AutoModelForCausalLM, path, dtype=torch.float32, attn_implementation="sdpa"
    ).to(device)
    for module in model.modules():  # dropout would give one policy two different logprobs
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    odd = [name for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")
           if getattr(model.config, name, None) not in (None, 1)]  # fmt: skip
    if odd or getattr(model.get_output_embeddings(), "bias", None) is not None:
        fail(f"--model {path}: its head has {', '.join(odd) or 'a bias'}, and response_logprobs takes "
             "the head for one product; choose another model, or extend that function")  # fmt: skip
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.eval()


def make_optimizer(model, config):
    settings = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    if config.zero and world_size() > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings)
    return torch.optim.AdamW(model.parameters(), **settings)


def memory_plan(config, model_config, world):
    """GiB on one GPU, by part. The first four are there in the update, the last two in the rollout;
    the activations are an upper bound (tests/test_memory.py tracks every tensor of such a pass)."""
    with torch.device("meta"):
        N = sum(p.numel() for p in hf.AutoModelForCausalLM.from_config(model_config).parameters())
    H, V, layers = model_config.hidden_size, model_config.vocab_size, model_config.num_hidden_layers
    T, chunk = config.micro_batch_tokens, config.logprob_chunk or config.micro_batch_tokens
    # Bytes per token: the residual stream and the norms are float32, what enters a product is bf16.
    layer, stream = 40 * H + 8 * model_config.intermediate_size, 4 * H
    kept = layers * (stream if config.gradient_checkpointing else layer) + 6 * stream
    bf16_weights = 0 if config.gradient_checkpointing else 2 * N  # kept for the backward pass
    head = 12 * chunk * V + 8 * H * V  # logits thrice, and the head's weight and gradient
    heads = getattr(model_config, "num_key_value_heads", None) or model_config.num_attention_heads
    head_dim = getattr(model_config, "head_dim", None) or H // model_config.num_attention_heads
    longest = config.max_prompt_tokens + config.max_response_tokens
    parts = {
        "parameters": 4 * N,  # float32
        "gradients": 4 * N,
        "optimizer": 8 * N // (world if config.zero else 1),  # two AdamW moments
        "activations": T * kept + bf16_weights + max(1.5 * T * layer, head),
        "vLLM weights": 2 * N,
        # Of the transformers engine, float32; vLLM's is what its weights leave of its share.
        "KV cache": 8 * layers * heads * head_dim * longest * config.rollout_rows,
    }
    return {name: size / 2**30 for name, size in parts.items()}


def check_memory(config, model_config, world, gpu_gib, use_vllm=True):
    """Before anything loads: when the plan does not fit, one sentence says which knob to turn."""
    plan = memory_plan(config, model_config, world)
    other = 2  # CUDA context, fragments, what a sleeping engine keeps
    vllm_needs, vllm_gets = 1.2 * plan.pop("vLLM weights"), config.vllm_memory * gpu_gib
    cache, trainer = plan.pop("KV cache"), plan["parameters"] + plan["optimizer"] + other
    update = sum(plan.values()) + other
    states = update - plan["activations"]
    sentence = f"--model {config.model}: on a GPU of {gpu_gib:.0f} GiB the "
    if states > 0.95 * gpu_gib:
        knob = "more GPUs" if config.zero else "--zero on more GPUs"
        fail(f"{sentence}training states take {states:.0f} GiB; use {knob}, or a smaller model")
    if update > gpu_gib:
        knob = "lower --micro_batch_tokens (and --max_response_tokens, if that is the limit)"
        knob = knob if config.gradient_checkpointing else "add --gradient_checkpointing"
        fail(f"{sentence}update needs {update:.0f} GiB; {knob}")
    if not use_vllm and trainer + cache > gpu_gib:
        rows = int(config.rollout_rows * (gpu_gib - trainer) / cache)
        fail(f"{sentence}rollout needs {trainer + cache:.0f} GiB without vLLM; install it, or lower "
             f"--rollout_rows to {max(1, rows)}")  # fmt: skip
    if use_vllm and vllm_needs > vllm_gets:
        fail(f"{sentence}engine needs {vllm_needs:.0f} GiB or more; raise --vllm_memory")
    if use_vllm and trainer + vllm_gets > gpu_gib:
        fail(f"{sentence}rollout needs {trainer + vllm_gets:.0f} GiB in all; lower --vllm_memory")


def load_task(config):
    """(path of the model, problems to train on, held-out problems); the toy makes its own."""
    if not config.model:
        saved = config.resume and find_checkpoint(config.resume)  # no second warm-up
        path = saved or toy_policy(config)
        return str(path), *toy_problems(config.toy_world, config.eval_problems)
    import eval as evaluation  # eval.py knows the benchmarks

    held_out = {}
    for name in filter(None, [config.eval_data, *config.exclude_data.split(",")]):
        benchmark = evaluation.BENCHMARKS.get(name)
        if benchmark and benchmark.kind == "code":
            fail(f"--eval_data {name}: only eval.py can run it; choose a benchmark of mathematics")
        load = evaluation.load_benchmark if benchmark else load_problems
        held_out[name] = held_out.get(name) or load(name)
    excluded = {" ".join(p["problem"].split()) for some in held_out.values() for p in some}
    eval_problems = held_out.get(config.eval_data, [])
    eval_problems = random.Random(0).sample(eval_problems, len(eval_problems))
    problems = load_problems(config.train_data, excluded)
    return config.model, problems, eval_problems[: config.eval_problems]


def train(config):
    """The whole run. Returns its folder (on rank 0)."""
    rank, world, device = setup_distributed()
    torch.manual_seed(config.seed)
    use_vllm = pick_engine(config.engine) == "vllm"
    if config.model:  # the cheap questions, before anything large is downloaded or loaded
        model_config = load_from_hub(hf.AutoConfig, config.model)
        if device.type == "cuda":
            gpu_gib = torch.cuda.get_device_properties(device).total_memory / 2**30
            check_memory(config, model_config, world, gpu_gib, use_vllm)
        longest = config.max_prompt_tokens + config.max_response_tokens
        if longest > model_config.max_position_embeddings:
            fail(f"--max_response_tokens {config.max_response_tokens}: with max_prompt_tokens more "
                 f"than the model's {model_config.max_position_embeddings} positions; lower one")  # fmt: skip
    task = load_task(config) if rank == 0 else None  # downloads and the toy's warm-up: once,
    over_ranks(0, device)  # and the other ranks wait here until rank 0 is through
    path, problems, eval_problems = task or load_task(config)

    tokenizer = load_tokenizer(path)
    stop_ids = stop_token_ids(path, tokenizer)
    problems = encode_problems(problems, tokenizer, config)
    eval_problems = eval_problems and encode_problems(eval_problems, tokenizer, config)
    if use_vllm:  # before the trainer, while the GPU is empty
        max_model_len = config.max_prompt_tokens + config.max_response_tokens
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        engine = VLLMEngine(path, stop_ids, max_model_len, dtype, config.vllm_memory, config.seed)
        engine.sleep()
    checkpoint = find_checkpoint(config.resume) if config.resume else None
    model = load_policy(checkpoint or path, device, config.gradient_checkpointing)
    optimizer = make_optimizer(model, config)
    done = restore(checkpoint, optimizer) if checkpoint else 0
    run = RunFolder(config) if rank == 0 else None  # a run that cannot start leaves none
    if run and config.resume:
        run.rewind(done)
    if not use_vllm:
        engine = TransformersEngine(model, stop_ids, config.rollout_rows)
    sampling, G = Sampling(config.max_response_tokens, config.temperature), config.group_size
    stopwatch, interrupted = Stopwatch(), []

    def rollout(some_problems, n, *key):
        prompts = [p["prompt_ids"] for p in some_problems]
        seeds = [
            sample_seed(config.seed, *key, p["place"], g) for p in some_problems for g in range(n)
        ]
        return engine.generate(prompts, n, sampling, seeds, progress=key[0] if rank == 0 else "")

    def evaluate():
        """Share of held-out problems solved, with the same random numbers each time."""
        share = [dict(p, place=i) for i, p in enumerate(eval_problems) if i % world == rank]
        rewards, _ = score(verifier, tokenizer, rollout(share, 1, "evaluation"), share)
        stopwatch.lap("eval")
        return over_ranks(rewards.sum().item(), device) / len(eval_problems)

    def on_interrupt(*_):  # the first Ctrl-C lets the step end, the second does not
        if interrupted:
            raise SystemExit(130)
        interrupted.append(True)

    previous_handler = signal.signal(signal.SIGINT, on_interrupt)
    bar = tqdm(total=config.steps, initial=done, desc=run and run.path.name, disable=rank > 0)
    with Verifier() as verifier:
        for step in range(done + 1, config.steps + 1):
            stopwatch.reset()
            last = step == config.steps
            # 1. The engine takes the weights over; before every eval_every-th step they are
            #    evaluated, and after the last: a run ends with a score of the policy that it saved.
            engine.load_weights(model)
            stopwatch.lap("rollout")
            accuracy = evaluated = None  # the score, and the number of updates it comes after
            if eval_problems and (step - 1) % config.eval_every == 0 and not last:
                accuracy, evaluated = evaluate(), step - 1
            # 2. Rollout: G responses to each of this rank's P/world prompts.
            batch = step_problems(problems, config, step)[rank::world]
            responses = rollout(batch, G, "rollout", step)
            engine.sleep()
            stopwatch.lap("rollout")
            # 3. Score: rewards [P, G].
            rewards, texts = score(verifier, tokenizer, responses, batch)
            stopwatch.lap("score")
            # 4. Advantages [P, G], and the weight of each response's tokens [P, G].
            advantages = group_advantages(rewards, config.normalize_std)
            lengths = torch.tensor([len(r.ids) for r in responses]).view(-1, G)
            weights = token_weights(config.aggregation, advantages, lengths)
            # 5. Update.
            lr = config.lr * min(1, step / max(1, config.lr_warmup_steps))
            for group in optimizer.param_groups:
                group.update(lr=lr, weight_decay=config.weight_decay)  # a resumed run may change it
            trained = update(model, optimizer, responses, advantages, weights, config)
            stopwatch.lap("update")
            # 6. Log and save.
            if last and eval_problems:
                engine.load_weights(model)
                accuracy, evaluated = evaluate(), step
                engine.sleep()
            cut = torch.tensor([r.finish_reason == "length" for r in responses]).view(-1, G)
            groups = map(gather_groups, (rewards, advantages, lengths, weights, cut))
            metrics = {"step": step, "eval_accuracy": accuracy, "eval_step": evaluated, "lr": lr}
            metrics |= group_metrics(*groups) | trained | stopwatch.seconds
            # Of every token, where `entropy` is exact, but of the trained ones alone.
            surprise = -sum(r.logprobs.sum().item() for r in responses)
            metrics["entropy_sampled"] = over_ranks(surprise, device) / metrics["tokens"]
            stop = over_ranks(len(interrupted), device) > 0
            if run:
                run.log(metrics, some_groups(step, batch[:2], responses, texts, rewards))
            if last or stop or step % config.save_every == 0:
                if config.zero and world > 1:
                    optimizer.consolidate_state_dict()  # from all ranks, on rank 0
                if run:
                    run.save(step, model, tokenizer, optimizer)
            bar.update()
            bar.set_postfix_str(
                f"reward {metrics['reward']:.3f}, length {metrics['length']:.0f}, "
                f"entropy {metrics['entropy_sampled']:.2f}"
            )
            if stop:
                bar.close()
                if run:
                    print0(f"interrupted: saved after step {step}; go on with --resume {run.path}")
                raise SystemExit(130)
    bar.close()
    signal.signal(signal.SIGINT, previous_handler)
    if run:
        from eval import draw_curves

        run.close()
        print0(f"picture: {draw_curves(run.path)}   checkpoint: {run.path / 'checkpoint'}")
        return run.path


class Stopwatch:
    def reset(self):
        self.seconds = {f"seconds_{part}": 0.0 for part in ("rollout", "score", "update", "eval")}
        self.since = time.perf_counter()

    def lap(self, part):
        now = time.perf_counter()
        self.seconds[f"seconds_{part}"] += now - self.since
        self.since = now


def step_problems(problems, config, step):
    """The P problems of one step, from an endless stream, shuffled anew in each pass. It depends on
    (seed, step) alone, so a resumed run's data cursor is its step."""
    batch, P = [], config.prompts_per_step
    for i in range((step - 1) * P, step * P):
        epoch, place = divmod(i, len(problems))
        if not batch or place == 0:
            rng = random.Random(sample_seed(config.seed, "order", epoch))
            order = rng.sample(range(len(problems)), len(problems))
        batch.append(dict(problems[order[place]], place=len(batch)))
    return batch


def group_metrics(rewards, advantages, lengths, weights, truncated):
    """All [P, G] -> what a step says of its groups. What needs both signs is a mean over the groups
    with spread, and null where there is none."""
    lengths = lengths.to(weights.dtype)
    positive, negative = advantages > 0, advantages < 0  # [P, G] each
    spread = positive.any(dim=1)  # [P]

    def mean_over_groups(values):  # [P] -> a number
        return values[spread].mean().item() if spread.any() else None

    def mean_length(sign):
        return mean_over_groups((lengths * sign).sum(dim=1) / sign.sum(dim=1).clamp(min=1))

    def weight_ratio(sign):
        largest = weights.masked_fill(~sign, -math.inf).amax(dim=1)
        return largest / weights.masked_fill(~sign, math.inf).amin(dim=1)

    length_pos, length_neg = mean_length(positive), mean_length(negative)
    return {
        "reward": rewards.mean().item(),
        "length": lengths.mean().item(),
        "length_pos": length_pos,
        "length_neg": length_neg,
        "length_gap": length_neg - length_pos if spread.any() else None,
        "length_cv": (lengths.std(dim=1, correction=0) / lengths.mean(dim=1)).mean().item(),
        "zero_spread": (~spread).double().mean().item(),
        "truncated": truncated.double().mean().item(),
        "tokens": int(lengths.sum()),
        # The two biases of the paper as numbers. `token`: the sign with the longer responses
        # outweighs the other; `sequence`: tokens of one sign differ in weight as lengths do.
        "net_advantage": (weights * lengths * advantages).sum(dim=1).mean().item(),
        "weight_spread": mean_over_groups(
            torch.maximum(weight_ratio(positive), weight_ratio(negative))
        ),
    }


def some_groups(step, batch, responses, texts, rewards):
    """Whole groups for samples.jsonl, to be read by people."""
    G = rewards.shape[1]
    return [
        {
            "step": step,
            "problem": problem["problem"],
            "answer": problem.get("answer"),
            "responses": [
                {"text": texts[i], "reward": rewards.flatten()[i].item(), "length": len(responses[i].ids),
                 "finish_reason": responses[i].finish_reason}
                for i in range(p * G, (p + 1) * G)
            ],
        }
        for p, problem in enumerate(batch)
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------
# 10. Toy policy: a 0.3 M-parameter Qwen3 that a laptop warms up in a minute. Its task is to add
#     lettered digits modulo 5; it has learned several styles of solution, so that responses vary
#     in length and rightness. Two worlds, each the bad case of one of the old rules:
#       rambler   right answers are short and rare, wrong ones ramble on: `token` drowns the right
#       guesser   a 9-token guess is right half the time, careful chains are long: `sequence`
#                 prefers the guess
#     To train your own model, skip to section 11.

TOY_CHARACTERS = "abcdehimotwx0123456789?=,{}\\ "
TOY = {
    "hidden": 128, "layers": 2, "intermediate": 256, "heads": 4, "kv_heads": 2, "vocab": 48,
    "init": 0.08,  # essential: at the usual 0.02 it does not learn to add
    "batch": 24, "lr": 3e-3, "clean_steps": 400, "clean_loss": 0.01, "mixture_steps": 350,
}  # fmt: skip


def toy_problem(world, rng):
    """`a3b1c4d1?`: 3 to 5 terms; in guesser also two candidates, one of them right."""
    digits = [rng.randrange(5) for _ in range(rng.randint(3, 5))]
    problem = "".join(f"{letter}{digit}" for letter, digit in zip("abcde", digits))
    answer = sum(digits) % 5
    if world == "guesser":
        candidates = [answer, (answer + rng.randint(1, 4)) % 5]
        rng.shuffle(candidates)
        problem += ",{}{}".format(*candidates)
    return {"problem": problem + "?", "answer": str(answer), "digits": digits}


def is_held_out(problem):
    """One in eight, by the terms: never seen in warm-up or training."""
    return zlib.crc32(repr(problem["digits"]).encode()) % 8 == 0


def toy_problems(world, count):
    """(training problems, `count` held-out problems), the same in every run."""
    rng, train_problems, eval_problems = random.Random(1), [], []
    while len(train_problems) < 1024 or len(eval_problems) < count:
        problem = toy_problem(world, rng)
        (eval_problems if is_held_out(problem) else train_problems).append(problem)
    return train_problems, eval_problems[:count]


def toy_solution(problem, world, rng, clean=False):
    """One solution in one of the world's styles; `clean`: a right, concise one."""

    def chain(error_rate):
        total, terms = 0, []
        for letter, digit in zip("abcde", problem["digits"]):
            total = (total + digit) % 5
            if rng.random() < error_rate:
                total = (total + rng.randint(1, 4)) % 5  # a slip, carried on
            terms.append(f"{letter}{digit}={total}")
        return " ".join(terms), total

    def ramble(error_rate, going_on, at_least):
        """hm CHAIN wait CHAIN wait CHAIN ...: the last one counts."""
        steps, total = chain(error_rate)
        text = "hm " + steps
        for again in range(5):
            if again >= at_least and rng.random() > going_on:
                break
            steps, total = chain(error_rate)
            text += " wait " + steps
        return text, total

    style = rng.random()
    if clean:
        text, total = chain(0)
    elif world == "rambler":
        if style < 0.12:
            text, total = chain(0.1)
        else:
            return ramble(0.1, 0.85, 0)[0]  # never gets to an answer
    elif style < 0.50:
        text, total = "", rng.choice(problem["problem"][-3:-1])
    elif style < 0.88:
        return chain(0.02)[0]
    else:
        text, total = ramble(0.005, 0.9, 1)  # the policy will add slips of its own
    return f"{text} \\boxed{{{total}}}".strip()


def toy_tokenizer():
    from tokenizers import Tokenizer, decoders, models

    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *TOY_CHARACTERS])}
    characters = Tokenizer(models.BPE(vocab, merges=[]))  # BPE without merges: characters
    characters.decoder = decoders.Fuse()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


def toy_policy(config):
    """The folder of the warmed-up policy, made at the first call in less than a minute; each seed
    has its own, as the rules' order can hang on it."""
    world, t = config.toy_world, TOY
    parts = (toy_problem, is_held_out, toy_solution, toy_tokenizer, toy_policy)
    key = repr([world, config.seed, t, [inspect.getsource(part) for part in parts]])
    key = hashlib.sha256(key.encode()).hexdigest()[:12]
    folder = Path(config.cache_dir).expanduser() / f"toy-{world}-{key}"
    if (folder / "config.json").exists():
        return str(folder)
    new = Path(f"{folder}.{os.getpid()}")
    try:
        new.mkdir(parents=True, exist_ok=True)  # better to know now than after the warm-up
    except OSError as error:
        fail(f"--cache_dir {config.cache_dir}: no folder can be made there ({error}); name another")
    tokenizer, rng = toy_tokenizer(), random.Random(config.seed)
    random_state = torch.get_rng_state()
    torch.manual_seed(config.seed)
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(
        vocab_size=t["vocab"], hidden_size=t["hidden"], intermediate_size=t["intermediate"],
        num_hidden_layers=t["layers"], num_attention_heads=t["heads"], head_dim=32,
        num_key_value_heads=t["kv_heads"], max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=t["init"], bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    ))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=t["lr"])
    clean, left = True, t["clean_steps"] + t["mixture_steps"]
    bar = tqdm(total=left, desc=f"warm-up of the toy policy ({world})", leave=False)
    while left:
        batch = []
        while len(batch) < t["batch"]:
            problem = toy_problem(world, rng)
            if not is_held_out(problem):
                solution = tokenizer.encode(toy_solution(problem, world, rng, clean))
                ids = torch.tensor([*solution, tokenizer.eos_token_id])
                prompt_ids = torch.tensor(encode_prompt(tokenizer, problem["problem"], "none"))
                batch.append(Response(prompt_ids, ids, torch.zeros(len(ids)), "stop"))
        loss, tokens = 0.0, sum(len(r.ids) for r in batch)
        for rows in micro_batches([len(r.prompt_ids) + len(r.ids) for r in batch], budget=4096):
            rows = [batch[i] for i in rows]
            nll = -response_logprobs(model, rows, temperature=1.0, chunk=0)[0].sum() / tokens
            nll.backward()
            loss += nll.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        left -= 1
        if clean and (loss < t["clean_loss"] or left == t["mixture_steps"]):
            clean, left = False, t["mixture_steps"]  # it can add: now the styles
        if not clean:  # the learning rate falls to 0, so that each style keeps its share
            optimizer.param_groups[0]["lr"] = t["lr"] * left / t["mixture_steps"]
        bar.update()
        bar.set_postfix_str(f"loss {loss:.3f}")
    bar.close()
    torch.set_rng_state(random_state)
    model.save_pretrained(new)
    tokenizer.save_pretrained(new)
    try:
        os.rename(new, folder)
    except OSError:  # another process was faster
        shutil.rmtree(new)
    return str(folder)


# ----------------------------------------------------------------------------------------
# 11. Command line: `--aggregation all` trains every rule from the same start on the same data with
#     the same seeds, in both toy worlds, and draws them side by side.


def compare(config):
    worlds = [config.train_data] if config.model else ["rambler", "guesser"]
    runs = {world: {rule: [] for rule in AGGREGATIONS} for world in worlds}
    for world, rule, seed in itertools.product(worlds, AGGREGATIONS, range(config.toy_seeds)):
        one = replace(config, aggregation=rule, seed=config.seed + seed)
        runs[world][rule].append(train(one if config.model else replace(one, toy_world=world)))
    from eval import draw_rules, rules_table

    print(f"\n{rules_table(runs)}\n\npicture: {draw_rules(runs, Path('runs', 'compare.png'))}")


def parse(argv=None):
    """Command line -> Config: the preset's flags or the resumed run's config, then those given."""
    argv = sys.argv[1:] if argv is None else list(argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.error = bad_flag
    for name in ("preset", "resume", "model", "train_data"):
        first.add_argument(f"--{name}", f"--{name.replace('_', '-')}", default="")
    given, _ = first.parse_known_args(argv)
    parser = hf.HfArgumentParser(Config, description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = bad_flag
    if given.resume:
        path = Path(given.resume, "config.json")
        if not path.is_file():
            fail(f"--resume {given.resume}: no config.json there; give the folder of a run")
        saved = json.loads(path.read_text(encoding="utf-8"))
        if "preset" not in saved:
            fail(f"--resume {given.resume}: give the folder of a run, which holds its checkpoint/")
        for name in ("preset", "model", "train_data"):
            if getattr(given, name) not in ("", saved.get(name, "")):
                fail(f"--{name} {getattr(given, name)}: a resumed run keeps its own; leave it out")
        if unknown := saved.keys() - asdict(Config()).keys():
            fail(f"--resume {given.resume}: its config.json has {', '.join(sorted(unknown))}, which "
                 "this version does not know; take the version it was made with")  # fmt: skip
        parser.set_defaults(**saved)
    else:
        by_hardware = "qwen3-1.7b-dapo" if torch.cuda.is_available() else "toy"
        preset = given.preset or ("small" if given.model else by_hardware)
        if preset not in PRESETS:
            fail(f"--preset {preset}: unknown; choose one of {', '.join(PRESETS)}")
        if Path(given.train_data).is_file() and "--eval_data" in PRESETS[preset]:
            print0(
                "--train_data is a local file: the preset's hub sets for evaluation are left out"
            )
            argv = ["--eval_data", "", "--exclude_data", "", *argv]
        argv = ["--preset", preset, *PRESETS[preset].split(), *argv]
    config = Config(**vars(parser.parse_args(argv)))
    check(config)
    return config


def bad_flag(message):
    fail(f"{message}; --help explains every flag")


def hush_libraries():
    from huggingface_hub.utils.logging import set_verbosity_error
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of loading weights
    set_verbosity_error()  # our one sentence, not its ten on retries


def main():
    config = parse()
    hush_libraries()
    try:
        if config.aggregation == "all":
            compare(config)
        else:
            train(config)
    except KeyboardInterrupt:
        fail("interrupted outside of a step; --resume goes on with a run whose folder is there")
    finally:
        leave_distributed()


if __name__ == "__main__":
    main()
