// Brings the parts together: follows the router's state, draws it, and asks for a key when the router does.

import { ApiError, call, eventsOf, getJson, setKey } from "./api.js";
import { Chart } from "./charts.js";
import { byId, h, setAttribute, setText } from "./dom.js";
import { count, duration, percent } from "./format.js";
import { EventLog, showRequests } from "./lists.js";
import { Playground } from "./playground.js";
import { History, readState } from "./state.js";
import { Topology } from "./topology.js";

const RETRY_MS = 1000;
const STALE_MS = 5000; // Without news for so long the connection counts as lost.

const topology = new Topology();
const history = new History();
const log = new EventLog();
const charts = [
  [new Chart("Time to first token", ["p50", "p95"], duration), (point) => [point.ttft?.p50, point.ttft?.p95]],
  [new Chart("Between tokens", ["p50", "p95"], duration), (point) => [point.itl?.p50, point.itl?.p95]],
  [new Chart("Output tokens per second", ["all"], count), (point) => [point.tokensPerS]],
];

let router = "";
let lastNews = 0;

function show(state) {
  lastNews = performance.now();
  if (state.router.id !== router) {
    router = state.router.id;
    log.restart();
  }
  setText(byId("model"), state.router.model);
  setText(byId("router"), state.router.id);
  setText(byId("version"), `pdserve ${state.router.version}`);
  history.add(state);
  showFigures(state);
  topology.show(state);
  showRequests(state.requests, state.numRequests);
  log.add(state.events);
  for (const [chart, values] of charts) {
    chart.show(history.points.map((point) => ({ at: point.at, values: values(point).map((value) => value ?? null) })), state.at);
  }
}

function showFigures(state) {
  const decode = state.workers.filter((worker) => worker.role === "decode");
  const total = decode.reduce((sum, worker) => sum + worker.blocks.total, 0);
  const used = decode.reduce((sum, worker) => sum + worker.blocks.used, 0);
  const latest = history.latest;
  const figures = [
    ["Running", count(state.router.running), ""],
    ["Waiting", count(state.router.waiting), ""],
    ["Output", count(latest.tokensPerS), "tokens/s"],
    ["TTFT p50", duration(latest.ttft?.p50), ""],
    ["TTFT p95", duration(latest.ttft?.p95), ""],
    ["Between tokens p50", duration(latest.itl?.p50), ""],
    ["Between tokens p95", duration(latest.itl?.p95), ""],
    ["KV of decode", total ? percent(used / total) : "–", ""],
  ];
  const list = byId("figures");
  if (!list.children.length) list.append(...figures.map(([name]) => h("div", {}, h("dt", {}, name), h("dd", {}, h("span"), h("small")))));
  figures.forEach(([, value, unit], i) => {
    setText(list.children[i].lastElementChild.firstElementChild, value);
    setText(list.children[i].lastElementChild.lastElementChild, unit);
  });
}

function connection(state) {
  const pill = byId("connection");
  setAttribute(pill, "data-state", state);
  setText(pill, { live: "live", lost: "no connection", connecting: "connecting" }[state]);
}

function notice(text) {
  byId("notice").hidden = !text;
  setText(byId("notice"), text);
}

let askingForKey = null;

/** Resolves when the reader has given a key. */
function askForKey(message = "") {
  setText(byId("key-error"), message);
  askingForKey ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.showModal();
    byId("key-form").addEventListener("submit", () => {
      setKey(byId("key").value.trim());
      byId("key").value = "";
      askingForKey = null;
      resolve();
    }, { once: true });
  });
  return askingForKey;
}

async function kill(workerId) {
  try {
    await call(`dashboard/workers/${encodeURIComponent(workerId)}`, { method: "DELETE" });
    notice("");
  } catch (error) {
    notice(`Could not kill ${workerId}: ${error.message}`);
  }
}

async function follow() {
  let refused = false;
  for (;;) {
    try {
      const settings = await getJson("dashboard/settings");
      topology.kill = settings.demo_controls ? kill : null;
      for await (const { data } of eventsOf(await call("dashboard/events"))) {
        refused = false;
        connection("live");
        show(readState(JSON.parse(data)));
      }
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) {
        await askForKey(refused ? "The router does not know this key." : "");
        refused = true;
        continue;
      }
      if (!(error instanceof TypeError || error instanceof ApiError || error instanceof DOMException)) {
        // A bug of this page, not of the connection: say so rather than try for ever in silence.
        console.error(error);
        notice(`This page does not understand the router: ${error.message}`);
      }
    }
    connection("lost");
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

byId("charts").append(...charts.map(([chart]) => chart.element));
new Playground(() => askForKey("This needs a key."));
setInterval(() => {
  if (lastNews && performance.now() - lastNews > STALE_MS) connection("lost");
}, 1000);
follow();
