"""Every error this package raises on purpose.

::

    DeepReduceError
    ├── ConfigError     (ValueError)   a codec or a spec string is wrong; raised when it is built
    ├── InputError      (ValueError)   the tensor cannot be encoded as asked; nothing was changed
    │   └── WrongBaseError             a patch does not belong on these weights; nothing was changed
    ├── FileError       (OSError)      a file cannot be read or written as asked
    ├── PeerError       (RuntimeError) another worker failed, is gone, or is not where this one is
    └── FormatError     (ValueError)   the bytes are not a message that can be decoded
        ├── TruncatedError (EOFError)  the bytes end too early
        ├── CorruptError               the bytes contradict themselves or their checksum
        └── VersionError               the message needs another version, or a codec that is not installed
"""


class DeepReduceError(Exception):
    """Root of the tree: ``except dr.DeepReduceError`` catches all that follow."""


class ConfigError(DeepReduceError, ValueError):
    """A codec parameter or a spec string is wrong; the message lists what is allowed."""


class InputError(DeepReduceError, ValueError):
    """The given tensor cannot be encoded as asked."""


class WrongBaseError(InputError):
    """A patch does not belong on these weights.

    `reason` is ``wrong base``, ``already applied``, ``applied in part`` or ``out of order``; ``deepreduce verify --expect result`` has
    ``not applied`` too.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class FileError(DeepReduceError, OSError):
    """A file cannot be read or written as asked."""


class PeerError(DeepReduceError, RuntimeError):
    """Another worker failed, is gone, or is not where this one is; the message says which one, and why."""


class FormatError(DeepReduceError, ValueError):
    """The given bytes cannot be decoded."""


class TruncatedError(FormatError, EOFError):
    """The bytes end before the message does."""


class CorruptError(FormatError):
    """The bytes contradict themselves, their checksum or their bounds."""


class VersionError(FormatError):
    """The message was written by a newer version, or needs a codec that is not installed here."""
