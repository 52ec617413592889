/* All numbers that the engine counts, by the names that people know. Features name their own. */

import { sum } from "./charts.js";
import { $, duration, make, number } from "./dom.js";

const NAMES = {
  steps: "Steps",
  prompt_tokens: "Prompt tokens taken",
  generation_tokens: "Tokens generated",
  prefix_query_tokens: "Prefix tokens looked up",
  prefix_hit_tokens: "Prefix tokens found",
  evicted_blocks: "Kept blocks given up",
  copied_blocks: "Partly shared blocks copied",
  preemptions: "Preemptions",
  blocks_total: "Blocks",
  blocks_used: "Blocks in use",
  blocks_cached: "Blocks kept for reuse",
  blocks_free: "Blocks free",
  swapped: "Preempted, to be brought back",
};

/** Where prompts' tokens came from: the name, and the class of its part of the bar. */
const SOURCES = { device: "the cache", host: "host memory", disk: "files", computed: "computed" };

/** Told by the figures above. */
const ELSEWHERE = new Set(["running", "waiting"]);

/** The units of distributions, by the end of their names. */
const UNITS = { seconds: duration, tokens: (value) => `${number(value, 1)} tokens` };

export class Counters {
  constructor() {
    this.values = new Map();
    this.parts = new Map();
    const legend = make("ul", { class: "legend" });
    for (const [source, name] of Object.entries(SOURCES)) {
      const part = make("i", { class: `source ${source}` });
      const item = make("li", {}, make("i", { class: `source ${source}` }), name);
      legend.append(item);
      this.parts.set(source, { part, item });
    }
    const parts = [...this.parts.values()].map(({ part }) => part);
    this.bar = make("div", { class: "budget", role: "img" }, ...parts);
    const title = make("p", { class: "label" }, "Tokens of prompts that have started");
    $("sources").append(title, this.bar, legend);
  }

  take({ stats }, { rows }) {
    if (!stats) return;
    this.rows = rows ?? {};
    this.#sources(stats);
    const { histograms = {}, ...counts } = stats;
    for (const [name, value] of Object.entries(counts)) {
      if (ELSEWHERE.has(name)) continue;
      for (const [key, count] of flat(name, value)) this.#show(key, number(count, Number.isInteger(count) ? 0 : 2));
    }
    for (const [name, { counts: each, total }] of Object.entries(histograms)) {
      const count = sum(each);
      const unit = UNITS[name.split("_").at(-1)] ?? ((value) => number(value, 2));
      this.#show(name, count ? `mean ${unit(total / count)}, of ${number(count)}` : "none yet");
    }
  }

  #sources({ prefix_query_tokens: all, prefix_hit_tokens: hits, tiers }) {
    const host = tiers?.host_hit_tokens ?? 0;
    const disk = tiers?.disk_hit_tokens ?? 0;
    const counts = { device: Math.max(0, hits - host - disk), host, disk, computed: all - hits };
    for (const [source, { part, item }] of this.parts) {
      part.style.width = all ? `${(100 * counts[source]) / all}%` : "0";
      part.title = `${SOURCES[source]}: ${number(counts[source])}`;
      item.hidden = !tiers && (source === "host" || source === "disk");
    }
    const told = Object.entries(SOURCES).map(([source, name]) => `${name} ${number(counts[source])}`);
    this.bar.setAttribute("aria-label", told.join(", "));
  }

  #show(key, text) {
    let element = this.values.get(key);
    if (!element) {
      element = make("dd", { class: "num" });
      this.values.set(key, element);
      $("counters").append(make("div", {}, make("dt", {}, NAMES[key] ?? this.rows[key] ?? words(key)), element));
    }
    element.textContent = text;
  }
}

/** A statistic as numbers by name: one, the sum of a list, or those of an object. */
function flat(name, value) {
  if (typeof value === "number") return [[name, value]];
  if (Array.isArray(value)) return value.every(Number.isFinite) ? [[name, sum(value)]] : [];
  return Object.entries(value ?? {}).flatMap(([key, each]) => flat(`${name}.${key}`, each));
}

const words = (name) => name.charAt(0).toUpperCase() + name.slice(1).replaceAll(/[_.]/g, " ");
