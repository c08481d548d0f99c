"""pdserve over gRPC, which alone tells the phases of each request."""

from __future__ import annotations

from pdserve.bench.requests import Answer, PlannedRequest
from pdserve.bench.targets.target import OnTokens, QueueSample
from pdserve.client import NO_RETRIES, AsyncClient
from pdserve.client.access import Access


class GrpcTarget:
    """Implements `Target`. TLS and key as the environment says (`pdserve.client.access`)."""

    def __init__(self, address: str, access: Access | None = None) -> None:
        self._address = address
        access = access or Access.from_environment()
        self._client = AsyncClient(address, retry=NO_RETRIES, tls=access.tls, api_key=access.api_key)

    @property
    def name(self) -> str:
        """See `Target`."""
        return f"pdserve gRPC {self._address}"

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """See `Target`."""
        return await self._client.tokenize(text, add_special_tokens=False)

    async def generate(self, request: PlannedRequest, on_tokens: OnTokens) -> Answer:
        """See `Target`."""
        async with self._client.stream(
            token_ids=request.token_ids,
            max_tokens=request.output_tokens,
            ignore_eos=True,
            temperature=0.0,
            resumable=False,
        ) as stream:
            async for delta in stream:
                if delta.token_ids:
                    on_tokens(len(delta.token_ids))
            result = await stream.result()
        place, usage = result.placement, result.usage
        return Answer(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            phases_ms=result.timings.phases_ms,
            prefill_worker=place.prefill_worker,
            decode_worker=place.decode_worker,
            local_prefill=place.local_prefill,
        )

    async def queues(self, at_s: float) -> QueueSample | None:
        """See `Target`."""
        status = await self._client.status()
        stats = [worker.stats for worker in status.workers]
        return QueueSample(
            at_s=at_s,
            waiting_in_router=sum(queue.num_waiting for queue in status.queues),
            waiting_in_workers=sum(s.num_waiting for s in stats),
            moving=sum(s.num_transferring for s in stats),
            running=sum(s.num_running for s in stats),
            blocks_in_use=sum(s.blocks_in_use for s in stats),
        )

    async def close(self) -> None:
        """See `Target`."""
        await self._client.close()
