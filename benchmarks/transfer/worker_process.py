"""A real worker that writes down when things happened to it.

`python -m benchmarks.transfer.worker_process prefill|decode CONFIG.json STAMPS.json` runs the worker, prints its
identity as one JSON object when it is ready, and writes its stamps when it is stopped by SIGTERM.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import decode_worker.service
from benchmarks.transfer.instruments import LandingLog, stamped
from decode_worker.service import DecodeService
from kv_transfer import HandoffReceiver, HandoffResult
from kv_transfer.transports import TRANSPORTS
from pdserve.config import Config
from pdserve.engine.batch import Batch
from pdserve.engine.engine import Engine, LayerWatch
from pdserve.engine.output import StepOutput
from pdserve.logs import configure_logging
from pdserve.types import HandoffId
from pdserve.worker.model import LoadedModel, load_model
from pdserve.worker.process import run_worker
from prefill_worker.service import PrefillService


class StampedEngine:
    """Notes when each forward pass began and ended."""

    def __init__(self, engine: Engine, steps: list[tuple[float, float]]) -> None:
        self._engine = engine
        self._steps = steps
        self.config = engine.config
        self.layout = engine.layout
        self.num_blocks = engine.num_blocks
        self.store = engine.store
        self.forward_logits = engine.forward_logits

    def forward(self, batch: Batch, watch: LayerWatch | None = None) -> StepOutput:
        """See `Engine`."""
        began = time.monotonic()
        output = self._engine.forward(batch, watch)
        self._steps.append((began, time.monotonic()))
        return output


class Stamps:
    """What is written in the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.steps: list[tuple[float, float]] = []
        """Forward passes."""
        self.handoffs: dict[str, float] = {}
        """By request: at P when the hand-off was known to be committed, at D when it was."""
        self.transports: dict[str, str] = {}
        """By request, at P."""
        self.landings = LandingLog()

    def load(self, config: Config) -> LoadedModel:
        """The configured model, with stamps."""
        loaded = load_model(config)
        engine = StampedEngine(loaded.engine, self.steps)
        return LoadedModel(engine=engine, name=loaded.name, fingerprint=loaded.fingerprint)

    def write(self) -> None:
        """Everything, as JSON."""
        stamps = {
            "steps": self.steps,
            "handoffs": self.handoffs,
            "transports": self.transports,
            "landings": self.landings.intervals,
        }
        self._path.write_text(json.dumps(stamps))


class StampedPrefill(PrefillService):
    """Notes when commits are acknowledged."""

    def __init__(self, config: Config, stamps: Stamps) -> None:
        super().__init__(config, engine_factory=stamps.load)
        self._stamps = stamps

    async def start(self) -> None:
        """See `Service.start`."""
        await super().start()
        tell(self.host.info.worker_id, self.host.info.incarnation, self.host.info.address)

    def on_committed(self, key: HandoffId, result: HandoffResult) -> None:
        """See `HandoffListener`."""
        self._stamps.handoffs[key.request_id] = time.monotonic()
        self._stamps.transports[key.request_id] = result.transport
        super().on_committed(key, result)

    async def stop(self) -> None:
        """See `Service.stop`."""
        await super().stop()
        self._stamps.write()


class StampedDecode(DecodeService):
    """Notes when requests are committed."""

    def __init__(self, config: Config, stamps: Stamps) -> None:
        super().__init__(config, engine_factory=stamps.load)
        self._stamps = stamps

    async def start(self) -> None:
        """See `Service.start`."""
        await super().start()
        tell(self.host.info.worker_id, self.host.info.incarnation, self.host.info.address)

    def commit(self, handoff: HandoffId, first_tokens: tuple[int, ...], *, exact: bool) -> None:
        """See `Admission.commit`."""
        self._stamps.handoffs[handoff.request_id] = time.monotonic()
        super().commit(handoff, first_tokens, exact=exact)

    async def stop(self) -> None:
        """See `Service.stop`."""
        await super().stop()
        self._stamps.write()


def tell(worker_id: str, incarnation: str, address: str) -> None:
    """Who this is, for the driver."""
    print(json.dumps({"worker_id": worker_id, "incarnation": incarnation, "address": address}), flush=True)


def main(role: str, config_file: str, stamps_file: str) -> int:
    """Run until SIGTERM."""
    config = Config.model_validate(json.loads(Path(config_file).read_text()))
    configure_logging(config.log, role)
    stamps = Stamps(Path(stamps_file))
    if role == "prefill":
        return run_worker(lambda: StampedPrefill(config, stamps))
    receiver = partial(HandoffReceiver, transports=stamped(TRANSPORTS, config.transfer.transports, stamps.landings))
    with mock.patch.object(decode_worker.service, "HandoffReceiver", receiver):
        return run_worker(lambda: StampedDecode(config, stamps))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
