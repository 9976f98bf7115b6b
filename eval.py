"""The paper's six benchmarks, and comparisons of runs.

    python eval.py --model runs/NAME/checkpoint        the six benchmarks, one table
    python eval.py --model M --data DIR --limit 20     from local files DIR/<benchmark>.jsonl
    python eval.py --model M --benchmarks FILE.jsonl   any rows with problem and answer
    torchrun --nproc-per-node 8 eval.py --model M      the same on eight GPUs
    python eval.py --compare runs/*                    tables and a picture of several runs

Results go to <model or --out>/eval/. After a crash, the same command goes on.
"""

import base64
import itertools
import json
import math
import os
import re
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import transformers as hf
from huggingface_hub import hf_hub_download
from matplotlib.figure import Figure
from tqdm import tqdm

import grpo_ba as ba
from grpo_ba import RANK, WORLD, arg, print0
from verify import Verifier, fail, gold_texts, parse_tests, require_sandbox

# ---- 1. Benchmarks and settings. The revisions are those that public evaluations use.

# fmt: off
BENCHMARKS = {  # hub id[:config], revision, rows
    "math500": ("HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", 500),
    "aime24": ("HuggingFaceH4/aime_2024", "2fe88a2f1091d5048c0f36abc874fb997b3dd99a", 30),
    "aime25": ("math-ai/aime25", "563bb8404243c5f09de6ec262f2db674fe5bce9b", 30),
    "olympiadbench": ("Hothan/OlympiadBench:OE_TO_maths_en_COMP",
                      "91184b52131e7fc9455fef848035173aea8cc01a", 674),
    "minerva_math": ("math-ai/minervamath", None, 272),
    "livecodebench": ("livecodebench/code_generation_lite",
                      "0fe84c3912ea0c4d4a78037083943e8f0c4dd505", 1055),
}
LCB_ROWS = {f"release_v{i}": n for i, n in enumerate((400, 511, 612, 713, 880, 1055), 1)}
PRESETS = {  # sampling, boxed instruction, thinking: as the model cards want it
    "qwen3": ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, "suffix", True),
    "qwen3-non-thinking": ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, "suffix", False),
    "qwen2": ({"temperature": 0.6, "top_p": 0.95}, "system", False),
    "other": ({"temperature": 0.6, "top_p": 0.95}, "suffix", False),
    "toy": ({"temperature": 1.0, "max_tokens": 200}, "none", False),
}
# fmt: on


@dataclass
class Options:
    model: str = arg("", "checkpoint, folder or hub id")
    compare: list[str] = field(default_factory=list, metadata={"help": "run folders, instead"})
    benchmarks: list[str] = field(default_factory=list, metadata={"help": "names or .jsonl files"})
    data: str = arg("", "folder of <benchmark>.jsonl, instead of the hub")
    limit: int = arg(0, "problems of each benchmark; 0: all")
    out: str = arg("", "where eval/ or compare.png goes (default: the model's or runs)")
    preset: Literal["auto", *PRESETS] = arg("auto", "how to ask and sample")
    samples: int = arg(0, "responses per problem; 0: 32 for AIME, else 4")
    temperature: float = arg(0.0, "of the sampling; 0: the preset's")
    max_tokens: int = arg(0, "longest response; 0: the preset's")
    engine: Literal["vllm", "transformers"] = arg(ba.Config.engine, "who samples")
    batch_size: int = arg(256 if ba.CUDA else 16, "responses of a rank per write")
    unsafe_code: bool = arg(False, "run programs without the sandbox")
    lcb_release: Literal[*LCB_ROWS] = arg("release_v6", "of LiveCodeBench")
    lcb_start: str = arg("2000-01-01", "LiveCodeBench's first day")
    lcb_end: str = arg("2100-01-01", "LiveCodeBench's last day")
    lcb_skip_bad: bool = arg(False, "leave out LiveCodeBench's ERRATA.md")


def parse(argv=None):
    """Refuses what cannot work before anything is loaded."""
    o = ba.parse_flags(Options, __doc__, argv, benchmarks=list(BENCHMARKS))
    if bool(o.model) == bool(o.compare):
        fail("give --model or --compare")
    for name in o.benchmarks:
        if name not in BENCHMARKS and not name.endswith(".jsonl"):
            fail(f"--benchmarks {name}: choose from {', '.join(BENCHMARKS)}, or a .jsonl file")
    for name, value in vars(o).items():
        least = 1 if name == "batch_size" else 0
        if type(value) in (int, float) and not value >= least:
            fail(f"--{name} {value}: must be at least {least}")
    return o


# ---- 2. Data: problems {"problem", "answer"}, where any of the "answer"s is right; those of
# LiveCodeBench have "messages", "tests" and "func_name" too.


def math_problem(name, row):
    text, golds = ba.problem_text(row), gold_texts(row.get("answer", row.get("final_answer")))
    if name in ("aime24", "aime25"):  # "025" and "336^\\circ" are integers
        golds = [str(int(re.search(r"\d+", gold)[0])) for gold in golds]
    if name == "olympiadbench":  # ["$69$,$84$"] or ["$x$."]: all of them, in any order
        golds = gold_texts(", ".join(gold.replace("$", "").strip(" .") for gold in golds))
    if not text or not golds:
        raise ValueError(f"no problem or no verifiable answer in {row}")
    if row.get("context"):  # of several questions
        text = f"{row['context']}\n{text}"
    return {"problem": text, "answer": golds}


# LiveCodeBench's ERRATA.md, and its official prompt, word for word.
LCB_BAD = """abc311_c abc326_d abc327_b abc333_e abc343_a abc343_e abc362_c arc185_c abc337_e
abc355_e abc350_c arc189_a find-words-containing-character find-the-peaks most-frequent-ids
generate-binary-strings-without-adjacent-zeros apply-operations-to-make-string-empty"""
LCB_SYSTEM = """You are an expert Python programmer. You will be given a question (problem \
specification) and will generate a correct Python program that matches the specification and passes \
all tests."""
LCB_STARTER = """You will use the following starter code to write the solution to the problem and \
enclose your code within delimiters."""
LCB_STDIN = """Read the inputs from stdin solve the problem and write the answer to stdout (do not \
directly test on the sample inputs). Enclose your code within delimiters as follows. Ensure that when \
the python program runs, it reads the inputs, runs the algorithm and writes output to STDOUT."""
MAX_TESTS_BYTES = 2**30  # of one problem, decompressed: a zip bomb ends here


def decode_tests(text):
    """JSON, or base64 of zlib of a pickled JSON text: it is cut out, no pickle is ever loaded."""
    if text.startswith("["):
        return json.loads(text)
    inflate = zlib.decompressobj()
    data = inflate.decompress(base64.b64decode(text), MAX_TESTS_BYTES)
    if not inflate.eof:
        raise ValueError(f"cut off, or over {MAX_TESTS_BYTES:,} bytes")
    return json.loads(data[data.index(b'[{"') : data.rindex(b"}]") + 2])


def code_problem(row, o):
    public, private = row["public_test_cases"], row["private_test_cases"]
    is_bad = {row["question_id"], row["question_title"]} & set(LCB_BAD.split())
    if not o.lcb_start <= row["contest_date"][:10] <= o.lcb_end or (is_bad and o.lcb_skip_bad):
        return None
    how = LCB_STARTER if row["starter_code"] else LCB_STDIN
    user = (
        f"### Question:\n{row['question_content']}\n\n### Format: {how}\n"
        f"```python\n{row['starter_code'] or '# YOUR CODE HERE'}\n```\n\n"
        "### Answer: (use the provided format with backticks)\n\n"
    )
    p = {
        "problem": user, "answer": None,
        "messages": [{"role": "system", "content": LCB_SYSTEM}, {"role": "user", "content": user}],
        "func_name": json.loads(row["metadata"]).get("func_name"),
        "tests": lambda: decode_tests(public) + decode_tests(private),  # decoded, they are huge
    }  # fmt: skip
    parse_tests(p["tests"](), p["func_name"])  # not after hours of sampling
    return p


def load_problems(name, o):
    source, revision, expected = BENCHMARKS.get(name, (name, None, "any"))
    files, is_code, problems = [source], name == "livecodebench", {}
    if is_code:
        require_sandbox(o.unsafe_code)
        expected = LCB_ROWS[o.lcb_release]
    if o.data and name in BENCHMARKS:
        files = [f"{o.data}/{name}.jsonl"]
    elif is_code:  # raw files, 4.5 GB in all, as datasets >= 4 runs no scripts
        files = [f"test{i}.jsonl" for i in ("", 2, 3, 4, 5, 6)][: int(o.lcb_release[-1])]
        files = [hf_hub_download(source, file, None, "dataset", revision) for file in files]
    rows = [row for file in files for row in ba.read_rows(file, "test", revision)]
    for number, row in enumerate(rows, 1):
        try:
            if p := code_problem(row, o) if is_code else math_problem(name, row):
                problems[p["problem"]] = p  # repeats would shrink the standard error
        except Exception as error:  # noqa: BLE001 - hostile rows
            fail(f"{name}, row {number}: cannot be used ({error!r:.300})")
    print0(f"{name}: {len(problems)} different problems in {len(rows)} rows (expected: {expected})")
    return list(problems.values()) or fail(f"{name}: no rows (LiveCodeBench: see --lcb_start)")


# ---- 3. Sampling and scores. A response depends on weights, settings, prompt and its own seed
# (on a GPU, a little on the batch), so a killed run can go on, and ranks do not change the table.
# Standard errors are over problems: responses to one problem are not independent.

KEY = ("task", "problem", "sample", "version")  # version: hash of the settings


def pass_at_k(n, c, k):
    """Probability that one of k responses is right, from n of which c are (arrays): the unbiased
    1 - C(n-c, k) / C(n, k) (Chen et al., 2021). NaN where n < k."""
    return 1 - math.prod((n - c - i) / (n - i) for i in range(k))


def paired_bootstrap(differences, draws=10_000):
    """Mean over benchmarks of the mean difference over problems, and its 95% interval.
    differences: Series with index (benchmark, problem)."""
    rng, tasks = np.random.default_rng(0), differences.groupby(level=0)
    means = [rng.choice(some, (draws, len(some))).mean(axis=1) for _, some in tasks]
    return [tasks.mean().mean(), *np.quantile(np.mean(means, axis=0), [0.025, 0.975])]


def summarise(rows):
    """Rows of samples.jsonl -> figures of their benchmark, shares in %, NaN if unknown."""
    rows = pd.DataFrame(rows)
    errors, k = rows.reason == "sandbox_error", rows["sample"].nunique()
    scored = rows[~errors & (errors.mean() <= 0.01)]  # neither right nor wrong: too many, no score
    rewards = scored.groupby("problem").reward
    n, c, scores = rewards.count(), rewards.sum(), 100 * rewards.mean()
    return {
        "problems": rows.problem.nunique(), "k": k, "avg@k": scores.mean(), "s.e.": scores.sem(),
        **{f"pass@{i}": 100 * pass_at_k(n, c, i).mean() for i in (1, 2, 4, 8, 16, 32) if i <= k},
        "tokens": rows.tokens.mean(), "truncated": 100 * rows.truncated.mean(),
        "no answer": 100 * (rows.reason == "no_answer").mean(),
        "sandbox errors": 100 * errors.mean(), "per_problem": scores.to_dict(),
    }  # fmt: skip


def report(folder, settings, tasks):
    """{task: rows} -> results.json, results.md and the table on the screen."""
    figures = pd.DataFrame(map(summarise, tasks.values()), tasks)
    table = figures.drop(columns="per_problem")
    figures["settings"] = str(settings)
    text = table.to_string(float_format="{:.1f}".format, na_rep="-")
    text += f"\n\nshares in %; average of avg@k: {table['avg@k'].mean(skipna=False):.1f}"
    ba.write_atomic(folder / "results.json", figures.to_json(orient="index", indent=1))
    ba.write_atomic(folder / "results.md", f"```\n{text}\n```\n")
    print(f"\n{text}")


def choose_preset(o, config):
    """(sampling, instruction, thinking). A checkpoint of ours is asked as it was in training."""
    path = Path(o.model).parent / "config.json"
    run = json.loads(path.read_text()) if path.is_file() else {}
    family = config.model_type
    if family == "qwen3" and not run.get("enable_thinking", True):
        family = "qwen3-non-thinking"
    name = family if o.preset == "auto" else o.preset
    sampling, instruction, thinking = PRESETS.get(name, PRESETS["other"])
    limit = o.max_tokens or sampling.get("max_tokens", 32768)
    sampling = sampling | {"max_tokens": min(limit, config.max_position_embeddings)}
    sampling["temperature"] = o.temperature or sampling["temperature"]
    return sampling, run.get("instruction", instruction), thinking


def read_samples(path):
    """{key: row}, without the responses, which may take gigabytes."""
    rows = ba.read_jsonl(path)
    return {tuple(row[name] for name in KEY): row | {"response": ""} for row in rows}


def evaluate(o):
    device, path = ba.setup_distributed(), Path(o.model)
    config, tokenizer = (x.from_pretrained(o.model) for x in (hf.AutoConfig, hf.AutoTokenizer))
    sampling, *style = choose_preset(o, config)
    # A checkpoint that was trained further is another model, a moved one is not.
    weights = [file.stat().st_mtime_ns for file in sorted(path.glob("*.*"))] or o.model
    wanted = {}  # {key: problem}
    for task in o.benchmarks:
        for p in load_problems(task, o)[: o.limit or None]:
            prompt = p.get("messages", p["problem"])
            p["prompt_ids"] = ba.encode_prompt(tokenizer, prompt, *style)
            version = ba.sample_seed(p["answer"], weights, sampling, style, o.engine, ba.CUDA)
            for i in range(o.samples or (32 if task.startswith("aime") else 4)):
                wanted[task, p["problem"], i, version] = p
    file = Path(o.out or (path if path.is_dir() else f"runs/{path.name}"), "eval", "samples.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    done = read_samples(file)
    missing = [k for k in wanted if k not in done or done[k]["reason"] == "sandbox_error"]
    missing.sort(key=lambda key: len(wanted[key]["prompt_ids"]))  # little padding
    print0(f"{file}: {len(missing)} of {len(wanted)} responses missing; {sampling}")
    if missing:
        stop_ids = ba.stop_token_ids(tokenizer)
        if o.engine == "vllm":  # no trainer beside it
            longest = min(sampling["max_tokens"] + 8192, config.max_position_embeddings)
            engine = ba.VLLMEngine(o.model, stop_ids, longest, 0.9)
        else:
            engine = ba.TransformersEngine(ba.load_policy(o.model, device), stop_ids)
        if RANK == 0 and file.exists():  # a torn line would swallow the next
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
    step = o.batch_size * WORLD
    with Verifier(unsafe_code=o.unsafe_code) as verifier:
        for start in tqdm(range(0, len(missing), step), disable=RANK > 0):
            keys, rows = missing[start + RANK : start + step : WORLD], []
            problems = [wanted[key] for key in keys]
            if keys:  # else others do the rest
                seeds = [ba.sample_seed(*key[:3]) for key in keys]
                prompts = [p["prompt_ids"] for p in problems]
                responses = engine.generate(prompts, 1, seeds, **sampling)
                texts = [ba.response_text(tokenizer, response) for response in responses]
                ready = [p | {"tests": p["tests"]()} if "tests" in p else p for p in problems]
                verdicts = verifier.score(texts, ready)
                rows = [
                    dict(zip(KEY, key)) | {"answer": p["answer"], "response": text} | asdict(v)
                    | {"tokens": len(r.ids), "truncated": r.ids[-1] not in stop_ids}
                    for key, p, r, text, v in zip(keys, problems, responses, texts, verdicts)
                ]  # fmt: skip
            rows = ba.all_ranks(rows)
            if RANK == 0:
                ba.append_jsonl(file, itertools.chain(*rows))
    if RANK == 0:
        done = read_samples(file)
        tasks = {task: [done[key] for key in wanted if key[0] == task] for task in o.benchmarks}
        report(file.parent, [o, sampling, *style], tasks)


# ---- 4. Comparisons: benchmarks are paired by problem, so that difficulty cancels, trainings
# by seed.

COLORS = {"sequence": "#0072B2", "token": "#D55E00", "balanced": "#009E73"}  # Okabe-Ito


def read_run(folder):
    """[a training run's figures and curve], or [] without a held-out accuracy."""
    log = [m for m in ba.read_jsonl(folder / "metrics.jsonl") if m["eval_step"] is not None]
    if not log:
        return []
    config = json.loads((folder / "config.json").read_text())
    curve = pd.Series({m["eval_step"]: m["eval_accuracy"] for m in log})
    return [{
        "world": f"{Path(config['model']).name} on {Path(config['train_data']).stem}",
        "rule": config["aggregation"], "name": str(folder), "seed": config["seed"], "curve": curve,
        "initial": curve.get(0), "best": curve.max(), "last": curve.iloc[-1],
        "mean": np.trapezoid(curve, curve.index) / np.ptp(curve.index),
    }]  # fmt: skip


def training_table(runs):
    """Means over seeds. `mean` is accuracy over the whole training (trapezoid rule), `lead` what
    balanced has more of it, paired by seed."""
    balanced = runs["mean"].where(runs.rule == "balanced")
    best = balanced.groupby([runs.world, runs.seed]).transform("max")
    groups = runs.assign(lead=best - runs["mean"]).groupby(["world", "rule"], sort=False)
    table = groups.mean(numeric_only=True).drop(columns="seed")
    table["s.e."] = groups.lead.sem()
    table["won"] = groups.lead.agg(lambda x: f"{(x > 0).sum()} of {x.count()}")
    return table.to_string(float_format="{:.3f}".format, na_rep="-")


def score_table(scores):
    """DataFrame (task, problem) x run -> means, and differences with 95% intervals."""
    tasks = scores.groupby(level=0, sort=False)
    table = tasks.mean()
    table.loc["average"] = table.mean()
    for b, a in itertools.combinations(scores, 2):
        d = scores[a] - scores[b]
        parts = [*(some for _, some in d.groupby(level=0, sort=False)), d]
        cells = ["{:+.1f} [{:+.1f}, {:+.1f}]".format(*paired_bootstrap(part)) for part in parts]
        table[f"{a} - {b}"] = cells
    table.insert(0, "problems", [*tasks.size(), len(scores)])
    return table.to_string(float_format="{:.1f}".format)


def draw(runs, scores, path):
    """Accuracy in each world (thin: seeds, thick: mean), then scores."""
    worlds = list(runs.groupby("world", sort=False)) if len(runs) else []
    count = len(worlds) + bool(len(scores))
    figure = Figure((6 * count, 4.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for panel, (world, some) in zip(panels, worlds):
        for i, (rule, seeds) in enumerate(some.groupby("rule", sort=False)):
            curves = pd.concat(list(seeds.curve), axis=1).sort_index()
            c = COLORS.get(rule, f"C{i + 4}")
            panel.plot(curves, color=c, lw=0.8, alpha=0.35)
            label = f"{rule}: best {seeds['best'].mean():.2f}, last {seeds['last'].mean():.2f}"
            panel.plot(curves.mean(axis=1, skipna=False).dropna(), "o-", color=c, ms=4, label=label)
        panel.set(title=world, xlabel="updates", ylabel="held-out accuracy", ylim=(0, 1))
        panel.legend()
    if len(scores):
        tasks = scores.groupby(level=0, sort=False)
        colors = [COLORS.get(re.split(r"\W", x)[-1], f"C{i + 4}") for i, x in enumerate(scores)]
        tasks.mean().plot.bar(ax=panels[-1], yerr=1.96 * tasks.sem(), color=colors, rot=20, capsize=2,
                              xlabel="", title="avg@k in %, 95% interval")  # fmt: skip
    figure.savefig(path)


def compare(o):
    runs, scores, path = [], {}, Path(o.out or "runs", "compare.png")
    for folder in map(Path, o.compare):
        runs += read_run(folder)
        for file in folder.rglob("results.json"):  # of the run or of its checkpoint
            tasks = json.loads(file.read_text()).items()
            some = pd.DataFrame({task: figures["per_problem"] for task, figures in tasks})
            scores[str(folder)] = some.unstack()
    runs, scores = pd.DataFrame(runs), pd.DataFrame(scores if len(scores) > 1 else {}).dropna()
    if len(runs) < 2 and not len(scores):
        fail("--compare: needs two runs with accuracies, or with scores of the same problems")
    if len(runs):
        twins = runs.duplicated(["world", "rule", "seed"], keep=False)
        runs.loc[twins, "rule"] = runs.name  # each is a line of its own
        print(training_table(runs))
    if len(scores):
        print(score_table(scores))
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, scores, path)
    print(f"picture: {path}")


if __name__ == "__main__":
    o = parse()
    ba.run_main(lambda: compare(o) if o.compare else evaluate(o))
