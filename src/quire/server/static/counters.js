/* All numbers that the engine counts, by the names that people know; those unknown here as they are. */

import { sum } from "./charts.js";
import { $, make, number } from "./dom.js";

const NAMES = {
  steps: "Steps",
  prompt_tokens: "Prompt tokens taken",
  generation_tokens: "Tokens generated",
  prefix_query_tokens: "Prefix tokens looked up",
  prefix_hit_tokens: "Prefix tokens found",
  preemptions: "Preemptions",
  blocks_total: "Blocks",
  blocks_used: "Blocks in use",
  blocks_cached: "Blocks kept for reuse",
  blocks_free: "Blocks free",
};

/** Told by the figures above. */
const ELSEWHERE = new Set(["running", "waiting"]);

export class Counters {
  constructor() {
    this.values = new Map();
  }

  take({ stats }) {
    if (!stats) return;
    for (const [name, value] of Object.entries(stats)) {
      if (ELSEWHERE.has(name)) continue;
      for (const [label, count] of flat(name, value)) this.#show(label, count);
    }
  }

  #show(label, count) {
    let element = this.values.get(label);
    if (!element) {
      element = make("dd", { class: "num" });
      this.values.set(label, element);
      $("counters").append(make("div", {}, make("dt", {}, label), element));
    }
    element.textContent = number(count, Number.isInteger(count) ? 0 : 2);
  }
}

/** A statistic as named numbers: one, one per key of an object, or the sum of a list. */
function flat(name, value) {
  const label = NAMES[name] ?? words(name);
  if (typeof value === "number") return [[label, value]];
  if (Array.isArray(value) && value.every((each) => typeof each === "number")) return [[label, sum(value)]];
  if (value && typeof value === "object" && !Array.isArray(value)) {
    return Object.entries(value).filter(([, each]) => typeof each === "number").map(([key, each]) => [`${label}, ${words(key).toLowerCase()}`, each]);
  }
  return [];
}

const words = (name) => name.charAt(0).toUpperCase() + name.slice(1).replaceAll("_", " ");
