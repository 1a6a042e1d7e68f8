"""Shared by all tests: no network, caches of their own, tiny models made on the spot, real launches."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(__file__))
from jobs import Nursery

# Before anything imports a HuggingFace library or W&B.
_home = tempfile.mkdtemp(prefix="finetune-tests-")
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HOME=os.path.join(_home, "huggingface"),
    WANDB_MODE="offline",
    WANDB_CACHE_DIR=os.path.join(_home, "wandb"),
    WANDB_CONFIG_DIR=os.path.join(_home, "wandb-config"),
    PYTHONWARNINGS="default",
    TOKENIZERS_PARALLELISM="false",
)
for name in ("WANDB_API_KEY", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "OMP_NUM_THREADS"):
    os.environ.pop(name, None)

REPOSITORY = Path(__file__).resolve().parent.parent
WORDS = [
    "good",
    "great",
    "fine",
    "lovely",
    "bad",
    "awful",
    "poor",
    "dreadful",
    "film",
    "book",
    "the",
    "a",
    "was",
    "is",
    "very",
    "not",
    "and",
    "好",
    "坏",
    "书",
]


def pytest_unconfigure() -> None:
    import shutil

    shutil.rmtree(_home, ignore_errors=True)


def write_tsv(path: Path, rows: Sequence[Sequence[str]], header: Sequence[str] = ("text", "label")) -> Path:
    """Write rows as they are, without quoting."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(cells) + "\n" for cells in [header, *rows]), encoding="utf-8")
    return path


def reviews(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Rows whose label follows from their words: ``pos`` when more good words than bad ones stand in the text."""
    import random

    generator = random.Random(seed)
    rows = []
    for index in range(count):
        label = ("neg", "pos")[index % 2]
        own = WORDS[:4] if label == "pos" else WORDS[4:8]
        words = [*generator.choices(WORDS[8:17], k=generator.randrange(1, 12)), generator.choice(own)]
        generator.shuffle(words)
        rows.append((" ".join(words), label))
    return rows


@pytest.fixture
def review_files(tmp_path: Path) -> tuple[Path, Path]:
    """``train.tsv`` with 37 rows and ``dev.tsv`` with 11: neither divides by any batch size in use."""
    return write_tsv(tmp_path / "train.tsv", reviews(37)), write_tsv(tmp_path / "dev.tsv", reviews(11, seed=1))


def make_tokenizer(kind: str) -> object:
    """A tokenizer of the same type as the real checkpoints of that architecture."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import BertTokenizerFast, RobertaTokenizerFast

    if kind == "roberta":
        trained = ByteLevelBPETokenizer()
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        trained.train_from_iterator([" ".join(WORDS)] * 3, vocab_size=400, min_frequency=1, special_tokens=special)
        folder = tempfile.mkdtemp(dir=_home)
        trained.save_model(folder)
        return RobertaTokenizerFast.from_pretrained(folder, model_max_length=512)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    path = Path(tempfile.mkdtemp(dir=_home), "vocab.txt")
    path.write_text("\n".join(vocabulary), encoding="utf-8")
    return BertTokenizerFast.from_pretrained(str(path.parent))


def make_checkpoint(folder: Path, kind: str = "bert", dropout: float = 0.0, **changes: object) -> Path:
    """Save a random encoder with two layers of width 16 and a tokenizer, as if downloaded."""
    import torch
    from transformers import (
        BertConfig,
        BertModel,
        DistilBertConfig,
        DistilBertModel,
        RobertaConfig,
        RobertaModel,
    )

    tokenizer = make_tokenizer(kind)
    shape = {"vocab_size": len(tokenizer), "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    width = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    if kind == "bert":
        model = BertModel(BertConfig(**shape, **width, max_position_embeddings=64, **changes))
    elif kind == "roberta":
        config = RobertaConfig(**shape, **width, max_position_embeddings=66, pad_token_id=1, **changes)
        model = RobertaModel(config)
    else:
        model = DistilBertModel(
            DistilBertConfig(
                vocab_size=len(tokenizer), dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=64,
                dropout=dropout, attention_dropout=dropout, seq_classif_dropout=dropout, **changes,
            )
        )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", params=["bert", "roberta", "distilbert"])
def any_checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each architecture in turn."""
    return make_checkpoint(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT without dropout."""
    return make_checkpoint(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="session")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny RoBERTa without dropout: 66 positions, of which 64 can be used."""
    return make_checkpoint(tmp_path_factory.mktemp("models") / "roberta", "roberta")


Finetune = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def forked_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Starts processes in no time."""
    with Nursery(tmp_path_factory.mktemp("jobs")) as nursery:
        yield nursery


@pytest.fixture
def finetune(tmp_path: Path, forked_jobs: Nursery) -> Finetune:
    """Run the real program: ``finetune("train", …)`` or ``finetune("train", …, profile="ddp2", launcher=[…])``.

    ``profile`` starts it under plain ``accelerate launch --config_file``, in float32 whatever the profile says, so that
    results can be compared; ``launcher`` adds launcher options. Without it and without an environment of its own it is
    forked, as so many connected ``processes``, from a process that has imported everything.
    """

    def run(
        *arguments: object,
        profile: str | Path | None = None,
        launcher: Sequence[str] = (),
        processes: int = 1,
        env: dict[str, str] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "finetune", *map(str, arguments)]
        if profile is None and env is None and "--profile" not in command:
            job = forked_jobs.start(arguments, ranks=processes, cwd=tmp_path)
            code = max(-9 if code is None else code for code in job.wait(timeout))
            return subprocess.CompletedProcess(command, code, *job.streams())
        if profile is not None:
            path = profile if Path(profile).is_file() else REPOSITORY / "accelerate_configs" / f"{profile}.yaml"
            start = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
            start += ["--mixed_precision", "no", *launcher]
            command = [*start, "-m", "finetune", *map(str, arguments)]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(env or {})},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )

    return run
