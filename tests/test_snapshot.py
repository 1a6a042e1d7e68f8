"""What a checkpoint's files say, read back."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from finetune.loop import TrainState
from finetune.run_folder import write_json
from finetune.snapshot import on_host, train_state


@pytest.mark.parametrize(
    "state",
    [
        TrainState(),
        TrainState(epoch=1, step_in_epoch=2, global_step=14, evaluated_step=12, best_metric=0.5, best_step=12),
        TrainState(global_step=3, best_metric=math.nan, best_step=3, stop_reason="all steps done"),
    ],
)
def test_the_state_of_training_comes_back(tmp_path: Path, state: TrainState) -> None:
    """A best metric that is not a number is still the best so far, and not no metric at all."""
    write_json(tmp_path / "state.json", {"train_state": asdict(state)})
    again = train_state(json.loads((tmp_path / "state.json").read_text()))
    assert again.best_metric == pytest.approx(state.best_metric, nan_ok=True)
    assert {**asdict(again), "best_metric": 0} == {**asdict(state), "best_metric": 0}


def test_a_copy_on_the_host_is_one() -> None:
    """Deep, and shared where the original is: a model's tied weights are stored once."""
    tied = torch.arange(6.0).view(2, 3)
    original = {"a": tied, "b": [tied, (torch.ones(2), 5)], "empty": torch.empty(0), "view": tied[0], "none": None}
    copy = on_host(original)
    tied.zero_()
    assert copy["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and copy["b"][0] is copy["a"]
    assert copy["b"][1][0].tolist() == [1, 1] and copy["b"][1][1] == 5 and isinstance(copy["b"][1], tuple)
    assert copy["view"].tolist() == [0, 1, 2] and copy["empty"].shape == (0,) and copy["none"] is None
