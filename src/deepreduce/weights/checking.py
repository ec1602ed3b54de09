"""Whether weights are what a patch was made from, and what is wrong where they are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Literal

from ..errors import WrongBaseError
from .comparing import digest_of
from .digests import CHECK_BYTES, Entry, model_digest
from .records import MARK_BYTES, Action, Header, TensorRecord
from .sources import Source

State = Literal["base", "result"]


def entries(source: Source, threads: int = 1, progress: Callable[[int], None] = lambda size_bytes: None) -> list[Entry]:
    """The digests of all tensors of a source."""

    def entry(name: str) -> Entry:
        return (name, *source.describe(name), digest_of(source, name, progress))

    if threads == 1:
        return [entry(name) for name in source.names]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(entry, source.names))


def state_of(header: Header, found: Sequence[Entry]) -> State:
    """Whether these are the base or the result of a patch; `WrongBaseError` where they are neither."""
    actual = model_digest(found)
    if actual == header.base:
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


def check_chain(headers: Sequence[Header]) -> None:
    """Refuse patches that do not follow one another."""
    for number, (before, after) in enumerate(pairwise(headers), 1):
        if after.base != before.result:
            raise WrongBaseError("out of order", f"patch {number + 1} is not made from the result of patch {number}")


def _explained(header: Header, found: Sequence[Entry]) -> WrongBaseError:
    base = {record.name: record for record in header.tensors if record.in_base}
    here = {name: (kind, shape, digest[:CHECK_BYTES]) for name, kind, shape, digest in found}
    for names, problem in ((base.keys() - here.keys(), "there is no"), (here.keys() - base.keys(), "the base has no")):
        if names:
            return WrongBaseError("wrong base", f"{problem} tensor {min(names)!r}{_and_more(len(names))}")
    differ = [record for name, record in base.items() if _differs(record, *here[name])]
    if not differ:
        return WrongBaseError("wrong base", "a tensor has another shape or dtype than the base")
    touched = [record for record in differ if record.action == Action.CHANGED and record.result_check == here[record.name][2]]
    if len(touched) == len(differ):
        return WrongBaseError(
            "applied in part", f"{len(touched)} of {sum(r.action == Action.CHANGED for r in base.values())} changed tensors"
        )
    return WrongBaseError(
        "wrong base", f"tensor {differ[0].name!r}{_and_more(len(differ))} of {len(base)} differs from the base of this patch"
    )


def _differs(record: TensorRecord, kind: object, shape: object, check: bytes) -> bool:
    if record.action == Action.REPLACED:  # the record tells what it becomes
        return record.base_check != check
    return (record.kind, record.shape, record.base_check) != (kind, shape, check)


def _and_more(count: int) -> str:
    return f" and {count - 1} more" if count > 1 else ""
