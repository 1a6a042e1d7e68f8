"""Trackers are read back with the tools that people use: ``wandb leet inspect`` and TensorBoard's own reader."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from finetune.errors import ConfigError
from finetune.tracking import Tracker, Trackers, start_trackers, wandb_mode

WANDB = Path(sys.executable).with_name("wandb")
API_KEY = "0123456789" * 4
CONFUSION = np.array([[5, 1, 0], [0, 7, 2], [1, 0, 9]])
LABELS = ["sport", "pop | rock", "政治"]
PER_CLASS = [{"label": name, "f1": 0.5 + i / 10, "support": 10 + i} for i, name in enumerate(LABELS)]


@pytest.fixture(autouse=True)
def fresh_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user who never logged in to W&B, on a machine without network."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


def start(output_dir: Path, *names: str, **changes: Any) -> Trackers:
    arguments: dict[str, Any] = {
        "config": {"optim": {"learning_rate": 1e-4}, "data": {"train_file": "train.tsv"}},
        "project": "news",
        "run_name": "first",
        "group": "sweep",
        "tags": ["demo", "cpu"],
    }
    return start_trackers(names, output_dir=output_dir, **{**arguments, **changes})


def log_steps(trackers: Trackers, first: int, last: int) -> None:
    for step in range(first, last + 1):
        trackers.log({"train/loss": 1 / step}, step=step, epoch=step / 4)


def inspect(path: Path) -> dict[str, Any]:
    """Config, summary and state of an offline run."""
    command = [str(WANDB), "leet", "inspect", "--summary", "--json", str(path)]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    return result


def history(path: Path) -> list[dict[str, Any]]:
    """The rows of an offline run, in order."""
    command = [str(WANDB), "leet", "inspect", "--json", str(path)]
    lines = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def offline_runs(output_dir: Path) -> list[Path]:
    return sorted((output_dir / "wandb").glob("offline-run-*"))


def metrics_file(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


# --- names and composition ---------------------------------------------------------------------------------------


def test_importing_tracking_loads_neither_wandb_nor_torch() -> None:
    code = "import sys, finetune.tracking; print(sorted({'wandb', 'torch', 'tensorboard'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_unknown_tracker_names_setting_value_and_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tracking\.trackers.*'wandbb'.*did you mean 'wandb'.*tensorboard"):
        start(tmp_path / "run", "wandbb")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("names", [(), ("none",)])
def test_no_trackers_leaves_only_the_jsonl(tmp_path: Path, names: tuple[str, ...]) -> None:
    with start(tmp_path / "run", *names) as trackers:
        log_steps(trackers, 1, 1)
        trackers.log_evaluation_tables(1, label_names=LABELS, confusion=CONFUSION, per_class=PER_CLASS)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]
    assert trackers.run_id is None
    assert trackers.describe() == str(tmp_path / "run" / "metrics.jsonl")


def test_other_ranks_hold_trackers_that_do_nothing(tmp_path: Path) -> None:
    with Trackers() as trackers:
        log_steps(trackers, 1, 2)
        trackers.log_evaluation_tables(2, label_names=LABELS, confusion=CONFUSION, per_class=PER_CLASS)
        trackers.finish({"best/accuracy": 1.0}, failed=False)
    assert trackers.run_id is None
    assert trackers.describe() == ""


class Recorder(Tracker):
    def __init__(self, name: str, broken: bool = False) -> None:
        self.name, self.broken = name, broken
        self.steps: list[int] = []
        self.finished: list[tuple[dict[str, object], bool]] = []

    def log(self, metrics: Mapping[str, float], step: int, epoch: float) -> None:
        if self.broken:
            raise RuntimeError("connection lost\nby the service")
        self.steps.append(step)

    def finish(self, summary: Mapping[str, object], failed: bool) -> None:
        self.finished.append((dict(summary), failed))

    def describe(self) -> str:
        return self.name


def test_a_failing_tracker_is_reported_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = Recorder("broken", broken=True), Recorder("sound")
    with Trackers([broken, sound]) as trackers:
        log_steps(trackers, 1, 3)
    assert sound.steps == [1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "broken failed, training goes on without it: connection lost by the service"
    ]
    assert broken.finished == [({}, False)], "it is still closed"


def test_an_exception_finishes_the_run_as_failed_and_goes_on() -> None:
    recorder = Recorder("only")
    with pytest.raises(KeyboardInterrupt), Trackers([recorder]):
        raise KeyboardInterrupt
    assert recorder.finished == [({}, True)]


def test_only_the_first_finish_counts() -> None:
    recorder = Recorder("only")
    with pytest.raises(ValueError, match="report"), Trackers([recorder]) as trackers:
        trackers.finish({"best/step": 3}, failed=False)
        raise ValueError("report")
    assert recorder.finished == [({"best/step": 3}, False)]


# --- JSONL -------------------------------------------------------------------------------------------------------


def test_jsonl_lines_are_on_disk_when_log_returns(tmp_path: Path) -> None:
    trackers = start(tmp_path)
    trackers.log({"train/loss": np.float32(0.5), "perf/tokens": 12}, step=10, epoch=0.25)  # type: ignore[dict-item]
    trackers.log({"eval/f1": float("nan"), "eval/loss": float("inf")}, step=10, epoch=0.25)
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 10, "epoch": 0.25, "train/loss": 0.5, "perf/tokens": 12.0}\n'
        '{"step": 10, "epoch": 0.25, "eval/f1": null, "eval/loss": null}\n'
    )
    trackers.finish({}, failed=False)


def test_jsonl_of_a_resumed_run_holds_each_step_once(tmp_path: Path) -> None:
    killed = start(tmp_path)
    log_steps(killed, 1, 5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "epo')
    killed.finish({}, failed=True)
    with start(tmp_path, resumed_step=3) as resumed:
        log_steps(resumed, 4, 6)
    assert [line["step"] for line in metrics_file(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in tmp_path.glob("metrics*")] == ["metrics.jsonl"]


def test_jsonl_starts_anew_without_resume_and_needs_no_old_file_with_it(tmp_path: Path) -> None:
    for resumed_step in (7, None):
        with start(tmp_path, resumed_step=resumed_step) as trackers:
            log_steps(trackers, 8, 8)
        assert [line["step"] for line in metrics_file(tmp_path)] == [8]


# --- W&B offline -------------------------------------------------------------------------------------------------


def test_wandb_offline_run_reads_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trackers = start(tmp_path, "wandb", run_id="news-1")
    log_steps(trackers, 1, 3)
    trackers.log({"eval/accuracy": 0.75, "eval/loss": float("nan")}, step=3, epoch=0.75)
    trackers.log_evaluation_tables(2, label_names=LABELS, confusion=CONFUSION, per_class=PER_CLASS)
    trackers.finish({"best/accuracy": 0.875, "best/step": 2, "eval/accuracy": 0.8125}, failed=False)

    assert capfd.readouterr() == ("", ""), "nothing may disturb the progress bar"
    (run,) = offline_runs(tmp_path)
    assert trackers.run_id == "news-1"
    assert trackers.describe() == (
        f"{tmp_path}/metrics.jsonl; W&B offline (no login found): {tmp_path}/wandb; upload with `wandb sync {run}`"
    )
    result = inspect(run)
    assert result["state"] == "finished" and result["exit_code"] == 0
    assert result["run_id"] == "news-1" and result["project"] == "news" and result["name"] == "first"
    assert result["tags"] == ["demo", "cpu"]
    assert result["config"] == {"optim": {"learning_rate": 1e-4}, "data": {"train_file": "train.tsv"}}
    assert result["summary"]["best/accuracy"] == 0.875 and result["summary"]["best/step"] == 2
    assert result["summary"]["eval/accuracy"] == 0.8125, "the summary beats the last row"

    rows = history(run)
    assert [row["train/global_step"] for row in rows] == [1, 2, 3]
    assert [row["train/epoch"] for row in rows] == [0.25, 0.5, 0.75]
    assert [row["train/loss"] for row in rows] == [1, 0.5, 1 / 3]
    assert rows[2]["eval/accuracy"] == 0.75 and rows[2]["eval/loss"] == "NaN"


def test_wandb_tables_hold_label_names_and_counts(tmp_path: Path) -> None:
    with start(tmp_path, "wandb") as trackers:
        log_steps(trackers, 4, 4)
        trackers.log_evaluation_tables(2, label_names=LABELS, confusion=CONFUSION, per_class=PER_CLASS)
    (run,) = offline_runs(tmp_path)
    (row,) = history(run)
    assert row["train/global_step"] == 4
    confusion = json.loads((run / "files" / row["eval/confusion_matrix_table.path"]).read_text())
    assert confusion["columns"] == ["Actual", "Predicted", "nPredictions"]
    assert confusion["data"][1:4] == [["sport", "pop | rock", 1], ["sport", "政治", 0], ["pop | rock", "sport", 0]]
    assert [count for _, _, count in confusion["data"]] == CONFUSION.flatten().tolist()
    per_class = json.loads((run / "files" / row["eval/per_class.path"]).read_text())
    assert per_class["columns"] == ["label", "f1", "support"]
    assert per_class["data"] == [list(entry.values()) for entry in PER_CLASS]


def test_wandb_tables_of_many_classes_are_not_cut_off(tmp_path: Path) -> None:
    classes = 150  # 22,500 cells, more than W&B shows
    confusion = np.diag(np.arange(classes)) + np.eye(classes, k=1, dtype=int)
    with start(tmp_path, "wandb") as trackers:
        names = [f"intent {i}" for i in range(classes)]
        trackers.log_evaluation_tables(1, label_names=names, confusion=confusion, per_class=[])
    (run,) = offline_runs(tmp_path)
    (row,) = history(run)
    table = json.loads((run / "files" / row["eval/confusion_matrix_table.path"]).read_text())
    assert sum(count for _, _, count in table["data"]) == confusion.sum()
    assert "eval/per_class.path" not in row


def test_wandb_run_of_an_exception_is_failed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of memory"), start(tmp_path, "wandb") as trackers:
        log_steps(trackers, 1, 2)
        raise RuntimeError("out of memory")
    result = inspect(tmp_path / "wandb")
    assert result["state"] == "failed" and result["exit_code"] == 1
    assert result["summary"]["train/global_step"] == 2, "what was logged is kept"


def test_wandb_offline_resume_keeps_id_and_steps(tmp_path: Path) -> None:
    with start(tmp_path, "wandb") as first:
        log_steps(first, 1, 3)
    time.sleep(1.1)  # W&B names its folders by the second
    with start(tmp_path, "wandb", run_id=first.run_id, resumed_step=2) as second:
        log_steps(second, 3, 4)
    assert second.run_id == first.run_id
    runs = offline_runs(tmp_path)
    assert [inspect(run)["run_id"] for run in runs] == [first.run_id, first.run_id]
    # What the first start has written is not logged again: steps only rise.
    assert [[row["train/global_step"] for row in history(run)] for run in runs] == [[1, 2, 3], [4]]


def test_wandb_disabled_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with start(tmp_path, "wandb") as trackers:
        log_steps(trackers, 1, 2)
        trackers.log_evaluation_tables(2, label_names=LABELS, confusion=CONFUSION, per_class=PER_CLASS)
        trackers.finish({"best/step": 2}, failed=False)
    assert trackers.run_id is None
    assert trackers.describe().endswith("W&B disabled (as configured)")
    assert not (tmp_path / "wandb").exists()


SCRIPT = """
import sys
from pathlib import Path
from finetune.tracking import start_trackers
with start_trackers(["wandb"], output_dir=Path(sys.argv[1]), config={}, project="p", run_name=None, group=None,
                    tags=[]) as trackers:
    trackers.log({"train/loss": 1.0}, step=1, epoch=0.1)
print("done")
"""


@pytest.mark.parametrize("mode", ["", "online"])
def test_a_terminal_without_login_is_never_asked(tmp_path: Path, mode: str) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    environment = {**os.environ, "WANDB_MODE": mode} if mode else {**os.environ}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    assert process.wait(timeout=60) == 0
    assert os.read(controller, 10_000).split() == [b"done"]
    os.close(controller)
    os.close(terminal)
    assert inspect(tmp_path / "wandb")["state"] == "finished"


KILL_THE_SERVICE = """
    import os, time
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    [service] = [pid for pid in children if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(int(service), 9)
    time.sleep(0.5)
    trackers.log({"train/loss": 0.5}, step=2, epoch=0.2)
    trackers.log({"train/loss": 0.3}, step=3, epoch=0.3)
"""


def test_a_killed_wandb_service_does_not_stop_training(tmp_path: Path) -> None:
    script = SCRIPT.replace("print(", KILL_THE_SERVICE + "print(")
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "done\n")
    warning, *more = result.stderr.splitlines()
    assert warning.startswith("W&B failed, training goes on without it: ")  # then the operating system's words
    assert not more
    assert [line["step"] for line in metrics_file(tmp_path)] == [1, 2, 3]


def test_wandb_that_cannot_start_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(**_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("wandb.init", refuse)
    with start(tmp_path, "wandb") as trackers:
        log_steps(trackers, 1, 1)
    assert "W&B did not start, training goes on without it: no space left" in caplog.text
    assert len(metrics_file(tmp_path)) == 1


def test_wandb_setting_that_wandb_refuses_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'team/news'.*cannot contain"):
        start(tmp_path, "wandb", project="team/news")


def test_missing_wandb_fails_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="wandb"):
        start(tmp_path, "wandb")
    monkeypatch.undo()


# --- W&B login and online, against a stand-in for its server -----------------------------------------------------


class FakeServer(ThreadingHTTPServer):
    """Answers just enough of W&B's protocol to log in, create or resume one run, and take its history."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.rows: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.operations: list[str] = []
        self.exit_codes: list[int] = []
        self.refused: dict[str, int] = {}  # operation -> HTTP status

    def handle_error(self, request: Any, client_address: Any) -> None:
        """wandb resets connections when it ends; that is no news."""


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test output clean."""

    def answer(self) -> None:
        self.server.paths.append(self.path)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        status, reply = 200, {}
        if self.path == "/graphql":
            request = json.loads(body)
            self.server.operations.append(request["operationName"])
            status = self.server.refused.get(request["operationName"], 200)
            reply = {"data": self.data(request.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            sent = json.loads(body)
            for line in sent.get("files", {}).get("wandb-history.jsonl", {}).get("content", []):
                self.server.rows.append(json.loads(line))
            if sent.get("complete"):
                self.server.exit_codes.append(sent["exitcode"])
        encoded = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    do_GET = do_POST = do_PUT = answer

    def data(self, variables: dict[str, Any]) -> dict[str, Any]:
        rows = self.server.rows
        project = {"id": "1", "name": "news", "entity": {"id": "2", "name": "me"}}
        last = json.dumps(rows[-1]) if rows else "{}"
        bucket: dict[str, Any] = {
            "id": "3",
            "name": variables.get("name"),
            "displayName": "first",
            "historyLineCount": len(rows),
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyTail": json.dumps([last]),
            "eventsTail": "[]",
            "config": "{}",
            "summaryMetrics": last,
            "tags": [],
            "wandbConfig": '{"t": 1}',
            "project": project,
        }
        files = [{"name": name, "uploadUrl": f"{self.server.url}/upload"} for name in variables.get("files") or []]
        return {
            "viewer": {"id": "4", "username": "me", "entity": "me", "flags": "{}", "teams": {"edges": []}},
            "model": {**project, "bucket": bucket if rows else None},
            "upsertBucket": {"bucket": bucket, "inserted": not rows},
            "createRunFiles": {"runID": "3", "uploadHeaders": [], "files": files},
        }


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    with FakeServer() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        yield server
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()
        server.shutdown()


def write_netrc(host: str) -> None:
    path = Path(os.environ["HOME"]) / ".netrc"
    path.write_text(f"machine {host} login user password {API_KEY}\n")
    path.chmod(0o600)


@pytest.mark.parametrize(
    ("wandb_mode_variable", "login", "expected"),
    [
        (None, "none", ("offline", "no login found")),
        (None, "key", ("online", "logged in")),
        (None, "netrc", ("online", "logged in")),
        (None, "netrc of another host", ("offline", "no login found")),
        ("online", "none", ("offline", "no login found")),
        ("online", "key", ("online", "logged in")),
        ("run", "key", ("online", "logged in")),
        ("shared", "key", ("shared", "logged in")),
        ("shared", "none", ("offline", "no login found")),
        ("offline", "key", ("offline", "as configured")),
        ("dryrun", "netrc", ("offline", "as configured")),
        ("disabled", "key", ("disabled", "as configured")),
    ],
)
def test_mode_follows_choice_and_login(
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    wandb_mode_variable: str | None,
    login: str,
    expected: tuple[str, str],
) -> None:
    if wandb_mode_variable:
        monkeypatch.setenv("WANDB_MODE", wandb_mode_variable)
    if login == "key":
        monkeypatch.setenv("WANDB_API_KEY", API_KEY)
    elif login == "netrc":
        write_netrc(f"127.0.0.1:{server.server_port}")
    elif login == "netrc of another host":
        write_netrc("example.org")
    assert wandb_mode() == expected
    assert server.operations == (["Viewer"] if expected[1] == "logged in" else [])


def test_without_login_nothing_is_printed_and_nothing_is_sent(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_ERROR_REPORTING")  # on for everyone who does not turn it off; it sends telemetry on exit
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
    assert server.paths == []


def test_mode_follows_the_settings_file_of_wandb_offline(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
    subprocess.run([str(WANDB), "offline"], check=True, capture_output=True, timeout=60, cwd=os.environ["HOME"])
    monkeypatch.chdir(os.environ["HOME"])
    assert wandb_mode() == ("offline", "as configured")
    assert server.operations == []


@pytest.mark.parametrize("key", ["too-short", API_KEY])
def test_login_that_fails_means_offline_with_a_warning(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    server.refused["Viewer"] = 401
    monkeypatch.setenv("WANDB_API_KEY", key)
    assert wandb_mode() == ("offline", f"cannot log in at {server.url}")
    assert len(caplog.records) == 1
    assert "\n" not in caplog.text.strip()


def test_unreachable_server_means_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
    monkeypatch.setenv("WANDB_HTTP_TIMEOUT", "1")
    with start(tmp_path, "wandb") as trackers:
        log_steps(trackers, 1, 2)
    assert "W&B offline (cannot log in at http://127.0.0.1:9)" in trackers.describe()
    assert "the run is kept offline" in caplog.text
    assert inspect(tmp_path / "wandb")["summary"]["train/global_step"] == 2


def test_server_that_refuses_the_run_means_offline(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server.refused["UpsertBucket"] = 403
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    with start(tmp_path, "wandb", run_id="news-1") as trackers:
        log_steps(trackers, 1, 2)
    assert "W&B offline (it did not start online)" in trackers.describe()
    assert "W&B did not start online, the run is kept offline" in caplog.text
    (run,) = offline_runs(tmp_path)
    assert inspect(run)["run_id"] == "news-1"


def test_resumed_online_run_has_each_step_once(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
    with pytest.raises(RuntimeError), start(tmp_path, "wandb", run_id="news-1") as first:
        log_steps(first, 1, 5)
        raise RuntimeError
    with start(tmp_path, "wandb", run_id="news-1", resumed_step=3) as second:
        log_steps(second, 4, 7)
    assert [row["train/global_step"] for row in server.rows] == [1, 2, 3, 4, 5, 6, 7]
    assert server.exit_codes == [1, 0]
    assert second.describe().endswith(f"W&B online: {server.url}/me/news/runs/news-1")
    assert capfd.readouterr() == ("", "")


# --- TensorBoard -------------------------------------------------------------------------------------------------


def read_tensorboard(output_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output_dir / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    return events.Reload()


def text(events: Any, tag: str) -> str:
    (event,) = events.Tensors(f"{tag}/text_summary")
    return str(event.tensor_proto.string_val[0].decode())


def test_tensorboard_reads_back(tmp_path: Path) -> None:
    trackers = start(tmp_path, "tensorboard")
    log_steps(trackers, 1, 3)
    trackers.log_evaluation_tables(3, label_names=LABELS, confusion=CONFUSION, per_class=PER_CLASS)
    trackers.finish({"best/accuracy": 0.875}, failed=True)
    events = read_tensorboard(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, pytest.approx(1 / 3)),
    ]
    assert [event.value for event in events.Scalars("train/epoch")] == [0.25, 0.5, 0.75]
    assert '"learning_rate": 0.0001' in text(events, "config")
    assert text(events, "summary").splitlines()[2:] == ["| state | failed |", "| best/accuracy | 0.875 |"]
    assert text(events, "eval/confusion_matrix").splitlines() == [
        "| true \\ predicted | sport | pop \\| rock | 政治 |",
        "| --- | --- | --- | --- |",
        "| sport | 5 | 1 | 0 |",
        "| pop \\| rock | 0 | 7 | 2 |",
        "| 政治 | 1 | 0 | 9 |",
    ]
    assert "| sport | 0.5 | 10 |" in text(events, "eval/per_class").splitlines()
    assert f"TensorBoard: `tensorboard --logdir {tmp_path}/tensorboard`" in trackers.describe()


def test_tensorboard_of_a_resumed_run_holds_each_step_once(tmp_path: Path) -> None:
    with start(tmp_path, "tensorboard") as killed:
        log_steps(killed, 1, 5)
    time.sleep(1.1)  # TensorBoard orders its files by the second in their names
    with start(tmp_path, "tensorboard", resumed_step=3) as resumed:
        log_steps(resumed, 4, 6)
    assert [event.step for event in read_tensorboard(tmp_path).Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_missing_tensorboard_names_setting_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"tracking\.trackers.*pip install tensorboard"):
        start(tmp_path, "tensorboard", "wandb")
    assert not (tmp_path / "wandb").exists()
