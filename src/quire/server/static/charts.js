/* The row of figures, with what they were in the last minute. */

import { onResize, prepared } from "./canvas.js";
import { $, colour, duration, make, number } from "./dom.js";

const WINDOW = 60;
/** Seconds after which a figure that no event has renewed fades. */
const FRESH = 5;

const TILES = {
  running: { name: "Running", title: "Requests that have a lane" },
  waiting: { name: "Waiting", title: "Requests in the queue, and parked ones" },
  rate: { name: "Generated", unit: "tok/s", title: "Tokens read from the device" },
  ttft: { name: "TTFT", title: "Time to first token in the engine: median, and 95th percentile, of the last minute", dots: true },
  itl: { name: "ITL", title: "Time between tokens: median over the running requests" },
  kv: { name: "KV in use", unit: "%", title: "Share of blocks that requests hold", top: 100 },
  hits: { name: "Prefix hits", unit: "%", title: "Share of prompt tokens found in the cache, since the start", top: 100 },
};

export class Tiles {
  constructor() {
    this.tiles = new Map();
    for (const [key, tile] of Object.entries(TILES)) {
      const value = make("span", { class: "value num" }, "–");
      const more = make("span", { class: "more num" });
      const canvas = make("canvas", { "aria-hidden": "true" });
      $("tiles").append(
        make("div", { class: "tile", title: tile.title }, make("span", { class: "name" }, tile.name), make("span", {}, value, more), canvas),
      );
      this.tiles.set(key, { ...tile, value, more, canvas, points: [] });
    }
    this.steps = 0;
    this.#forget();
    onResize($("tiles"), () => this.draw());
  }

  take(event, state) {
    const { time, stats } = state;
    // Another engine, which counts anew.
    if (this.now > time || (stats && stats.steps < this.steps)) this.#forget();
    this.now = time;
    if (!stats) return;
    this.steps = stats.steps;
    this.#set("running", stats.running);
    this.#set("waiting", stats.waiting);
    const total = sum(stats.blocks_total);
    this.#set("kv", (100 * sum(stats.blocks_used)) / total, number((100 * sum(stats.blocks_used)) / total, 1));
    if (stats.prefix_query_tokens) {
      const share = (100 * stats.prefix_hit_tokens) / stats.prefix_query_tokens;
      this.#set("hits", share, number(share, 1));
    }
    this.#rate(time, stats.generation_tokens);
    this.#gaps(time, state.running ?? []);
    this.#firsts(time, state.firsts ?? []);
    this.draw();
  }

  #forget() {
    for (const tile of this.tiles.values()) tile.points = [];
    this.counted = null;
    this.known = new Map();
    this.lastFirst = 0;
  }

  #rate(time, count) {
    this.counted ??= [];
    this.counted.push([time, count]);
    while (this.counted.length > 2 && this.counted[0][0] < time - 1) this.counted.shift();
    const [then, before] = this.counted[0];
    if (time - then > 0.2) this.#set("rate", (count - before) / (time - then), number((count - before) / (time - then)));
  }

  /** How long each request's tokens took since the last event that brought it some. */
  #gaps(time, running) {
    const gaps = [];
    const known = new Map();
    for (const [id, , prompt, , , tokens, , , , first] of running) {
      const last = this.known.get(id);
      if (first === null || tokens <= prompt) continue;
      if (last && tokens > last[1]) gaps.push((time - last[0]) / (tokens - last[1]));
      known.set(id, last && tokens === last[1] ? last : [time, tokens]);
    }
    this.known = known;
    if (gaps.length) this.#set("itl", quantile(gaps, 0.5), duration(quantile(gaps, 0.5)));
  }

  #firsts(time, firsts) {
    const tile = this.tiles.get("ttft");
    for (const [number, seconds] of firsts) {
      if (number > this.lastFirst) tile.points.push([time, seconds]);
      this.lastFirst = Math.max(this.lastFirst, number);
    }
    tile.points = recent(tile.points, time);
    const values = tile.points.map(([, seconds]) => seconds);
    tile.value.textContent = values.length ? duration(quantile(values, 0.5)) : "–";
    tile.more.textContent = values.length > 1 ? ` p95 ${duration(quantile(values, 0.95))}` : "";
  }

  #set(key, value, text = number(value)) {
    const tile = this.tiles.get(key);
    tile.value.textContent = text;
    tile.more.textContent = tile.unit ? ` ${tile.unit}` : "";
    tile.points = recent(tile.points, this.now);
    tile.points.push([this.now, value]);
  }

  draw() {
    for (const tile of this.tiles.values()) {
      const last = tile.points.at(-1)?.[0] ?? -Infinity;
      tile.canvas.parentElement.classList.toggle("old", this.now - last > FRESH);
      if (this.now - last > WINDOW) tile.value.textContent = "–";
      spark(tile, this.now);
    }
  }
}

function spark({ canvas, points, dots, top }, now) {
  const width = canvas.parentElement.clientWidth - 24;
  const height = 30;
  if (width < 10) return;
  const context = prepared(canvas, width, height);
  const most = top ?? Math.max(...points.map(([, value]) => value), 1e-9);
  const at = ([time, value]) => [width * (1 - (now - time) / WINDOW), height - 2 - (height - 5) * (value / most)];
  context.strokeStyle = context.fillStyle = colour("accent");
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  if (dots) {
    for (const point of points) {
      const [x, y] = at(point);
      context.beginPath();
      context.arc(x, y, 2, 0, 7);
      context.fill();
    }
  } else if (points.length) {
    context.beginPath();
    points.forEach((point) => context.lineTo(...at(point)));
    context.stroke();
    context.globalAlpha = 0.12;
    context.lineTo(at(points.at(-1))[0], height);
    context.lineTo(at(points[0])[0], height);
    context.fill();
    context.globalAlpha = 1;
  }
  context.fillStyle = colour("line");
  context.fillRect(0, height - 1, width, 1);
}

const recent = (points, now) => points.filter(([time]) => now - time <= WINDOW);

export const sum = (values) => values.reduce((a, b) => a + b, 0);

function quantile(values, q) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
}
