// One chat at a time, streamed, with its timeline as it grows.

import { ApiError, call, eventsOf, getJson } from "./api.js";
import { byId, h, setAttribute, setText } from "./dom.js";
import { count, duration } from "./format.js";
import { PHASES, phaseOfState } from "./state.js";

const POLL_MS = 60; // How often the router is asked for the phase until the answer flows.

export class Playground {
  /** `onUnauthorized()` is called when the router wants a key. */
  constructor(onUnauthorized) {
    this._onUnauthorized = onUnauthorized;
    this._abort = null;
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this._run();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        byId("ask").requestSubmit();
      }
    });
    byId("stop").addEventListener("click", () => this._abort?.abort());
  }

  async _run() {
    const prompt = byId("prompt").value;
    if (this._abort || !prompt.trim()) return;
    const abort = (this._abort = new AbortController());
    const run = new Run(abort.signal);
    this._busy(true);
    try {
      await run.stream(prompt, Number(byId("max-tokens").value) || 96, Number(byId("temperature").value) || 0);
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) this._onUnauthorized();
      run.failed(abort.signal.aborted ? "Stopped." : error.message);
    } finally {
      this._abort = null;
      this._busy(false);
    }
  }

  _busy(busy) {
    // The button that was pressed must not vanish under the finger, or from under the focus.
    const [send, stop] = [byId("send"), byId("stop")];
    const focused = document.activeElement;
    send.disabled = busy;
    stop.disabled = !busy;
    if (busy && focused === send) stop.focus();
    if (!busy && focused === stop) send.focus();
  }
}

/** One request: what has come of it, and when. Times are of this page's clock until the router tells its own. */
class Run {
  constructor(signal) {
    this._signal = signal;
    this._id = `page-${hex(8)}`;
    this._began = performance.now();
    this._phase = "queue";
    this._phaseBegan = this._began;
    this._spans = new Map();
    this._firstAt = null;
    this._lastAt = null;
    this._usage = null;
    this._place = null;
    this._tokens = 0;
    this._ended = false;
    this._output = byId("output");
    this._output.textContent = "";
    this._text = this._output.appendChild(document.createTextNode(""));
    setText(byId("answer-state"), "Waiting for the first token");
    this._frame();
  }

  async stream(prompt, maxTokens, temperature) {
    this._poll();
    const response = await call("v1/chat/completions", {
      method: "POST",
      signal: this._signal,
      body: {
        messages: [{ role: "user", content: prompt }],
        max_tokens: maxTokens,
        temperature,
        stream: true,
        stream_options: { include_usage: true },
        request_id: this._id,
      },
    });
    let finish = null;
    for await (const { data } of eventsOf(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(200, chunk.error.message, chunk.error.code);
      if (chunk.usage) this._usage = chunk.usage;
      const choice = chunk.choices?.[0];
      if (choice?.delta?.content) this._arrived(choice.delta.content);
      finish = choice?.finish_reason ?? finish;
    }
    await this._finish(finish);
  }

  failed(message) {
    this._enter(null);
    this._ended = true;
    this._draw();
    setText(byId("answer-state"), message);
  }

  _arrived(text) {
    const now = performance.now();
    if (this._firstAt === null) {
      this._firstAt = now;
      setText(byId("answer-state"), "Streaming");
      if (this._phase === "queue" || this._phase === "prefill") this._enter("transfer", now);
    } else if (this._phase !== "decode") this._enter("decode", now);
    this._tokens += 1;
    this._lastAt = now;
    const atEnd = this._output.scrollTop + this._output.clientHeight >= this._output.scrollHeight - 24;
    this._text.appendData(text);
    if (atEnd) this._output.scrollTop = this._output.scrollHeight;
  }

  async _finish(finish) {
    this._enter(null);
    this._ended = true;
    try {
      const info = await getJson(`dashboard/requests/${this._id}`);
      this._place = info;
      this._exact = phasesOf(info);
    } catch (error) {
      // The page's own clock has to do.
      if (!(error instanceof ApiError)) throw error;
    }
    this._draw();
    const place = this._place;
    const where = place?.prefill_worker && place.prefill_worker !== place.decode_worker
      ? `prompt by ${place.prefill_worker}, output by ${place.decode_worker}` : place?.decode_worker ? `all by ${place.decode_worker}` : "";
    const again = place?.attempt > 1 ? `, after ${place.attempt - 1} lost attempt${place.attempt > 2 ? "s" : ""}` : "";
    setText(byId("answer-state"), `Done (${finish ?? "end"})${where ? `: ${where}` : ""}${again}`);
  }

  /** Ask where the request is, until its output flows. */
  async _poll() {
    while (!this._ended && this._phase !== "decode" && !this._signal.aborted) {
      try {
        const info = await getJson(`dashboard/requests/${this._id}`, { signal: this._signal });
        const phase = phaseOfState(info.state);
        if (phase && PHASES.indexOf(phase) > PHASES.indexOf(this._phase)) this._enter(phase);
      } catch (error) {
        if (this._signal.aborted) return;
        // The stream itself says what matters.
        if (error instanceof ApiError) return;
      }
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  _enter(phase, now = performance.now()) {
    if (this._phase !== null) {
      const before = this._spans.get(this._phase) ?? 0;
      this._spans.set(this._phase, before + (now - this._phaseBegan) / 1000);
    }
    this._phase = phase;
    this._phaseBegan = now;
  }

  _frame() {
    if (this._ended) return;
    this._draw();
    requestAnimationFrame(() => this._frame());
  }

  _draw() {
    const seconds = this._exact ?? new Map(this._spans);
    if (!this._exact && this._phase) {
      seconds.set(this._phase, (seconds.get(this._phase) ?? 0) + (performance.now() - this._phaseBegan) / 1000);
    }
    const phases = PHASES.filter((phase) => seconds.has(phase));
    const total = phases.reduce((sum, phase) => sum + seconds.get(phase), 0);
    const track = byId("track");
    while (track.children.length < phases.length) track.append(h("i"));
    while (track.children.length > phases.length) track.lastElementChild.remove();
    phases.forEach((phase, i) => {
      track.children[i].className = `phase-${phase}`;
      track.children[i].style.flex = `${seconds.get(phase)} 0 0px`;
    });
    const facts = phases.map((phase) => [phase, duration(seconds.get(phase)), `phase-${phase}`]);
    if (this._firstAt !== null) facts.push(["TTFT", duration((this._firstAt - this._began) / 1000), "plain"]);
    const tokens = this._usage?.completion_tokens ?? this._tokens;
    if (this._ended && tokens > 1) facts.push(["TPOT", duration((this._lastAt - this._firstAt) / 1000 / (tokens - 1)), "plain"]);
    if (tokens) facts.push(["tokens", count(tokens), "plain"]);
    const cached = this._usage?.prompt_tokens_details?.cached_tokens;
    if (cached) facts.push(["from cache", count(cached), "plain"]);
    const list = byId("phases");
    while (list.children.length < facts.length) list.append(h("div", {}, h("dt"), h("dd")));
    while (list.children.length > facts.length) list.lastElementChild.remove();
    facts.forEach(([name, value, kind], i) => {
      const item = list.children[i];
      item.className = kind;
      setText(item.firstElementChild, name);
      setText(item.lastElementChild, value);
    });
    if (this._ended) setAttribute(track, "aria-label", `Timeline: ${phases.map((phase) => `${phase} ${duration(seconds.get(phase))}`).join(", ")}; ${duration(total)} in all`);
  }
}

/** Seconds by phase as the router measured them; null if it keeps none. */
function phasesOf(info) {
  const found = new Map(PHASES.filter((phase) => info.phases?.[phase] > 0).map((phase) => [phase, info.phases[phase]]));
  return found.size ? found : null;
}

function hex(bytes) {
  return [...crypto.getRandomValues(new Uint8Array(bytes))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
