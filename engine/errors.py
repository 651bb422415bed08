"""The engine's error tree: everything it raises on purpose."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error the engine raises on purpose."""


class ConfigError(EngineError, ValueError):
    """A setting is out of range or names something that does not exist."""


class CheckpointError(EngineError, ValueError):
    """A checkpoint is damaged, incomplete, or of an architecture that is not known; names the tensor or key."""


class RequestRefused(EngineError, ValueError):
    """A request was turned away at the door; the pool and the queue are as before."""


class NoProgress(EngineError):
    """Work is left, but an iteration forwarded no row: the schedule would never end."""


class AuditError(EngineError):
    """An invariant of the engine's state is broken; the message names what and where."""


class NumericsError(EngineError):
    """This machine computes a row differently in different company; names the operation and shape."""


class KernelsUnavailable(EngineError):
    """The native kernels cannot be built or used here; says why. The torch model runs everywhere."""
