// What the router says, as the rest of the page reads it, and what has to be remembered of it for the charts.
// The only module that knows names of the wire.

import { SPAN_S } from "./charts.js";

/** In the order in which a request goes through them. */
export const PHASES = ["tokenize", "queue", "prefill", "transfer", "handover", "decode"];

const PHASE_OF_STATE = { QUEUED: "queue", PREFILLING: "prefill", TRANSFERRING: "transfer", DECODING: "decode" };

/** Of a state of the request's life; undefined once it has ended. */
export const phaseOfState = (state) => PHASE_OF_STATE[state];

const RATE_SPAN_S = 3; // Tokens per second are those of so long.

export function readState(wire) {
  const requests = wire.requests.map((request) => ({
    id: request.id,
    phase: phaseOfState(request.state) ?? request.state.toLowerCase(),
    attempt: request.attempt,
    prefillWorker: request.prefill_worker,
    decodeWorker: request.decode_worker,
    promptTokens: request.prompt_tokens,
    outputTokens: request.output_tokens,
    ageS: request.age_s,
  }));
  return {
    at: wire.at,
    router: {
      id: wire.router.id,
      model: wire.router.model,
      version: wire.router.version,
      state: wire.router.state,
      storeAvailable: wire.router.store_available,
      running: wire.num_requests - wire.num_queued,
      waiting: wire.num_queued,
    },
    workers: wire.workers.map((worker) => ({
      id: worker.id,
      role: worker.role,
      state: worker.state,
      running: worker.running,
      waiting: worker.waiting,
      backlogS: worker.backlog_s,
      blocks: worker.blocks,
    })),
    transfers: wire.transfers,
    requests,
    numRequests: wire.num_requests,
    latency: wire.latency,
    outputTokensTotal: wire.output_tokens_total,
    events: wire.events,
    history: wire.history ?? [],
  };
}

/** One point for each look at the router, as long as charts show it. */
export class History {
  constructor() {
    this.points = [];
    this._router = "";
  }

  add(state) {
    if (state.router.id !== this._router || state.history.length) {
      // The router remembers what came before, also while this page was not connected.
      this._router = state.router.id;
      this.points = [];
      for (const point of state.history) this._add(point.at, point.latency, point.output_tokens_total);
    }
    this._add(state.at, state.latency, state.outputTokensTotal);
    while (this.points[0].at < state.at - SPAN_S - RATE_SPAN_S) this.points.shift();
  }

  _add(at, latency, total) {
    const since = this.points.findLast((point) => point.at <= at - RATE_SPAN_S) ?? this.points[0];
    const newTokens = since ? total - since.total : 0;
    this.points.push({
      at,
      ttft: latency.ttft,
      itl: latency.itl,
      total,
      // Negative after a restart under the same name.
      tokensPerS: since && since.at < at ? Math.max(0, newTokens) / (at - since.at) : null,
    });
  }

  get latest() {
    const last = this.points.at(-1);
    return { ...last, ttft: this.points.findLast((point) => point.ttft)?.ttft, itl: this.points.findLast((point) => point.itl)?.itl };
  }
}
