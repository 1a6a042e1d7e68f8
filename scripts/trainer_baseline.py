#!/usr/bin/env python3
"""HF Trainer on the same work as finetune, for scripts/benchmark_speed: one run, told as JSON.

``best`` is what somebody who knows Trainer well would set: bf16 where asked, batches of similar length, padding to the
longest text of a batch, the attention that is faster on the device, fused AdamW. ``defaults`` is what
run_classification.py does when nobody sets anything: float32, every text padded to max_length, random batches.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import psutil
import torch
import transformers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

STARTED = psutil.Process().create_time()


class Clock(TrainerCallback):
    """When the first step began and the last one ended."""

    begin = end = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begin = self.begin or time.time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the last one counts; the others wait for the loss anyway when they log
        self.end = time.time()


class Counting:
    """A collator that counts the tokens that go through it."""

    def __init__(self, collate: DataCollatorWithPadding) -> None:
        self.collate, self.tokens, self.computed, self.seconds = collate, 0, 0, 0.0

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        started = time.perf_counter()
        batch = self.collate(features)
        self.tokens += int(batch["attention_mask"].sum())
        self.computed += batch["attention_mask"].numel()
        self.seconds += time.perf_counter() - started
        return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("train", "dev", "model", "output"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("max_length", "batch", "steps", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--settings", choices=["best", "defaults"], required=True)
    parser.add_argument("--attention", default=None)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--evaluate", action="store_true")
    options = parser.parse_args()
    best = options.settings == "best"
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()

    strings = datasets.Features({"text": datasets.Value("string"), "label": datasets.Value("string")})
    rows = datasets.load_dataset(
        "csv",
        data_files={"train": options.train, "dev": options.dev},
        delimiter="\t",
        quoting=3,
        keep_default_na=False,
        features=strings,
    )
    names = sorted(set(rows["train"]["label"]))
    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        tokens = tokenizer(
            batch["text"],
            truncation=True,
            max_length=options.max_length,
            padding=False if best else "max_length",
        )
        return {**tokens, "labels": [names.index(label) for label in batch["label"]]}

    rows = rows.map(encode, batched=True, remove_columns=["text", "label"])
    torch.manual_seed(42)
    model = AutoModelForSequenceClassification.from_pretrained(
        options.model,
        num_labels=len(names),
        problem_type="single_label_classification",
        ignore_mismatched_sizes=True,
        attn_implementation=options.attention if best else None,
    )
    padding: dict[str, Any] = {"padding": True, "pad_to_multiple_of": 8} if best else {"padding": "max_length"}
    collate = Counting(DataCollatorWithPadding(tokenizer, **padding, max_length=options.max_length))
    clock = Clock()
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=options.output + ".trainer",
            use_cpu=not torch.cuda.is_available(),
            bf16=options.bf16 and best,
            bf16_full_eval=False,
            train_sampling_strategy="group_by_length" if best else "random",
            per_device_train_batch_size=options.batch,
            per_device_eval_batch_size=64 if best else 8,
            max_steps=options.steps,
            learning_rate=options.learning_rate,
            weight_decay=0.01,
            warmup_steps=0.06,
            lr_scheduler_type="linear",
            logging_steps=10 if best else 500,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=0,
            seed=42,
        ),
        data_collator=collate,
        train_dataset=rows["train"],
        eval_dataset=rows["dev"],
        compute_metrics=lambda out: {"accuracy": float((out.predictions.argmax(-1) == out.label_ids).mean())},
        callbacks=[clock],
    )
    trainer.train()
    seconds = clock.end - clock.begin
    tokens, computed, collating = collate.tokens, collate.computed, collate.seconds
    accuracy, evaluation_seconds = None, None
    if options.evaluate:
        started = time.perf_counter()
        accuracy = trainer.evaluate()["eval_accuracy"]
        evaluation_seconds = time.perf_counter() - started
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    examples = options.steps * options.batch
    Path(options.output).write_text(
        json.dumps(
            {
                "examples_per_second": examples / seconds,
                "tokens_per_second": tokens / seconds,
                "computed_tokens_per_second": computed / seconds,
                "padding_fraction": 1 - tokens / computed,
                "training_seconds": seconds,
                "data_seconds": collating,
                "evaluation_seconds": evaluation_seconds,
                "startup_seconds": clock.begin - STARTED,
                "peak_memory_bytes": peak,
                "accuracy": accuracy,
                "dev_rows": len(rows["dev"]),
            }
        )
    )


if __name__ == "__main__":
    sys.exit(main())
