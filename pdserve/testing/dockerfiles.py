"""Reading Dockerfiles, as far as ours go: instructions with continued lines, stages, and JSON lists."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a Dockerfile."""

    name: str
    """In capitals."""
    text: str
    """All that follows, on one line."""

    @property
    def words(self) -> list[str]:
        """The exec form as a list; else split at spaces."""
        return [str(word) for word in json.loads(self.text)] if self.text.startswith("[") else self.text.split()


@dataclass(slots=True)
class Stage:
    """From one FROM to the next."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, name: str) -> list[Instruction]:
        """Instructions of one kind, in order."""
        return [each for each in self.instructions if each.name == name]

    def last(self, name: str) -> Instruction:
        """The one that counts. Raises IndexError if there is none."""
        return self.all(name)[-1]


def read_dockerfile(path: Path) -> Sequence[Stage]:
    """The stages of a file. Raises ValueError for an instruction before the first FROM."""
    stages: list[Stage] = []
    for name, text in _instructions(path.read_text(encoding="utf-8")):
        if name == "FROM":
            base, _, stage = text.partition(" AS ")
            stages.append(Stage(base, stage or str(len(stages))))
        elif not stages:
            raise ValueError(f"{path}: {name} before the first FROM")
        else:
            stages[-1].instructions.append(Instruction(name, text))
    return stages


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        name, _, rest = line.strip().partition(" ")
        found.append((name.upper(), " ".join(rest.split()) if name.upper() != "RUN" else rest.strip()))
    return found
