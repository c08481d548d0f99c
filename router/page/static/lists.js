// Requests in progress and the log of events.

import { byId, h, reconcile, setText } from "./dom.js";
import { clock, count, duration } from "./format.js";

const MAX_ROWS = 60; // More are counted, not listed.
const MAX_EVENTS = 120;
const SIGNS = { good: "+", warn: "!", bad: "×", info: "·" };

/** `total` may be more than the router lists. */
export function showRequests(requests, total) {
  const shown = requests.slice(0, MAX_ROWS);
  reconcile(byId("requests"), shown, (request) => request.id, makeRow, updateRow);
  byId("requests-empty").hidden = requests.length > 0;
  setText(byId("requests-count"), total > shown.length ? `${total}, the oldest ${shown.length} are listed` : total ? String(total) : "");
}

function makeRow(request) {
  const cells = [["", request.id], ["", ""], ["", ""], ["", ""], ["number", ""], ["number", ""], ["number", ""]];
  const row = h("tr", {}, ...cells.map(([kind, text]) => h("td", kind ? { class: kind } : {}, text)));
  row.cells[0].title = request.id;
  row.cells[1].append(h("span", { class: "tag" }));
  return row;
}

function updateRow(row, request) {
  const tag = row.cells[1].firstElementChild;
  tag.className = `tag phase-${request.phase}`;
  setText(tag, request.attempt > 1 ? `${request.phase}, attempt ${request.attempt}` : request.phase);
  setText(row.cells[2], request.prefillWorker || "–");
  setText(row.cells[3], request.decodeWorker || "–");
  setText(row.cells[4], count(request.promptTokens));
  setText(row.cells[5], count(request.outputTokens));
  setText(row.cells[6], duration(request.ageS));
}

/** Appends what is new; the newest is on top. */
export class EventLog {
  constructor() {
    this._list = byId("events");
    this._last = -1;
  }

  add(events) {
    for (const event of events) {
      if (event.seq <= this._last) continue;
      this._last = event.seq;
      this._list.prepend(h("li", { "data-level": event.level },
        h("time", { datetime: new Date(event.at * 1000).toISOString() }, clock(event.at)),
        h("span", { class: "sign", "aria-hidden": "true" }, SIGNS[event.level] ?? SIGNS.info),
        h("p", {}, event.text)));
    }
    while (this._list.children.length > MAX_EVENTS) this._list.lastElementChild.remove();
    byId("events-empty").hidden = this._list.children.length > 0;
  }

  /** Another router, or the same one started again, counts from the beginning. */
  restart() {
    this._last = -1;
  }
}
