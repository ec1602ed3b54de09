"""`deepreduce COMMAND ...`: each command is a module with `add(commands)`, which names its arguments and the function that runs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import ConfigError, DeepReduceError, FormatError
from . import benching, patching, reproducing, show, training, transcode, warm

OK, FAILED, USAGE, BAD_MESSAGE = 0, 1, 2, 3

_EPILOG = """\
examples:
  deepreduce encode gradient.npz message.dr --codec topr:0.01/bitmap/fp16
  deepreduce inspect message.dr
  deepreduce decode message.dr restored.npz
  deepreduce codecs
  deepreduce diff step-100/ step-200/ 100-200.patch
  deepreduce patch step-100/ 100-200.patch step-200/
  deepreduce paper figure10 --report out

exit codes: 0 done, 1 a file or tensor cannot be used, 2 wrong arguments or spec, 3 not a valid message
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    whole = argparse.ArgumentParser(
        prog="deepreduce",
        description="Compressed communication of sparse tensors.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"deepreduce {__version__}")
    commands = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (transcode, show, patching, warm, training, benching, reproducing):
        module.add(commands)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; problems are told on stderr, in one line but for the traceback of a worker."""
    args = parser().parse_args(arguments)
    try:
        args.run(args)
    except DeepReduceError as error:
        print(f"deepreduce: {error}", file=sys.stderr)
        if isinstance(error, ConfigError):
            return USAGE
        return BAD_MESSAGE if isinstance(error, FormatError) else FAILED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away, as `head` does
        return FAILED
    return OK


if __name__ == "__main__":
    sys.exit(main())
