"""A training run from config to run folder: assembles all the parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from numpy.typing import NDArray
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

from finetune.checkpoint import saved_steps
from finetune.config import Config, DataConfig, EvalConfig, ProblemType, validate
from finetune.console import TrainingProgress, make_console, print_plan, print_warning
from finetune.data.batching import BatchSizes, TrainingLength, resolve_batch_sizes, training_length
from finetune.data.check import DataCheck, check_data
from finetune.data.loader import FEW_SHAPES, Collator, EvalLoader, Examples, TrainLoader
from finetune.data.packing import MULTIPLE_OF
from finetune.data.splits import Splits, read_splits
from finetune.data.tokenize import TokenizedTexts, tokenize
from finetune.distributed import compress_gradients, disconnect, first_on_each_node, on_every_process, on_main_process
from finetune.dropout import use_fast_dropout
from finetune.errors import Interrupted
from finetune.features import compute_features
from finetune.finite import FiniteWatch
from finetune.interrupt import StopRequests
from finetune.launch import (
    Launch,
    build_accelerator,
    check_before_start,
    check_connected,
    end_with_launcher,
    find_launch,
    is_compiled,
    is_restarted,
    job_start,
    local_world_size,
    process_start,
    resolve_accumulation,
    resolve_precision,
    use_all_cores,
)
from finetune.loop import Training, TrainState, train
from finetune.loss import example_losses, example_weights, resolve_class_weights
from finetune.metrics import DEFAULT_METRICS, Metrics, default_metric_for_best_model, greater_is_better
from finetune.micro_batch import fitting_micro_batch, out_of_memory_explained
from finetune.model import InputSettings, LoadedModel, load_model
from finetune.optim import LearningRateSchedule, build_optimizer, resolve_learning_rate
from finetune.packing import resolve_packing
from finetune.plan import describe_plan
from finetune.report import REPORT_FILE
from finetune.results import Results
from finetune.run_folder import LaunchRecord, choose_output_dir, launch_record, run_id_of, start_run_folder, write_json
from finetune.snapshot import Identity, Resumable, Snapshots, find_checkpoint, load_weights, refuse_another_run
from finetune.startup import Startup
from finetune.throughput import Throughput
from finetune.tracking import Trackers, start_trackers


def run(config: Config, origin: Mapping[str, str]) -> Path:
    """Train as ``config`` says, or go on with a run that was stopped; returns the run folder.

    Args:
        config: from :func:`finetune.config.parse`.
        origin: where each value that is not a default came from.

    Raises:
        FinetuneError: for everything that the person can mend; on every rank when it is on one.
        Interrupted: a signal or ``train.max_hours`` ended it after a checkpoint, on every rank.
    """
    started, startup = time.monotonic(), Startup(process_start())
    startup.done("imports")
    validate(config)
    datasets.disable_progress_bars()
    launch = find_launch()
    end_with_launcher()
    check_before_start(launch)
    accelerator = build_accelerator()
    check_connected(launch, accelerator)
    startup.done("launch")
    output_dir, interrupted = _train(config, origin, launch, accelerator, started, startup)
    disconnect(accelerator)
    if interrupted is not None:
        raise interrupted
    return output_dir


def _train(
    config: Config,
    origin: Mapping[str, str],
    launch: Launch,
    accelerator: Accelerator,
    started: float,
    startup: Startup,
) -> tuple[Path, Interrupted | None]:
    if is_restarted():  # what is in the run folder is this job's own
        config = replace(config, train=replace(config.train, overwrite=False))
    threads = use_all_cores(launch)
    console = make_console(visible=accelerator.is_main_process)

    origin_of_accumulation = origin.get("train.gradient_accumulation_steps", "the run config")
    accumulation, accumulation_source = resolve_accumulation(
        launch, config.train.gradient_accumulation_steps, origin_of_accumulation
    )
    sizes = resolve_batch_sizes(
        config.train.per_device_train_batch_size,
        accumulation,
        config.train.global_batch_size,
        accelerator.num_processes,
        accumulation_source,
    )
    metric = choose_best_metric(config.eval, config.data.problem_type)
    output_dir = on_main_process(accelerator, lambda: choose_output_dir(config, job_start(), is_restarted()))
    resumable = on_main_process(accelerator, lambda: find_resumable(config, output_dir, console))

    splits = first_on_each_node(accelerator, lambda: read_splits(config.data, config.train.seed))
    identity = identify(config, splits, sizes)
    if resumable is not None:
        refuse_another_run(resumable, identity)
        if is_finished(resumable, output_dir):
            print_plan(
                console, {"finished": f"{output_dir}: {resumable.stop_reason}; --train.overwrite true starts anew"}
            )
            return output_dir, None
    class_weights = on_every_process(
        accelerator,
        lambda: resolve_class_weights(config.data.class_weights, splits.labels.names, splits.train_labels),
    )
    startup.done("rows")
    metrics = on_every_process(accelerator, lambda: build_metrics(config.eval, splits, metric))
    startup.done("metrics")
    set_seed(config.train.seed)  # before the model, so that a new head starts from the same weights on every rank
    loaded = on_every_process(accelerator, lambda: load(config, splits))
    inputs = input_settings(config.data, loaded)
    if resumable is not None:
        on_every_process(accelerator, lambda: load_weights(loaded.model, resumable, inputs))
    startup.done("model")
    train_texts, dev_texts = first_on_each_node(accelerator, lambda: tokenize_splits(splits, loaded, config.data))
    startup.done("tokens")
    check = on_main_process(accelerator, lambda: check_splits(splits, train_texts, dev_texts, loaded, config.data))
    startup.done("data check")
    set_seed(config.train.seed + accelerator.process_index)  # or every rank would drop out the same units

    length = training_length(
        len(train_texts),
        sizes.global_batch,
        config.train.num_train_epochs,
        config.train.max_steps,
        config.eval.evals_per_epoch,
    )
    examples = Examples(train_texts, splits.train_labels, example_weights(splits.train_labels, class_weights))
    dev_examples = Examples(dev_texts, splits.dev_labels)
    loaded.model.to(accelerator.device)
    if accelerator.device.type == "cpu":
        use_fast_dropout(loaded.model)
    packing = on_every_process(
        accelerator,
        lambda: resolve_packing(
            config.train.packing,
            loaded.model,
            loaded.tokenizer,
            [examples, dev_examples],
            sizes,
            accelerator.autocast,
            is_compiled=is_compiled(accelerator),
        ),
    )
    startup.done("packing")
    recalled = None
    if config.model.freeze_encoder:
        print_plan(console, {"frozen encoder": "its outputs are computed once, or found in the cache"})
        recalled = compute_features(
            accelerator,
            loaded.model,
            loaded.tokenizer,
            [examples, dev_examples],
            packing=packing.rows,
            batch_size=config.eval.per_device_eval_batch_size,
            cache_dir=config.data.cache_dir,
            local_rank=accelerator.local_process_index,
            local_processes=local_world_size(),
        )
        examples, dev_examples = recalled or (examples, dev_examples)
        startup.done("frozen encoder")
    rate, rate_origin = resolve_learning_rate(config.optim, sizes.global_batch, config.model.freeze_encoder)
    optimizer = build_optimizer(loaded.model, config.optim, rate, accelerator.mixed_precision)
    schedule = LearningRateSchedule(optimizer, config.optim, length.total_steps, metric.greater_is_better)
    model, prepared_optimizer = accelerator.prepare(loaded.model, optimizer)
    if isinstance(model, DistributedDataParallel):
        compress_gradients(model, config.train.gradient_compression)
        model.forward_sync_buffers = False  # no buffer of these models changes: a broadcast each step for nothing
    bare_model = accelerator.unwrap_model(model, keep_fp32_wrapper=True)
    losses = training_loss(config, class_weights, accelerator.device)
    if config.train.auto_micro_batch:
        asked = sizes.per_device
        collate = Collator(examples, loaded.tokenizer, packing.rows)
        sizes = fitting_micro_batch(accelerator, model, losses, collate, sizes)
        if sizes.per_device != asked:
            accumulation_source = f"train.auto_micro_batch: {asked} per device do not fit into memory"

    record = launch_record(
        run_id=on_main_process(accelerator, lambda: run_id_of(output_dir, config.train.overwrite)),
        profile=launch.profile,
        sizes=sizes,
        accumulation_source=accumulation_source,
        num_machines=accelerator.num_processes // local_world_size(),
        mixed_precision=accelerator.mixed_precision,
        device=accelerator.device.type,
        device_name=device_name(accelerator.device),
        threads=threads,
        seed=config.train.seed,
    )
    throughput = Throughput()
    snapshots = Snapshots(
        accelerator=accelerator,
        output_dir=output_dir,
        config=config.checkpoint,
        identity=identity,
        loaded=loaded,
        inputs=inputs,
        optimizer=optimizer,
        schedule=schedule,
        throughput=throughput,
        started=started,
        in_background=accelerator.device.type == "cuda",
    )
    state = TrainState()
    if resumable is not None:
        state = on_every_process(accelerator, lambda: snapshots.restore(resumable))
    on_main_process(accelerator, lambda: start_run_folder(output_dir, config, record))
    on_main_process(accelerator, lambda: write_json(output_dir / "data_check.json", check.as_dict()))
    if resumable is not None:
        on_main_process(accelerator, lambda: snapshots.tidy(resumable, state))
    trackers = open_trackers(accelerator, config, output_dir, record, resumable)
    deadline = None if config.train.max_hours is None else started + 3600 * config.train.max_hours
    with trackers, TrainingProgress(console, length.total_steps) as progress:
        rate_plan = f"{rate:g} at its peak ({rate_origin}), {config.optim.lr_scheduler_type}"
        rate_plan += f" after {schedule.warmup_steps} steps of warm-up"
        plan = describe_plan(config, splits, train_texts, dev_texts, loaded, length, rate_plan, record, check)
        plan |= {"precision": resolve_precision()[1], "packing": packing.describe()}
        if config.model.freeze_encoder:
            plan["frozen encoder"] = (
                "the head alone is computed, from the outputs of the encoder"
                if recalled
                else "its outputs cannot take the place of texts here, so it is computed in every epoch"
            )
        startup.done("the rest")
        plan["started in"] = startup.describe()
        plan |= {} if resumable is None else {"going on": resumable.describe(accelerator.num_processes)}
        print_plan(console, {**plan, "tracking": trackers.describe(), "run folder": str(output_dir)})
        training = Training(
            accelerator=accelerator,
            model=model,
            bare_model=bare_model,
            optimizer=prepared_optimizer,
            schedule=schedule,
            train_loader=TrainLoader(
                examples,
                loaded.tokenizer,
                sizes,
                rank=accelerator.process_index,
                seed=config.train.seed,
                device=accelerator.device,
                packing=packing.rows,
                pad_to_multiple_of=FEW_SHAPES if is_compiled(accelerator) else MULTIPLE_OF,
            ),
            eval_loader=EvalLoader(
                dev_examples,
                loaded.tokenizer,
                config.eval.per_device_eval_batch_size,
                rank=accelerator.process_index,
                num_processes=accelerator.num_processes,
                device=accelerator.device,
                packing=packing.rows,
                pad_to_multiple_of=FEW_SHAPES if is_compiled(accelerator) else MULTIPLE_OF,
            ),
            metrics=metrics,
            trackers=trackers,
            progress=progress,
            stop_requests=StopRequests(deadline),
            finite_watch=FiniteWatch(lambda rows: [splits.train.where(int(row)) for row in rows]),
            keep_best=snapshots.keep_best,
            save_checkpoint=snapshots.save,
            example_losses=losses,
            problem_type=config.data.problem_type,
            total_steps=length.total_steps,
            evaluation_steps=length.evaluation_steps,
            logging_steps=config.train.logging_steps,
            save_every_steps=config.checkpoint.save_every_steps,
            skip_nonfinite=config.train.on_nonfinite == "skip",
            max_grad_norm=config.train.max_grad_norm,
            metric_for_best_model=metric.name,
            greater_is_better=metric.greater_is_better,
            early_stopping_patience=config.eval.early_stopping_patience,
            throughput=throughput,
        )
        try:
            with training.stop_requests:  # also while results are written, which a signal must not cut short
                with out_of_memory_explained(sizes):
                    train(training, state)
                snapshots.wait()
                peak_memory = peak_memory_bytes(accelerator)
                assert snapshots.best is not None  # the last step is always evaluated
                results = Results(
                    splits,
                    training,
                    state,
                    snapshots.best,
                    record,
                    peak_memory_bytes=peak_memory,
                    wall_seconds=snapshots.wall_seconds,
                    checkpoint_bytes=snapshots.size,
                    startup_seconds=startup.seconds,
                )
                on_main_process(accelerator, lambda: results.publish(console, output_dir))
        except Interrupted as interrupted:
            snapshots.wait()
            trackers.suspend()
            print_plan(console, {"stopped": how_to_go_on(interrupted, state, length)})
            return output_dir, interrupted.with_traceback(None)  # which would hold the model
    return output_dir, None


def how_to_go_on(interrupted: Interrupted, state: TrainState, length: TrainingLength) -> str:
    """One line for the person at the terminal, or for whoever reads the log of a job that was ended."""
    return (
        f"by {interrupted.reason} after step {state.global_step} of {length.total_steps}, with a checkpoint: "
        "the same command with the same train.output_dir goes on from there"
    )


def find_resumable(config: Config, output_dir: Path, console: Console) -> Resumable | None:
    """The checkpoint that this run goes on from, if any."""
    if config.train.overwrite:
        return None
    # A job that its launcher restarts goes on from what it has saved itself, whatever it started from.
    has_own = is_restarted() and bool(saved_steps(output_dir / "checkpoints"))
    resume = "auto" if has_own else config.checkpoint.resume
    return find_checkpoint(resume, output_dir, lambda text: print_warning(console, text))


def is_finished(resumable: Resumable, output_dir: Path) -> bool:
    """Whether the run has come to its end and has shown its results; the page is the last of them."""
    return resumable.stop_reason is not None and (output_dir / REPORT_FILE).is_file()


def identify(config: Config, splits: Splits, sizes: BatchSizes) -> Identity:
    """What a checkpoint must have in common with this run."""
    rows = {"train": splits.train.dataset._fingerprint, "dev": splits.dev.dataset._fingerprint}
    return Identity.of(config, rows, splits.labels.names, sizes.global_batch)


@dataclass(frozen=True)
class BestMetric:
    """What picks the best model."""

    name: str
    greater_is_better: bool


def choose_best_metric(config: EvalConfig, problem_type: ProblemType) -> BestMetric:
    """``eval.metric_for_best_model`` and its direction, or what fits the kind of problem."""
    name = (config.metric_for_best_model or default_metric_for_best_model(problem_type)).removeprefix("eval/")
    return BestMetric(name, greater_is_better(name, config.greater_is_better))


def build_metrics(config: EvalConfig, splits: Splits, best: BestMetric) -> Metrics:
    """The metrics of ``eval.metrics``; the one that picks the best model is always among them."""
    problem_type = splits.labels.problem_type
    names = list(config.metrics if config.metrics is not None else DEFAULT_METRICS[problem_type])
    if best.name != "loss" and best.name not in names:
        names.append(best.name)
    return Metrics(names, problem_type=problem_type, num_labels=splits.labels.num_labels)


def training_loss(
    config: Config, class_weights: NDArray[np.float32] | None, device: torch.device
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The loss of each training example from its logits and label; dev losses are neither weighted nor smoothed."""
    return partial(
        example_losses,
        problem_type=config.data.problem_type,
        class_weights=None if class_weights is None else torch.from_numpy(class_weights).to(device),
        label_smoothing=config.train.label_smoothing,
    )


def load(config: Config, splits: Splits) -> LoadedModel:
    """The checkpoint with a head for these labels."""
    return load_model(
        config.model.name_or_path or "",
        label_names=splits.labels.names,
        problem_type=config.data.problem_type,
        max_length=config.data.max_length,
        freeze_encoder=config.model.freeze_encoder,
    )


def tokenize_splits(splits: Splits, loaded: LoadedModel, config: DataConfig) -> tuple[TokenizedTexts, TokenizedTexts]:
    """Token ids of both splits."""
    train_texts, dev_texts = (
        tokenize(
            table.dataset,
            loaded.tokenizer,
            max_length=loaded.max_length,
            truncation=config.truncation,
            cache_dir=config.cache_dir,
        )
        for table in (splits.train, splits.dev)
    )
    return train_texts, dev_texts


def check_splits(
    splits: Splits, train_texts: TokenizedTexts, dev_texts: TokenizedTexts, loaded: LoadedModel, config: DataConfig
) -> DataCheck:
    """A look at the rows before they are trained on, without the baselines."""
    return check_data(
        {"train": splits.train, "dev": splits.dev},
        {"train": splits.train_labels, "dev": splits.dev_labels},
        splits.labels,
        tokens={"train": train_texts, "dev": dev_texts},
        tokenizer=loaded.tokenizer,
        max_length=loaded.max_length,
        cache_dir=config.cache_dir,
    )


def input_settings(config: DataConfig, loaded: LoadedModel) -> InputSettings:
    """What a saved model has to remember about its inputs."""
    return InputSettings(
        text_column=config.text_column,
        text_pair_column=config.text_pair_column,
        label_column=config.label_column,
        max_length=loaded.max_length,
        problem_type=config.problem_type,
        label_separator=config.label_separator,
        truncation=config.truncation,
    )


def open_trackers(
    accelerator: Accelerator, config: Config, output_dir: Path, record: LaunchRecord, resumable: Resumable | None
) -> Trackers:
    """Real trackers on rank 0, silent ones elsewhere; they drop what was logged after the checkpoint."""
    state = resumable.content["train_state"] if resumable else {}
    opened: list[Trackers] = []
    on_main_process(
        accelerator,
        lambda: opened.append(
            start_trackers(
                config.tracking.trackers,
                output_dir=output_dir,
                config={**config.to_dict(), "launch": asdict(record)},
                project=config.tracking.project,
                run_name=config.tracking.run_name or output_dir.name,
                group=config.tracking.group,
                tags=config.tracking.tags,
                run_id=record.run_id,
                resumed_step=state.get("global_step"),
                evaluated_step=state.get("evaluated_step"),
            )
        ),
    )
    return opened[0] if opened else Trackers()


def device_name(device: torch.device) -> str:
    """A GPU's own name, else CPU or the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def peak_memory_bytes(accelerator: Accelerator) -> int:
    """Largest peak of any rank: memory allocated on a GPU, resident memory of a CPU process; a collective."""
    if accelerator.device.type == "cuda":
        own = torch.cuda.max_memory_allocated()
    else:
        import resource

        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(accelerator.gather(torch.tensor([own], device=accelerator.device)).max())
