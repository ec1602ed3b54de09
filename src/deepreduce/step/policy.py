"""Which tensor goes by which codec: policies are objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Protocol, runtime_checkable

from ..errors import ConfigError
from ..parameters import natural, shown
from ..pipeline import DeepReduce, Encodable, encode_many, parse
from ..source import Source


class Policy(Protocol):
    """Anything that names the codec for a tensor."""

    def codec_for(self, name: str, source: Source) -> DeepReduce:
        """Return the codec for this tensor."""
        ...


@runtime_checkable
class CodecByStep(Protocol):
    """Anything that names the codec of a step, such as a `Schedule`."""

    def codec_at(self, step: int) -> DeepReduce:
        """Return the codec of this step."""
        ...


_DENSE = parse("dense")

Spec = str | DeepReduce | Policy | CodecByStep
"""What a user may give as a spec."""


def policy_of(spec: Spec, small_numel: int) -> Policy | ByStep:
    """Return the policy for a spec: a policy as it is, a codec for tensors of `small_numel` elements or more.

    >>> policy_of("topr:0.01/rice/qsgd", 1024).small == parse("dense")
    True
    """
    small_numel = natural(small_numel, "small_tensor_numel")
    if isinstance(spec, CodecByStep) and not isinstance(spec, type):
        return ByStep(small_numel, spec)
    if isinstance(spec, str | DeepReduce):
        return BySize(small_numel, small=_DENSE, large=_parsed(spec))
    if isinstance(spec, type) or not callable(getattr(spec, "codec_for", None)):
        raise ConfigError(f"a spec is a string, a DeepReduce, a Schedule or an object with codec_for(name, source), got {shown(spec)}")
    return spec


def policy_at(policy: Policy | ByStep | ExceptDense, step: int) -> Policy:
    """Return the policy of a step."""
    return policy.at(step) if isinstance(policy, ByStep | ExceptDense) else policy


def title(policy: Spec | ByStep) -> str:
    """Return the name of a policy, the same on all ranks."""
    # The text of an object without one of its own would hold an address.
    return str(policy) if isinstance(policy, str | DeepReduce) or is_dataclass(policy) else type(policy).__name__


def _parsed(spec: str | DeepReduce) -> DeepReduce:
    return spec if isinstance(spec, DeepReduce) else parse(spec)


@dataclass(frozen=True)
class BySize:
    """Tensors below `numel` elements go by `small`, all others by `large`; a spec string will do for either.

    >>> import deepreduce as dr, numpy as np
    >>> policy = dr.BySize(1024, small=dr.parse("dense"), large=dr.parse("topr:0.01/raw/fp16"))
    >>> blob = policy.encode_many({"weight": np.ones(5000, np.float32), "bias": np.ones(10, np.float32)})
    >>> {name: info.spec for name, info in dr.inspect(blob).tensors.items()}
    {'weight': 'topr:0.01/raw/fp16', 'bias': 'none/all/raw'}
    """

    numel: int
    small: DeepReduce
    large: DeepReduce

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", natural(self.numel, "BySize's numel"))
        object.__setattr__(self, "small", _parsed(self.small))
        object.__setattr__(self, "large", _parsed(self.large))

    def codec_for(self, name: str, source: Source) -> DeepReduce:
        """Return the codec for this tensor."""
        return self.small if source.space.numel < self.numel else self.large

    def encode_many(self, gradients: Mapping[str, Encodable], seed: int = 0) -> bytes:
        """One message in which each tensor goes by its own codec."""
        return encode_many(self.codec_for, gradients, seed)


@dataclass(frozen=True)
class ByStep:
    """Tensors below `numel` elements travel as they are, all others by the codec that a schedule has for the step."""

    numel: int
    schedule: CodecByStep

    def __str__(self) -> str:
        return f"ByStep({self.numel}, {title(self.schedule)})"

    def at(self, step: int) -> BySize:
        """Return the policy of this step."""
        return BySize(self.numel, small=_DENSE, large=self.schedule.codec_at(step))


@dataclass(frozen=True)
class ExceptDense:
    """Another policy for all tensors but those named, which travel as they are.

    >>> import numpy as np
    >>> from deepreduce.source import as_source
    >>> policy = ExceptDense(policy_of("topr:0.01/raw/raw", 0), frozenset({"norm.running_mean"})).at(step=0)
    >>> [str(policy.codec_for(name, as_source(np.ones(9)))) for name in ("weight", "norm.running_mean")]
    ['topr:0.01/raw/raw', 'none/all/raw']
    """

    policy: Policy | ByStep
    names: frozenset[str]

    def __str__(self) -> str:
        return f"{title(self.policy)} except {len(self.names)} dense"

    def at(self, step: int) -> ExceptDense:
        """Return the policy of this step."""
        return ExceptDense(policy_at(self.policy, step), self.names)

    def codec_for(self, name: str, source: Source) -> DeepReduce:
        """Return the codec for this tensor; one that changes from step to step is asked by `at` before."""
        assert not isinstance(self.policy, ByStep)
        return _DENSE if name in self.names else self.policy.codec_for(name, source)
