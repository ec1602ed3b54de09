"""The methods of training that a plan names: what is exchanged, how often, and by which codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...errors import ConfigError
from ...step.schedule import Schedule

Kind = Literal["gradients", "dgc", "local"]
FP16_HOOK = "fp16_hook"
UNCOMPRESSED = ("dense", FP16_HOOK)
"""The specs of runs that our codecs have no part in: the framework's allreduce, and PyTorch's hook for half precision before it."""

METHODS = (
    "gradients (compressed by a DDP hook), dgc:STEPS (the same with momentum correction, and density warm-up over STEPS steps), updates "
    "(compressed changes after every optimizer step) or local:EVERY[,warmup=STEPS][,delay=D][,fragments=N][,outer=RATE][,momentum=M] "
    "(changes after EVERY steps, and after each of the first STEPS; an exchange runs beside D steps; N parts of the model take turns)"
)
_COUNTS = {"warmup", "delay", "fragments"}


@dataclass(frozen=True)
class MethodSpec:
    """One run of a plan. `steps` are those of dgc's warm-up or between syncs, `outer` is the rate and the Nesterov momentum.

    `warmup`, `delay` and `fragments` are those of `LocalSteps`.

    As text: the codec alone for gradients, else the method before it.

    >>> MethodSpec.parse("local:10,outer=0.7,momentum=0.6 none/all/lloyd:2")
    MethodSpec(kind='local', spec='none/all/lloyd:2', steps=10, outer=(0.7, 0.6), warmup=0, delay=0, fragments=1)
    >>> MethodSpec.parse("updates topr:0.01/rice/qsgd").outer is None
    True
    """

    kind: Kind
    spec: str
    steps: int = 1
    outer: tuple[float, float] | None = None
    warmup: int = 0
    delay: int = 0
    fragments: int = 1

    @classmethod
    def parse(cls, text: str) -> MethodSpec:
        """Return what a text of a plan names."""
        method, _, spec = text.rpartition(" ")
        name, _, rest = method.partition(":")
        first, *pairs = rest.split(",")
        try:
            given = {key: float(number) for key, number in (pair.split("=") for pair in pairs)}
            if len(given) < len(pairs):
                raise ValueError(f"{method} gives an option twice")
            if name in ("", "gradients") and not rest:
                return cls("gradients", spec)
            if name == "updates" and not rest:
                return cls("local", spec)
            if name == "dgc" and not given and int(first) > 0:
                return cls("dgc", spec, int(first))
            if name == "local" and int(first) > 0 and given.keys() <= {"outer", "momentum", *_COUNTS}:
                counts = {key: int(given.pop(key)) for key in _COUNTS & given.keys() if given[key] >= 0 and given[key].is_integer()}
                outer = (given.get("outer", 1.0), given.get("momentum", 0.0)) if given else None
                if not _COUNTS & given.keys():
                    return cls("local", spec, int(first), outer, **counts)
        except ValueError as error:
            raise ConfigError(f"a method is {METHODS}; got {method!r}") from error
        raise ConfigError(f"a method is {METHODS}; got {method!r}")

    def check(self, precision: str, memory: str) -> None:
        """Raise `ConfigError` where there is no such run in this precision, with this memory."""
        if self.kind == "local" and precision != "fp32":
            raise ConfigError(f"updates and local steps train in fp32, got {precision}")
        if self.delay >= self.steps or not 1 <= self.fragments <= self.steps:
            allowed = "delay is below the steps between two syncs, fragments are at least 1 and at most those steps"
            raise ConfigError(f"{allowed}; got delay={self.delay}, fragments={self.fragments} in local:{self.steps}")
        if self.kind != "local" and self.spec not in UNCOMPRESSED and memory == "parameters":
            raise ConfigError(f"memory parameters is for updates and local steps, got {self.kind} of {self.spec}")
        if self.kind == "dgc" and memory == "none":
            raise ConfigError("dgc keeps its momentum in the residual memory, got memory none")
        if self.kind == "dgc":
            Schedule(self.spec, self.steps)


def method_text(method: str, spec: str) -> str:
    """Return the text of a codec by a method; dense is dense by any.

    >>> method_text("gradients", "topr:0.01/rice/qsgd"), method_text("local:30", "topr:0.01/rice/qsgd"), method_text("updates", "dense")
    ('topr:0.01/rice/qsgd', 'local:30 topr:0.01/rice/qsgd', 'dense')
    """
    text = spec if method == "gradients" or spec == "dense" else f"{method} {spec}"
    MethodSpec.parse(text)
    return text
