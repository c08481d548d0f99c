// Small line charts: what there is to see in five minutes, and the same in words.

import { h, s, setAttribute, setText } from "./dom.js";

const [WIDTH, HEIGHT] = [320, 128];
const [LEFT, RIGHT, TOP, BOTTOM] = [46, 4, 6, 18];
export const SPAN_S = 300;

/** One chart of one or two series. `format` writes a value. */
export class Chart {
  constructor(title, names, format) {
    this._title = title;
    this._format = format;
    this._values = names.map(() => h("b"));
    this._svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this._lines = [0, 0.5, 1].map((share) => ({
      share,
      line: this._svg.appendChild(s("line", { class: "grid" })),
      text: this._svg.appendChild(s("text", { "text-anchor": "end" })),
    }));
    this._when = ["5 min ago", "now"].map((text, i) =>
      this._svg.appendChild(s("text", { x: i ? WIDTH - RIGHT : LEFT, y: HEIGHT - 4, "text-anchor": i ? "end" : "start" }, text)));
    this._plots = names.map((_, i) => this._svg.appendChild(s("path", { class: `plot series-${"ab"[i]}` })));
    this.element = h("figure", { class: "chart" },
      h("figcaption", {}, h("span", { class: "strong" }, title),
        ...names.map((name, i) => h("span", { class: `key series-${"ab"[i]}` }, `${name} `, this._values[i]))),
      this._svg);
    new ResizeObserver(([entry]) => this._resize(entry.contentRect.width)).observe(this._svg);
    this._width = WIDTH;
    this._points = [];
  }

  /** `points`: [{ at, values: [a, b] }] in seconds, null where there was nothing to measure. */
  show(points, now) {
    this._points = points;
    this._now = now;
    this._draw();
  }

  _resize(width) {
    if (!width) return;
    this._width = width;
    setAttribute(this._svg, "viewBox", `0 0 ${width} ${HEIGHT}`);
    setAttribute(this._when[1], "x", String(width - RIGHT));
    this._draw();
  }

  _draw() {
    const now = this._now ?? 0;
    const points = this._points.filter((point) => point.at >= now - SPAN_S);
    const top = niceTop(Math.max(0, ...points.flatMap((point) => point.values.map((value) => value ?? 0))));
    const x = (at) => LEFT + (1 - (now - at) / SPAN_S) * (this._width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
    for (const { share, line, text } of this._lines) {
      const level = y(top * share);
      for (const [name, value] of [["x1", LEFT], ["x2", this._width - RIGHT], ["y1", level], ["y2", level]]) setAttribute(line, name, String(value));
      setAttribute(text, "x", String(LEFT - 6));
      setAttribute(text, "y", String(level + 4));
      setText(text, share === 0 ? "0" : this._format(top * share));
    }
    this._plots.forEach((plot, i) => {
      let path = "";
      let gap = true;
      for (const point of points) {
        const value = point.values[i];
        if (value === null || value === undefined) {
          gap = true;
          continue;
        }
        const at = `${x(point.at).toFixed(1)} ${y(value).toFixed(1)}`;
        // A lone point is a dot: a line of no length with round ends.
        path += gap ? `M${at}L${at}` : `L${at}`;
        gap = false;
      }
      setAttribute(plot, "d", path);
    });
    const latest = this._values.map((_, i) => points.findLast((point) => point.values[i] !== null)?.values[i] ?? null);
    latest.forEach((value, i) => setText(this._values[i], this._format(value)));
    setAttribute(this._svg, "aria-label", `${this._title}, latest: ${latest.map(this._format).join(", ")}; highest in five minutes ${this._format(top)} at most`);
  }
}

/** The next of 1, 2, 5, 10, ... above. */
function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value * 0.999) * power;
}
