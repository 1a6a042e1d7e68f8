"""The plan says what is true of the files, the model and the launch: numbers counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import write_tsv
from torch import nn

import finetune.plan
from finetune.config import Config, DataConfig, ModelConfig
from finetune.data.batching import BatchSizes, TrainingLength
from finetune.data.check import DataCheck, Finding
from finetune.data.splits import read_splits
from finetune.data.tokenize import tokenize
from finetune.model import LoadedModel, load_model
from finetune.plan import describe_plan
from finetune.run_folder import LaunchRecord, launch_record

TRAIN = [("good film", "pos"), ("bad", "neg"), ("the book was very very good", "pos"), ("good", "pos")]
DEV = [("good", "pos"), ("a bad book", "neg")]


@pytest.fixture
def record() -> LaunchRecord:
    return launch_record(
        run_id="abc12345",
        profile=Path("ddp2_accum10.yaml"),
        sizes=BatchSizes(8, 2, 10),
        accumulation_source="profile ddp2_accum10",
        num_machines=1,
        mixed_precision="no",
        device="cpu",
        device_name="CPU",
        threads=4,
        seed=42,
    )


Describe = Any


@pytest.fixture
def describe(tmp_path: Path, bert: Path, record: LaunchRecord) -> Describe:
    """The plan for these rows."""

    def describe(
        train: list[tuple[str, str]] = TRAIN,
        dev: list[tuple[str, str]] | None = DEV,
        max_length: int = 6,
        freeze_encoder: bool = False,
        record: LaunchRecord = record,
        more: list[str] | None = None,
        findings: Sequence[Finding] = (),
        **changes: Any,
    ) -> dict[str, Any]:
        data = DataConfig(
            train_file=[str(write_tsv(tmp_path / "train.tsv", train)), *(more or [])],
            validation_file=str(write_tsv(tmp_path / "dev.tsv", dev)) if dev else None,
            cache_dir=str(tmp_path / "cache"),
            **changes,
        )
        splits = read_splits(data, seed=1)
        loaded = load_model(
            str(bert),
            label_names=splits.labels.names,
            problem_type=data.problem_type,
            max_length=max_length,
            freeze_encoder=freeze_encoder,
        )
        texts = [
            tokenize(table.dataset, loaded.tokenizer, max_length=loaded.max_length, cache_dir=data.cache_dir)
            for table in (splits.train, splits.dev)
        ]
        config = Config(data=data, model=ModelConfig(name_or_path="models/bert"))
        length = TrainingLength(1250, 3750, frozenset({1250, 2500, 3750}))
        check = DataCheck({}, {}, findings)
        return describe_plan(config, splits, *texts, loaded, length, "2e-05 at its peak", record, check)

    return describe


def test_plan(describe: Describe) -> None:
    plan = describe()
    assert plan["train"] == ["train.tsv: 4 rows"]
    assert plan["dev"] == ["dev.tsv: 2 rows"]
    assert plan["labels"] == "2 classes: neg 1, pos 3"
    # With [CLS] and [SEP] 4, 3, 8 and 3 tokens; of 18 the one longer than 6 loses 2.
    assert plan["tokens"] == [
        "max_length 6: longer texts keep their beginning",
        "train: median 4, longest 8; 1 rows (25.0%) are cut and lose 11.1% of all tokens",
        "dev: median 4, longest 5; nothing is cut",
    ]
    assert plan["batch"] == "160 = 8 per device x 2 process(es) x 10 accumulation (profile ddp2_accum10)"
    assert plan["steps"] == "3,750 optimizer steps, 1,250 an epoch; evaluated 3 time(s)"
    assert plan["learning rate"] == "2e-05 at its peak"
    assert plan["machine"] == "2 x CPU, 4 CPU thread(s) each, precision float32"


@pytest.mark.parametrize(
    ("truncation", "kept"), [("tail", "their end"), ("head_tail", "their beginning (a quarter) and end")]
)
def test_how_longer_texts_are_cut(describe: Describe, truncation: str, kept: str) -> None:
    assert describe(truncation=truncation)["tokens"][0] == f"max_length 6: longer texts keep {kept}"


def test_warnings_of_the_data_check(describe: Describe) -> None:
    assert "data check" not in describe()
    findings = [Finding("warning", "leakage", "3 dev rows are in train"), Finding("info", "reader", "a note")]
    assert describe(findings=findings)["data check"] == [
        "warning: 3 dev rows are in train",
        "places and remedies: `finetune check`, or data_check.json",
    ]


def test_parameters_by_hand(describe: Describe) -> None:
    whole, frozen = describe()["model"], describe(freeze_encoder=True)["model"]
    assert whole[0].startswith("models/bert: BertForSequenceClassification, 0.0 million parameters")
    assert frozen[0] == f"{whole[0]}, {16 * 2 + 2} of them trained"  # two labels over a width of 16
    assert whole[1:] == ["new weights, not in the checkpoint: classifier.bias, classifier.weight"]
    large: Any = nn.Linear(1000, 33_000, device="meta")
    loaded = LoadedModel(large, None, 8, ())  # type: ignore[arg-type]
    assert finetune.plan._model(loaded) == "Linear, 33.0 million parameters"
    large.weight.requires_grad_(False)
    assert finetune.plan._model(loaded) == "Linear, 33.0 million parameters, 33,000 of them trained"


def test_notes_of_files_and_model(describe: Describe, tmp_path: Path) -> None:
    plan = describe(train=[*TRAIN, ("good", " pos ")], max_length=100)
    assert plan["train"][0] == "train.tsv: 5 rows"
    assert plan["train"][1].endswith("train.tsv: blanks around 1 label removed")
    assert plan["tokens"][0].startswith("max_length 64: ")
    assert any(note.startswith("data.max_length lowered from 100 to 64") for note in plan["model"])


def test_dev_rows_held_back(describe: Describe) -> None:
    rows = [(f"text {index}", "ab"[index % 2]) for index in range(400)]
    plan = describe(rows, None, validation_split=0.005)
    assert plan["train"] == ["train.tsv: 398 rows"]
    assert plan["dev"] == ["train.tsv: 2 rows (0.5% of the training rows)"]
    plan = describe(rows, None, validation_split=0.07)  # as a float 7.000000000000001 per cent
    assert plan["dev"] == ["train.tsv: 28 rows (7% of the training rows)"]


def test_many_classes(describe: Describe) -> None:
    rows = [("text", f"class {index}") for index in range(13) for _ in range(index + 1)]
    assert describe(rows, [("text", "class 3")])["labels"] == "13 classes with 1 to 13 training rows"


def test_multi_label(describe: Describe) -> None:
    rows = [("text", "a,b"), ("text", "b"), ("text", "b,c,a")]
    plan = describe(rows, [("text", "a")], problem_type="multi_label_classification")
    assert plan["labels"] == "3 classes: a 2, b 3, c 1"


def test_regression(describe: Describe) -> None:
    plan = describe([("text", "1.5"), ("text", "-2")], [("text", "0")], problem_type="regression")
    assert plan["labels"] == "numbers from -2 to 1.5 (regression)"


def test_several_files(describe: Describe, tmp_path: Path) -> None:
    more = [str(write_tsv(tmp_path / name, [("good", "pos")])) for name in ("more.tsv", "most.tsv")]
    assert describe(more=more)["train"] == ["train.tsv and 2 more: 6 rows"]


def test_precision(describe: Describe, record: LaunchRecord) -> None:
    plan = describe(record=replace(record, mixed_precision="bf16", device_name="NVIDIA H100", threads_per_process=1))
    assert plan["machine"] == "2 x NVIDIA H100, 1 CPU thread(s) each, precision bf16"
