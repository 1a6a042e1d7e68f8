"""Small inputs that break other tools, through training and prediction; reading them is tested in test_tsv."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import Finetune, write_tsv
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from finetune.config import PredictConfig, PredictDataConfig, PredictEvalConfig
from finetune.predict import evaluate, predict

CASES = Path(__file__).parent / "data" / "cases"


def trained(finetune: Finetune, case: str, model: Path, run: Path, *more: object) -> subprocess.CompletedProcess[str]:
    arguments = ["--data.train_file", CASES / case / "train.tsv", "--data.validation_file", CASES / case / "dev.tsv"]
    arguments += ["--model.name_or_path", model, "--train.output_dir", run, "--tracking.trackers", "[]", *more]
    done = finetune("train", *arguments, env={"LC_ALL": "C", "PYTHONUTF8": "0"})
    assert done.returncode == 0, done.stderr
    return done


def predict_config(file: Path, cache: Path, batch_size: int) -> PredictConfig:
    data = PredictDataConfig(file=str(file), cache_dir=str(cache / "cache"))
    return PredictConfig(data, PredictEvalConfig(per_device_eval_batch_size=batch_size))


def table(path: Path) -> list[dict[str, str]]:
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    return [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]


def test_case_38_rows_keep_their_order_and_their_probabilities(
    tmp_path: Path, finetune: Finetune, roberta: Path
) -> None:
    """Any batch size, one and two processes; each row as if it had been predicted alone."""
    case = CASES / "38_predict_order"
    ids = json.loads((case / "expect.json").read_text(encoding="utf-8"))["extra"]["id_order"]
    more = ["--train.max_steps", 10, "--optim.learning_rate", 1e-2]
    trained(finetune, "38_predict_order", roberta, tmp_path / "run", *more)
    best = tmp_path / "run" / "best"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(best), AutoTokenizer.from_pretrained(best)
    texts = [row["text"] for row in table(case / "test.tsv")]
    with torch.inference_mode():
        alone = [
            torch.softmax(model(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0], -1)
            for text in texts
        ]
    assert torch.stack(alone)[:, 0].std() > 1e-4  # the rows differ, or their order could not be seen
    output = tmp_path / "out.tsv"
    for batch, processes in ((1, 1), (2, 1), (5, 1), (16, 1), (5, 2)):
        if processes == 1:  # here and now: launches take seconds
            predict(str(best), predict_config(case / "test.tsv", tmp_path, batch), str(output))
        else:
            arguments = ["predict", best, case / "test.tsv", "--output", output]
            arguments += ["--eval.per_device_eval_batch_size", batch]
            done = finetune(*arguments, processes=processes)
            assert done.returncode == 0, done.stderr
        rows = table(output)
        assert [row["id"] for row in rows] == ids
        assert [row["text"] for row in rows] == texts
        for row, expected in zip(rows, alone, strict=True):
            found = [float(row["probability_neg"]), float(row["probability_pos"])]
            assert found == pytest.approx(expected.tolist(), abs=1e-4)
        output.unlink()


def test_case_34_every_dev_row_counts_once(tmp_path: Path, finetune: Finetune, bert: Path) -> None:
    """Nine dev rows and equal metrics for any batch size, one process and three."""
    done = trained(finetune, "34_uneven_eval", bert, tmp_path / "run", "--train.max_steps", 2)
    assert "Best model on 9 dev rows" in done.stdout
    expected = json.loads((tmp_path / "run" / "results.json").read_text())["metrics"]
    for batch in (1, 2, 4, 5, 16):
        config = predict_config(CASES / "34_uneven_eval" / "dev.tsv", tmp_path, batch)
        metrics = evaluate(str(tmp_path / "run"), config)
        for name, metric in expected.items():
            assert metrics[name] == pytest.approx(metric["value"], abs=1e-6)
    arguments = ["--data.file", CASES / "34_uneven_eval" / "dev.tsv", "--eval.per_device_eval_batch_size", 2]
    done = finetune("evaluate", tmp_path / "run", *arguments, processes=3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("9 rows of dev.tsv") == 1
    values = dict(
        [cell.strip() for cell in line.strip("│ ").split("│")][:2]
        for line in done.stdout.splitlines()
        if line.count("│") == 4
    )
    for name, metric in expected.items():
        assert float(values[name]) == pytest.approx(metric["value"], abs=5.1e-5)


def test_case_36_the_rest_of_an_epoch_is_a_step(tmp_path: Path, finetune: Finetune, bert: Path) -> None:
    """Ten rows in global batches of eight: 2 steps an epoch, 6 in all, and a linear schedule that ends at zero."""
    sizes = ["--train.per_device_train_batch_size", 2, "--train.gradient_accumulation_steps", 4]
    more = ["--train.num_train_epochs", 3, "--train.logging_steps", 1, "--optim.warmup_steps", 0]
    trained(finetune, "36_partial_accumulation", bert, tmp_path / "run", *sizes, *more, "--optim.learning_rate", 6e-4)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [line["train/learning_rate"] for line in lines if "train/learning_rate" in line]
    assert rates == pytest.approx([5e-4, 4e-4, 3e-4, 2e-4, 1e-4, 0.0])
    assert json.loads((tmp_path / "run" / "results.json").read_text())["global_step"] == 6


def test_case_33_chinese_names_stay_readable(tmp_path: Path, finetune: Finetune, bert: Path) -> None:
    """In predictions, label maps and on the terminal, also where the locale is plain ASCII."""
    done = trained(finetune, "33_chinese_mixed", bert, tmp_path / "run", "--train.max_steps", 1)
    run = tmp_path / "run"
    assert "3 classes: 文化 3, 生活 4, 科技 2" in done.stdout
    config = (run / "best" / "config.json").read_text(encoding="utf-8")
    assert json.loads(config)["id2label"] == {"0": "文化", "1": "生活", "2": "科技"}
    results = (run / "results.json").read_text(encoding="utf-8")
    assert '"科技"' in results and "\\u" not in results
    output = tmp_path / "out.tsv"
    done = finetune("predict", run, CASES / "33_chinese_mixed" / "test.tsv", "--output", output, env={"LC_ALL": "C"})
    assert done.returncode == 0, done.stderr
    rows = table(output)
    assert len(rows) == 3
    assert {row["prediction"] for row in rows} <= {"文化", "生活", "科技"}
    assert set(rows[0]) >= {"probability_文化", "probability_生活", "probability_科技"}


def test_case_16_names_that_are_numbers(tmp_path: Path, finetune: Finetune, bert: Path) -> None:
    trained(finetune, "16_label_not_contiguous", bert, tmp_path / "run", "--train.max_steps", 1)
    rows = table(tmp_path / "run" / "predictions.tsv")
    assert [row["label"] for row in rows] == [
        row["label"] for row in table(CASES / "16_label_not_contiguous" / "dev.tsv")
    ]
    assert set(rows[0]) == {"label", "prediction", "probability_-1", "probability_2", "probability_5"}
    for row in rows:
        shares = {name: float(row[f"probability_{name}"]) for name in ("-1", "2", "5")}
        assert row["prediction"] == max(shares, key=shares.__getitem__)
        assert sum(shares.values()) == pytest.approx(1, abs=2e-6)


def test_case_31_leaks_are_said_before_training(tmp_path: Path, finetune: Finetune, bert: Path) -> None:
    done = trained(finetune, "31_duplicates_leak", bert, tmp_path / "run", "--train.max_steps", 1)
    said = " ".join(done.stdout.split())
    assert "warning: train: 2 rows (15.4%) repeat an earlier row" in said
    assert "warning: train: 1 text with different labels" in said
    assert "warning: dev rows that are in train too: 2 as they stand, 3 (60.0%) without case" in said
    check = json.loads((tmp_path / "run" / "data_check.json").read_text(encoding="utf-8"))
    assert check["leaks"] == {"exact": 2, "normalised": 3}
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["train_rows"], results["dev_rows"]) == (13, 5)  # nothing is removed unasked


def test_case_32_long_texts(tmp_path: Path, finetune: Finetune, roberta: Path) -> None:
    done = trained(
        finetune, "32_long_texts", roberta, tmp_path / "run", "--train.max_steps", 1, "--data.max_length", 66
    )
    assert "data.max_length lowered from 66 to 64" in done.stdout  # its position table has 66 rows
    assert "are cut and lose" in done.stdout
    rows = write_tsv(tmp_path / "new.tsv", [("x" * 6000, "neg"), ("good " * 900, "pos")])
    done = finetune("predict", tmp_path / "run", rows, "--output", tmp_path / "out.tsv")
    assert done.returncode == 0, done.stderr
    assert len(table(tmp_path / "out.tsv")) == 2
