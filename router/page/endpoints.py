"""What the page asks of the router beyond its state: where a request of the playground is, whether there are buttons,
and what they do."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from pdserve.errors import NotFoundError
from pdserve.launch.demo_control import DemoControlClient
from router.core import RouterCore
from router.http.call_limits import client_of
from router.timeline import Phases

log = logging.getLogger(__name__)


class PageEndpoints:
    """One method for each."""

    def __init__(self, core: RouterCore) -> None:
        path = core.config.demo_socket
        self._core = core
        self._demo = None if path is None else DemoControlClient(Path(path))

    async def settings(self, request: Request) -> Response:
        """What the page has to know before it is drawn."""
        return _json({"demo_controls": self._demo is not None})

    async def request(self, request: Request) -> Response:
        """Where a request of the playground is, and where its time went once it has ended.

        One that is not known yet is no error: the page asks while its own call is still on its way."""
        name, core = request.path_params["request_id"], self._core
        try:
            status = await core.status_of(name, core.limiter.caller(*client_of(request.scope)))
        except NotFoundError:
            return _json({"id": name, "state": None})
        generation = core.table.find(name)
        summary = None if generation is None else generation.logs[0].summary
        return _json(
            {
                "id": name,
                "state": status.state.value,
                "attempt": status.attempt,
                "prefill_worker": status.prefill_worker,
                "decode_worker": status.decode_worker,
                "phases": None if summary is None else _seconds(summary.phases),
            }
        )

    async def kill_worker(self, request: Request) -> Response:
        """SIGKILL a worker process.

        Pages of other sites cannot do this: browsers ask before they send a DELETE to another server, and get no leave.
        Raises NotFoundError where demo controls are off or there is no such worker, UnavailableError if whoever started
        the workers is gone.
        """
        if self._demo is None:
            raise NotFoundError("there are no demo controls here (local.demo_controls)")
        name = request.path_params["worker_id"]
        pid = await self._demo.kill(name)
        log.warning("a worker was killed from the page", extra={"worker_id": name, "pid": pid})
        return _json({"worker_id": name, "pid": pid})


def _seconds(phases: Phases) -> dict[str, float]:
    return {
        "tokenize": phases.tokenize_s,
        "queue": phases.queue_s,
        "prefill": phases.prefill_s,
        "transfer": phases.transfer_s,
        "handover": phases.handover_s,
        "decode": phases.decode_s,
    }


def _json(value: object) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")
