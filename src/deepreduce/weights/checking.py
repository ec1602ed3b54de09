"""Whether weights are what a patch was made from, and what is wrong where they are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Literal

from ..errors import WrongBaseError
from .comparing import digest_of
from .digests import CHECK_BYTES, Entry, model_digest
from .kinds import Kind, Shape
from .records import MARK_BYTES, Action, Header
from .sources import Progress, TensorSource, silent

State = Literal["base", "result"]
Described = Mapping[str, tuple[Kind, Shape]]


def entries(source: TensorSource, threads: int = 1, progress: Progress = silent) -> list[Entry]:
    """The digests of all tensors of a source."""
    if threads == 1:
        return [entry(source, name, progress) for name in source.names]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda name: entry(source, name, progress), source.names))


def entry(source: TensorSource, name: str, progress: Progress = silent) -> Entry:
    """The digest of a tensor, with its name, dtype and shape."""
    return (name, *source.describe(name), digest_of(source, name, progress))


def state_of(header: Header, found: Sequence[Entry]) -> State:
    """Whether these are the base or the result of a patch; `WrongBaseError` where they are neither."""
    actual = model_digest(found)
    if actual == header.base:
        check_tensors(header, {name: (kind, shape) for name, kind, shape, _ in found})
        return "base"
    if actual == header.result:
        return "result"
    if actual[:MARK_BYTES] in header.history:
        behind = header.history.index(actual[:MARK_BYTES]) + 1
        raise WrongBaseError(
            "out of order", f"the weights are {behind} version(s) before the base of this patch: apply what is missing first"
        )
    raise _explained(header, found)


def check_base(header: Header, found: Sequence[Entry]) -> None:
    """Refuse weights that are not the base of a patch."""
    if state_of(header, found) == "result" and header.base != header.result:
        raise WrongBaseError("already applied", "the weights are the result of this patch")


def check_tensors(header: Header, here: Described) -> None:
    """Refuse other names than those of the base, and other dtypes or shapes where the patch builds on what a tensor is."""
    base = {record.name: record for record in header.tensors if record.in_base}
    for names, problem in ((base.keys() - here.keys(), "there is no"), (here.keys() - base.keys(), "the base has no")):
        if names:
            raise WrongBaseError("wrong base", f"{problem} tensor {min(names)!r}{_and_more(len(names))}")
    for name, record in base.items():
        if record.action in (Action.UNCHANGED, Action.CHANGED) and here[name] != (record.kind, record.shape):
            raise WrongBaseError("wrong base", f"tensor {name!r} has another shape or dtype than the base")


def check_chain(headers: Sequence[Header]) -> None:
    """Refuse patches that do not follow one another."""
    for number, (before, after) in enumerate(pairwise(headers), 1):
        if after.base != before.result:
            raise WrongBaseError("out of order", f"patch {number + 1} is not made from the result of patch {number}")
        check_tensors(after, {record.name: (record.kind, record.shape) for record in before.tensors if record.action != Action.REMOVED})


def _explained(header: Header, found: Sequence[Entry]) -> WrongBaseError:
    check_tensors(header, {name: (kind, shape) for name, kind, shape, _ in found})
    checks = {name: digest[:CHECK_BYTES] for name, _, _, digest in found}
    base = [record for record in header.tensors if record.in_base]
    differ = [record for record in base if record.base_check != checks[record.name]]
    if not differ:
        return WrongBaseError("wrong base", "a tensor that this patch replaces or removes has another shape or dtype than the base")
    touched = [record for record in differ if record.action == Action.CHANGED and record.result_check == checks[record.name]]
    if len(touched) == len(differ):
        return WrongBaseError("applied in part", f"{len(touched)} of {sum(r.action == Action.CHANGED for r in base)} changed tensors")
    return WrongBaseError(
        "wrong base", f"tensor {differ[0].name!r}{_and_more(len(differ))} of {len(base)} differs from the base of this patch"
    )


def _and_more(count: int) -> str:
    return f" and {count - 1} more" if count > 1 else ""
