"""What can go wrong, as one exception tree.

A :class:`FinetuneError` is a problem that the person running the command can mend. Its message names the place
(file and line, or the setting), the offending value and the remedy. The command line prints it without a traceback
and exits with code 2; any other exception is a bug of ours and keeps its traceback.
"""


class FinetuneError(Exception):
    """Base of every error that a user can cause and mend."""


class ConfigError(FinetuneError):
    """A setting is unknown, of the wrong type, or contradicts another one."""


class DataError(FinetuneError):
    """A data file cannot be read exactly as it stands, or its contents cannot be trained on."""


class LaunchError(FinetuneError):
    """The processes, devices or precision asked for are not what this machine can give."""


class CheckpointError(FinetuneError):
    """A checkpoint or model folder is missing, damaged, or belongs to another run."""


class TrainingError(FinetuneError):
    """Training cannot go on: a loss that is not a number, memory used up, a rank that failed."""


class Interrupted(Exception):
    """Training stopped on every process before its end, after a checkpoint; not a fault.

    ``reason`` is the name of the signal or of the setting; ``exit_code`` is what a shell expects after it.
    """

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.exit_code = exit_code
