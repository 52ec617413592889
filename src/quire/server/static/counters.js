/* All numbers that the engine counts, by the names that people know. Features name their own. */

import { sum } from "./charts.js";
import { $, duration, make, number, size } from "./dom.js";
import { DELAYS } from "./requests.js";

/** The engine's own counters, by the group that shows them. Features name theirs. */
const GROUPS = {
  Work: {
    steps: "Steps", prompt_tokens: "Prompt tokens", generation_tokens: "Generated tokens",
    late_rows: "Rows that missed a step", broken_logits: "Answers ended by broken logits",
  },
  "A step, on average": {
    step_seconds: "Time", step_device_seconds: "Time on the device", step_requests: "Requests",
    step_tokens: "Tokens", prefill_seconds: "Time of a whole prompt",
  },
  "KV blocks": {
    blocks_total: "All", blocks_used: "In use", blocks_cached: "Kept for reuse", blocks_free: "Free",
    evicted_blocks: "Evicted so far", copied_blocks: "Copied because partly shared",
  },
  "Prefix cache": { prefix_query_tokens: "Tokens looked up", prefix_hit_tokens: "Tokens found" },
  Preemption: { preemptions: "Preemptions", set_back: "Preempted requests that wait", swapped: "Preemptions with saved blocks" },
};

/** Groups of features, and of what requests spent their time on, by the first word of their counters. */
const PREFIXES = {
  delay_seconds: "Time of all requests", tiers: "Lower tiers", grammars: "Grammars", speculation: "Speculation",
  weight_updates: "Weight updates", conversation_leases: "Conversation leases", adapters: "Adapters",
  disagg: "KV from other engines", experts: "Experts", images: "Images", ranks: "Ranks",
};

/** These groups are always shown, the others once one of their counters is not zero. */
const ALWAYS = new Set(["Work", "KV blocks", "Prefix cache"]);

const PLACES = new Map(Object.entries(GROUPS).flatMap(
  ([group, rows]) => Object.entries(rows).map(([key, name]) => [key, [group, name]]),
));

/** Where prompts' tokens came from: the name, and the class of its part of the bar. */
const SOURCES = { device: "the cache", host: "host memory", disk: "files", computed: "computed" };

/** Shown by the tiles. */
const ELSEWHERE = new Set(["running", "waiting"]);

export class Counters {
  constructor() {
    this.values = new Map();
    this.groups = new Map();
    for (const name of Object.keys(GROUPS)) this.#group(name);
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
      for (const [key, count] of flat(name, value)) this.#show(key, count, measured(key, count));
    }
    for (const [name, { counts: each, total }] of Object.entries(histograms)) {
      const count = sum(each);
      this.#show(name, count, count ? measured(name, total / count, 1) : "–");
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

  #show(key, count, text) {
    const row = this.values.get(key) ?? this.#row(key);
    row.value.textContent = text;
    row.value.classList.toggle("none", count === 0);
    if (count) row.group.hidden = false;
  }

  #row(key) {
    const [first, ...rest] = key.split(".");
    const [title, name] = PLACES.get(key) ?? [
      PREFIXES[first] ?? "Further",
      this.rows[key] ?? (first === "delay_seconds" ? DELAYS[rest[0]] : null) ?? words(rest.join(" ") || first),
    ];
    const group = this.groups.get(title) ?? this.#group(title);
    const value = make("dd", { class: "num" });
    group.list.append(make("div", {}, make("dt", {}, name.charAt(0).toUpperCase() + name.slice(1)), value));
    const row = { value, group: group.element };
    this.values.set(key, row);
    return row;
  }

  #group(title) {
    const list = make("dl");
    const element = make("section", { hidden: !ALWAYS.has(title) }, make("h3", {}, title), list);
    $("counters").append(element);
    const group = { element, list };
    this.groups.set(title, group);
    return group;
  }
}

/** A count with its unit, which the end of its name says. */
function measured(key, value, digits = Number.isInteger(value) ? 0 : 2) {
  if (/seconds/.test(key)) return value ? duration(value) : "0 s";
  if (/bytes/.test(key)) return size(value);
  return number(value, digits);
}

/** A statistic as numbers by name: one, the sum of a list, or those of an object. */
function flat(name, value) {
  if (typeof value === "number") return [[name, value]];
  if (Array.isArray(value)) return value.every(Number.isFinite) ? [[name, sum(value)]] : [];
  return Object.entries(value ?? {}).flatMap(([key, each]) => flat(`${name}.${key}`, each));
}

const words = (name) => name.charAt(0).toUpperCase() + name.slice(1).replaceAll(/[_.]/g, " ");
