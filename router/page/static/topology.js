// Router, prefill workers and decode workers, what they hold, and KV on its way between them.

import { byId, h, reconcile, s, setAttribute, setText } from "./dom.js";
import { count, duration, percent } from "./format.js";

const DENSE_FROM = 9; // Workers of a role from which on they are shown small.
const PARCEL_MS = 700;
const BACKLOG_FROM_S = 0.05; // Less is no queue.
const MAX_PARCELS = 24; // At once; more would be noise.

export class Topology {
  /** `kill(workerId)` is called by the buttons of demo mode; null: there are none. */
  constructor() {
    this.kill = null;
    this._handed = new Set();
    this._first = true;
    this._parcels = 0;
    this._moving = new Map();
    this._still = matchMedia("(prefers-reduced-motion: reduce)");
    new ResizeObserver(() => this._draw()).observe(byId("lanes"));
  }

  show(state) {
    this._state = state;
    for (const role of ["prefill", "decode"]) {
      const workers = state.workers.filter((worker) => worker.role === role);
      const lane = byId(`${role}-cards`);
      lane.parentElement.classList.toggle("dense", workers.length >= DENSE_FROM);
      reconcile(lane, workers, (worker) => worker.id, (worker) => this._makeCard(worker), (card, worker) => this._update(card, worker));
      const ready = workers.filter((worker) => worker.state === "ready").length;
      setText(byId(`${role}-count`), ready === workers.length ? String(ready) : `${ready} of ${workers.length} ready`);
    }
    reconcile(byId("router-cards"), [state.router], (router) => router.id, () => makeRouter(), updateRouter);
    this._follow(state);
    this._draw();
  }

  _makeCard(worker) {
    const card = h("article", { class: "card", "aria-label": worker.id },
      h("div", { class: "card-head" }, h("span", { class: "card-name", title: worker.id }, worker.id), h("span", { class: "card-state" })),
      h("div", { class: "meter", role: "img" }, h("i", { class: "used" }), h("i", { class: "cached" })),
      h("div", { class: "card-foot" }, h("p", { class: "facts" })));
    return card;
  }

  _update(card, worker) {
    setAttribute(card, "data-state", worker.state);
    setText(card.querySelector(".card-state"), worker.state);
    const { used, cached, total } = worker.blocks;
    const share = (number) => (total ? Math.min(1, number / total) : 0);
    const meter = card.querySelector(".meter");
    meter.children[0].style.width = `${share(used) * 100}%`;
    meter.children[1].style.width = `${share(cached) * 100}%`;
    setAttribute(meter, "aria-label", `KV blocks: ${percent(share(used))} held, ${percent(share(cached))} cached, of ${total}`);
    const facts = [["", count(worker.running), "running"], ["", count(worker.waiting), "waiting"]];
    const dense = card.closest(".dense");
    facts.push(["KV", percent(share(used)), ""]);
    if (worker.backlogS >= BACKLOG_FROM_S) facts.push(["", duration(worker.backlogS), "backlog"]);
    showFacts(card.querySelector(".facts"), dense ? [["", count(worker.running), ""], ["", percent(share(used)), ""]] : facts);
    this._killButton(card, worker);
  }

  _killButton(card, worker) {
    let button = card.querySelector(".kill");
    if (this.kill && !button) {
      button = h("button", { type: "button", class: "danger kill", "aria-label": `Kill ${worker.id}`, on: { click: () => this.kill(worker.id) } }, "Kill");
      card.querySelector(".card-foot").append(button);
    }
    if (button) button.disabled = worker.state === "lost" || worker.state === "connecting";
  }

  /** A parcel for each request whose KV has got from one worker to another since the last look. */
  _follow(state) {
    this._moving = new Map(state.transfers.map((move) => [`${move.from}>${move.to}`, move]));
    const handed = new Set();
    for (const request of state.requests) {
      if (request.phase !== "decode" || !request.prefillWorker || !request.decodeWorker) continue;
      if (request.prefillWorker === request.decodeWorker) continue;
      const name = `${request.id}/${request.attempt}`;
      handed.add(name);
      if (!this._handed.has(name) && !this._first) this._send(request.prefillWorker, request.decodeWorker);
    }
    this._handed = handed;
    this._first = false;
  }

  _card(id, role) {
    return byId(`${role}-cards`).querySelector(`[data-key="${CSS.escape(id)}"]`);
  }

  _curve(from, to) {
    const frame = byId("lanes").getBoundingClientRect();
    const a = from.getBoundingClientRect();
    const b = to.getBoundingClientRect();
    const [x1, y1] = [a.right - frame.left, a.top + a.height / 2 - frame.top];
    const [x2, y2] = [b.left - frame.left, b.top + b.height / 2 - frame.top];
    const bend = Math.max(24, (x2 - x1) / 2);
    return `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
  }

  _draw() {
    const state = this._state;
    if (!state) return;
    const prefill = state.workers.filter((worker) => worker.role === "prefill");
    const decode = state.workers.filter((worker) => worker.role === "decode");
    const wires = [];
    const router = byId("router-cards").firstElementChild;
    // With many workers the resting lines would be a grey cloud; what moves is still drawn.
    const all = prefill.length * decode.length <= 16;
    const dense = prefill.length + decode.length >= 2 * DENSE_FROM;
    if (!dense) for (const worker of prefill) wires.push({ key: `r>${worker.id}`, from: router, to: this._card(worker.id, "prefill"), on: false });
    for (const p of prefill) for (const d of decode) {
      const on = this._moving.has(`${p.id}>${d.id}`);
      if (all || on) wires.push({ key: `${p.id}>${d.id}`, from: this._card(p.id, "prefill"), to: this._card(d.id, "decode"), on });
    }
    const group = this._group ??= byId("wires").appendChild(s("g"));
    reconcile(group, wires.filter((wire) => wire.from && wire.to), (wire) => wire.key, () => s("path", { class: "wire" }), (path, wire) => {
      setAttribute(path, "d", this._curve(wire.from, wire.to));
      path.classList.toggle("on", wire.on);
    });
  }

  _send(from, to) {
    const [a, b] = [this._card(from, "prefill"), this._card(to, "decode")];
    if (!a || !b || this._parcels >= MAX_PARCELS || this._still.matches || document.hidden) return;
    const path = s("path", { d: this._curve(a, b) });
    const length = path.getTotalLength();
    const parcel = byId("wires").appendChild(s("rect", { class: "parcel", width: 9, height: 9, rx: 2 }));
    this._parcels += 1;
    const began = performance.now();
    const step = (now) => {
      const t = Math.min(1, (now - began) / PARCEL_MS);
      const point = path.getPointAtLength(length * (t < 0.5 ? 2 * t * t : 1 - 2 * (1 - t) ** 2));
      parcel.setAttribute("x", point.x - 4.5);
      parcel.setAttribute("y", point.y - 4.5);
      if (t < 1) requestAnimationFrame(step);
      else {
        parcel.remove();
        this._parcels -= 1;
      }
    };
    requestAnimationFrame(step);
  }
}

function makeRouter() {
  return h("article", { class: "card" },
    h("div", { class: "card-head" }, h("span", { class: "card-name" }), h("span", { class: "card-state" })),
    h("p", { class: "facts" }));
}

function updateRouter(card, router) {
  setAttribute(card, "aria-label", router.id);
  setAttribute(card, "data-state", router.state);
  setText(card.querySelector(".card-name"), router.id);
  setText(card.querySelector(".card-state"), router.state);
  const facts = [["", count(router.running), "running"], ["", count(router.waiting), "waiting"]];
  if (!router.storeAvailable) facts.push(["redis", "unreachable", ""]);
  showFacts(card.querySelector(".facts"), facts);
}

function showFacts(element, facts) {
  const text = JSON.stringify(facts);
  if (element.dataset.shown === text) return;
  element.dataset.shown = text;
  element.replaceChildren(...facts.map(([before, value, after]) => h("span", {}, before ? `${before} ` : "", h("b", {}, value), after ? ` ${after}` : "")));
}
