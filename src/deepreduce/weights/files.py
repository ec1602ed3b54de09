"""Differences of checkpoints in files, in bounded memory: what the commands `diff`, `patch`, `verify` and `fold` do."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from pathlib import Path
from typing import IO

from ..errors import CorruptError, FileError, FormatError
from ..message import DEFAULT_MAX_NUMEL
from . import envelope
from .api import Mode, codec_of_mode, patched
from .applying import check_whole_numel
from .atomic import replacing
from .checking import State, check_base, check_chain, entries, state_of
from .checkpoints import open_checkpoint
from .comparing import Comparison, Origin
from .digests import hasher, model_digest
from .folding import fold_into
from .kinds import Array, Kind, Shape
from .opened import Patch
from .pool import default_threads
from .records import Header
from .sources import Progress, TensorSource, numel_of, silent

_SPOOLED_BYTES = 1 << 25


class SpoolSink:
    """Sections in two temporary files, which stay in memory as long as they are small."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.spools = [tempfile.SpooledTemporaryFile(_SPOOLED_BYTES, dir=str(folder)) for _ in range(2)]  # noqa: SIM115

    def group(self, section: bytes) -> None:
        """The next group."""
        self._write(0, section)

    def whole(self, section: bytes) -> None:
        """The next piece of a tensor that travels whole."""
        self._write(1, section)

    def _write(self, number: int, section: bytes) -> None:
        try:
            self.spools[number].write(section)
        except OSError as error:
            raise FileError(f"cannot write temporary files in {self._folder}: {error.strerror or error}") from error

    def write(self, target: Path, header: Header) -> None:
        """The patch, whole or not at all."""
        with replacing(target) as temporary, temporary.open("wb") as file:
            envelope.write_file(file, header, self.spools)

    def close(self) -> None:
        """Remove the temporary files."""
        for spool in self.spools:
            spool.close()


@contextmanager
def _sink(target: Path) -> Iterator[SpoolSink]:
    if target.is_dir():
        raise FileError(f"cannot write {target}: it is a folder")
    if not target.parent.is_dir():
        raise FileError(f"cannot write {target}: there is no folder {target.parent}")
    sink = SpoolSink(target.parent)
    try:
        yield sink
    finally:
        sink.close()


@contextmanager
def open_patches(paths: Sequence[Path]) -> Iterator[list[Patch]]:
    """The patches in these files, their checksums checked."""
    with ExitStack() as stack:
        yield [Patch.of_file(_opened(stack, path)) for path in paths]


def _opened(stack: ExitStack, path: Path) -> IO[bytes]:
    try:
        return stack.enter_context(path.open("rb"))
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error


def is_patch(path: Path) -> bool:
    """Whether a file begins as a patch does."""
    try:
        with path.open("rb") as file:
            return envelope.begins_as_patch(file)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error


def _check_target(target: Path, inputs: Sequence[Path]) -> None:
    """Refuse to write over what is read."""
    for path in inputs:
        if target.exists() and path.exists() and target.samefile(path):
            raise FileError(f"cannot write {target}: it is read here; give another name as the last argument")


def dense_bytes(path: Path) -> int:
    """Bytes of all tensors of a checkpoint."""
    source = open_checkpoint(path)
    return sum(kind.itemsize * prod(shape) for kind, shape in map(source.describe, source.names))


def diff_files(
    old: Path,
    new: Path,
    target: Path,
    *,
    mode: Mode = "conditional",
    index: str = "rice",
    after: Path | None = None,
    threads: int | None = None,
    progress: Progress = silent,
) -> Header:
    """Write a patch that turns the checkpoint `old` into `new`; `after` is the patch before it. Returns its header."""
    _check_target(target, [old, new, *([after] if after else [])])
    codec = codec_of_mode(mode, index)
    origin = Origin()
    if after is not None:
        with open_patches([after]) as (before,):
            origin = Origin.after(before.header)
    with _sink(target) as sink:
        comparison = Comparison(open_checkpoint(old), open_checkpoint(new), sink, codec, threads or default_threads(), progress)
        header = comparison.run(origin)
        sink.write(target, header)
    return header


class _Watched:
    """A source that keeps the digest of all that is read through it, in order."""

    def __init__(self, source: TensorSource, progress: Progress) -> None:
        self._source, self._progress = source, progress
        self._states = {name: hasher() for name in source.names}

    @property
    def names(self) -> Sequence[str]:
        return self._source.names

    def describe(self, name: str) -> tuple[Kind, Shape]:
        return self._source.describe(name)

    def read(self, name: str, start: int, stop: int) -> Array:
        part = self._source.read(name, start, stop)
        self._states[name].update(part.view("u1").data)
        self._progress(part.nbytes)
        return part

    def digest(self) -> bytes:
        """That of the model, once every tensor has been read."""
        return model_digest((name, *self.describe(name), state.digest()) for name, state in self._states.items())


class _Checked(_Watched):
    """A source of which nothing is kept that is not the promised result: it fails after its last part."""

    def __init__(self, source: TensorSource, progress: Progress, promised: bytes) -> None:
        super().__init__(source, progress)
        self._promised = promised
        self._left = numel_of(source)

    def read(self, name: str, start: int, stop: int) -> Array:
        part = super().read(name, start, stop)
        self._left -= part.size
        if self._left == 0 and self.digest() != self._promised:
            raise CorruptError("the result is not what the patch promises; nothing is written")
        return part


def patch_files(old: Path, paths: Sequence[Path], new: Path, *, max_numel: int = DEFAULT_MAX_NUMEL, progress: Progress = silent) -> None:
    """Write the checkpoint that patches, one after the other, make of `old`, in the layout of `old`.

    The base is checked before anything is written, the result before it gets its name. The tensors that a patch adds or replaces may
    have as many elements together as `old`, and `max_numel` more.
    """
    _check_target(new, [old, *paths])
    if new.is_file() and is_patch(new):
        raise FileError(f"{new} is a patch: give the name of the checkpoint to write as the last argument")
    base = open_checkpoint(old)
    base.check_target(new)
    with open_patches(paths) as opened:
        check_chain([patch.header for patch in opened])
        for patch in opened:
            check_whole_numel(patch.header, numel_of(base) + max_numel)
        check_base(opened[0].header, entries(base, 1, progress))
        base.write(new, _Checked(patched(base, opened), progress, opened[-1].header.result))


def verify_files(path: Path, patch: Path, *, progress: Progress = silent) -> State:
    """Whether a checkpoint is the base or the result of a patch; `WrongBaseError` where it is neither."""
    with open_patches([patch]) as (opened,):
        return state_of(opened.header, entries(open_checkpoint(path), 1, progress))


def fold_files(
    paths: Sequence[Path],
    target: Path,
    base: Path | None = None,
    *,
    mode: Mode | None = None,
    threads: int | None = None,
    max_numel: int = DEFAULT_MAX_NUMEL,
    progress: Progress = silent,
) -> Header:
    """Write one patch that does what these do one after the other, two at least; `max_numel` is that of `fold`. Returns its header."""
    if len(paths) < 2:
        raise FileError(f"nothing is written to {target}: fold takes two patches at least, and then the name of the file to write")
    _check_target(target, [*paths, *([base] if base else [])])
    source = None if base is None else open_checkpoint(base)
    with open_patches(paths) as opened, _sink(target) as sink:
        _check_not_next(target, opened)
        header = fold_into(opened, source, mode, sink, threads or default_threads(), max_numel, progress)
        sink.write(target, header)
    return header


def _check_not_next(target: Path, patches: Sequence[Patch]) -> None:
    """Refuse to write over the patch that follows the last one: the name of the file to write was forgotten."""
    if target.is_file() and is_patch(target):
        with suppress(FormatError), open_patches([target]) as (there,):
            if there.header.base == patches[-1].header.result != patches[0].header.base:
                raise FileError(f"{target} is the next patch: give the name of the file to write as the last argument")
