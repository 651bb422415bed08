"""The harness's error tree; each class carries the exit code that the command line ends with."""

from __future__ import annotations


class BatchbenchError(Exception):
    """Base of every error the harness raises on purpose. Exit code 1: the run failed."""

    exit_code = 1


class UsageError(BatchbenchError):
    """The command, the scenario or a setting is wrong; nothing was run or written."""

    exit_code = 2


class ScenarioError(UsageError):
    """A scenario file that cannot be read or does not validate."""


class TraceError(UsageError):
    """A trace file that cannot be read, is of no known format, or holds what no rule covers."""


class RequestRefused(UsageError):
    """The engine turned a request away at the door; the message says which and why."""


class EngineFailed(BatchbenchError):
    """The engine raised, or stopped with work left."""


class OutcomeRefused(BatchbenchError):
    """An engine reported an iteration that cannot have happened."""


class CountsDiffer(OutcomeRefused):
    """A repetition counted otherwise than the first, so the counts are no facts, and there are no timings."""


class ResultError(UsageError):
    """A result folder is missing, incomplete or of another schema version."""


class TextsDiffer(BatchbenchError):
    """Two pools produced different text, so there are no timings."""

    exit_code = 4


class Incomparable(BatchbenchError):
    """Two results of different workloads, meanings or engines: a difference between them would say nothing."""

    exit_code = 5
