/* Running requests as bars of their tokens, and those that wait. */

import { laneColour } from "./canvas.js";
import { $, duration, make, number } from "./dom.js";

/** What a request's seconds went to, by cause. */
export const DELAYS = {
  queue: "waited for its turn", sibling: "waited for the prompt it shares", kv: "waited for blocks",
  adapter: "waited for its adapter", grammar: "waited for its grammar", preempted: "set back",
  prefill: "computed its prompt", decode: "generated", prompts: "slowed by other prompts", inputs: "waited for masks",
};
const WAITS = { sibling: "the prompt it shares", kv: "blocks", adapter: "its adapter", grammar: "its grammar" };

export class Requests {
  /** highlight: told the lane of the request that is pointed at, or null. */
  constructor(highlight) {
    this.highlight = highlight;
    this.rows = new Map();
    const legend = { cached: "found in the cache", computed: "prompt computed", lacking: "to compute", output: "generated" };
    for (const [kind, name] of Object.entries(legend)) {
      $("requests-legend").append(make("li", {}, make("i", { class: `part ${kind}` }), name));
    }
    this.empty = make("p", { class: "empty" }, "Nothing runs. Send a message under Chat, or from anywhere else, and come back.");
  }

  take(event, state) {
    if (event.running || !this.shown) this.#running(state.running ?? [], state.stats);
    this.#clock(state.time);
    if (event.waiting || !this.shown) this.#waiting(state);
    this.shown = true;
  }

  #running(running, stats) {
    const longest = Math.max(...running.map(([, , prompt, , , known]) => Math.max(prompt, known)), 64);
    const scale = 2 ** Math.ceil(Math.log2(longest));
    const kept = new Map();
    for (const one of running) {
      const row = this.rows.get(one[0]) ?? new Row(one, this.highlight);
      row.take(one, scale);
      kept.set(one[0], row);
    }
    this.rows = kept;
    const elements = [...kept.values()].map((row) => row.element);
    const more = (stats?.running ?? 0) - elements.length;
    if (more > 0) elements.push(make("p", { class: "empty", role: "listitem" }, `and ${number(more)} more`));
    // Rows that stay are left where they are, so that focus and hover stay too.
    const box = $("requests");
    // A list must have items: what says that there are none is no item.
    if (kept.size) box.setAttribute("role", "list");
    else box.removeAttribute("role");
    $("requests-head").hidden = !kept.size;
    if (!elements.length) elements.push(this.empty);
    if (elements.length !== box.children.length || elements.some((each, i) => each !== box.children[i])) {
      box.replaceChildren(...elements);
    }
  }

  #clock(time) {
    for (const row of this.rows.values()) row.clock(time);
  }

  #waiting({ waiting = [], stats, time }) {
    const total = stats?.waiting ?? waiting.length;
    $("queue-size").textContent = total ? number(total) : "";
    if (!total) {
      $("queue").replaceChildren(make("p", { class: "empty" }, "Nobody waits."));
      return;
    }
    const most = Math.max(...waiting.map(([, tokens]) => tokens), 1);
    const chips = waiting.map(([id, tokens, since, parked, preemptions, cause]) => {
      const what = [
        `Request ${id}`, `${number(tokens)} tokens`, `came ${duration(time - since)} ago`,
        parked ? `waits for ${WAITS[cause] ?? cause}` : null, preemptions ? "preempted" : null,
      ];
      const chip = make("i", { class: `chip${parked ? " parked" : ""}`, title: what.filter(Boolean).join(", ") });
      chip.style.height = `${8 + 40 * Math.sqrt(tokens / most)}px`;
      return chip;
    });
    const label = `${number(total)} request${total > 1 ? "s" : ""} wait, ${number(waiting.length)} shown`;
    $("queue").replaceChildren(make("div", { class: "chips", role: "img", "aria-label": label }, ...chips));
  }
}

class Row {
  constructor([id, lane], highlight) {
    this.parts = ["cached", "computed", "lacking", "output"].map((kind) => make("i", { class: `part ${kind}` }));
    const swatch = make("i", { class: "swatch" });
    swatch.style.background = `var(--${laneColour(lane)})`;
    this.prompt = make("span", { class: "counts num" });
    this.generated = make("span", { class: "counts num" });
    this.age = make("span", { class: "age num" });
    this.bar = make("span", { class: "bar-box" }, ...this.parts);
    this.element = make(
      "div", { class: "row", role: "listitem", tabindex: 0 },
      swatch, make("span", { class: "id num" }, id), this.bar, this.prompt, this.generated, this.age,
    );
    this.element.style.setProperty("--own", `var(--${laneColour(lane)})`);
    for (const name of ["pointerenter", "focus"]) this.element.addEventListener(name, () => highlight(lane));
    for (const name of ["pointerleave", "blur"]) this.element.addEventListener(name, () => highlight(null));
  }

  take([id, , prompt, cached, computed, known, most, blocks, since, first, preemptions, delays], scale) {
    const done = Math.min(prompt, Math.max(computed, cached));
    const lengths = [cached, done - cached, prompt - done, known - prompt];
    lengths.forEach((length, i) => {
      this.parts[i].hidden = length === 0;
      this.parts[i].style.width = `${(100 * length) / scale}%`;
    });
    this.since = since;
    this.prompt.textContent = done < prompt ? `${number(done)} of ${number(prompt)}` : number(prompt);
    this.generated.textContent = number(known - prompt);
    const what = [
      `Request ${id}: prompt of ${number(prompt)} tokens, ${number(cached)} found in the cache`,
      `${number(known - prompt)} generated, at most ${number(most - prompt)}`,
      `${number(blocks)} blocks`,
      first === null ? null : `first token after ${duration(first - since)}`,
      preemptions ? `preempted ${preemptions} times` : null,
      ...Object.entries(delays).map(([cause, seconds]) => `${DELAYS[cause] ?? cause}: ${duration(seconds)}`),
    ];
    this.element.title = what.filter(Boolean).join("; ");
    this.element.setAttribute("aria-label", this.element.title);
  }

  clock(time) {
    this.age.textContent = duration(Math.max(0, Math.round(10 * (time - this.since)) / 10));
  }
}
