/* What the last step computed: chunks of prompts as bars of their length, generating requests as one
 * square each; and how that went in the last steps that were seen. */

import { laneColour, onResize, prepared } from "./canvas.js";
import { $, colour, make, number } from "./dom.js";

const SEEN = 150;

export class Step {
  constructor() {
    this.bar = make("div", { class: "budget", role: "img", "aria-label": "No step yet" });
    this.squares = make("div", { class: "squares", role: "img", "aria-label": "No step yet" });
    this.prompts = make("span", { class: "num" });
    this.generating = make("span", { class: "num" });
    this.canvas = make("canvas", { role: "img", "aria-label": "Tokens of the last steps seen" });
    this.scales = make("span", { class: "num" });
    this.history = [];
    $("step").append(
      make("p", { class: "label" }, "Prompt tokens", this.prompts), this.bar,
      make("p", { class: "label" }, "Generating", this.generating), this.squares,
      make("p", { class: "label" }, "Steps seen", this.scales), this.canvas,
    );
    onResize($("step"), () => this.draw());
  }

  take(event, state) {
    if (event.stats && !state.stats.running) this.#rest(state.step);
    if (!(event.step || event.prompt_step) || !state.stats.running) return;
    const { step, prompt_step: last } = state;
    if (this.history.length && this.history.at(-1).number > step.number) this.history = [];
    // A prompt takes few steps, which are rarely the last: the last that had one is shown.
    if (last && this.#isNew(last)) this.history.push(last);
    if (this.#isNew(step)) this.history.push(step);
    this.history = this.history.slice(-SEEN);
    $("step-number").textContent = number(step.number);
    this.#chunks(last, step, state.engine.budget);
    this.#generating(step, state.engine.lanes);
    this.draw();
  }

  #isNew(step) {
    return !this.history.length || step.number > this.history.at(-1).number;
  }

  #chunks(last, step, budget) {
    const chunks = last?.rows.filter(([, , , prompt]) => prompt) ?? [];
    const when = !last || last.number === step.number ? "" : `, ${number(step.number - last.number)} steps ago`;
    this.prompts.textContent = `${number(last?.prompt_tokens ?? 0)} of ${number(budget)}${when}`;
    this.bar.classList.toggle("past", when !== "");
    this.bar.replaceChildren(...chunks.map(([id, lane, tokens]) => {
      const part = make("i", { title: `Request ${id}: ${number(tokens)} tokens of its prompt` });
      part.style.width = `${(100 * tokens) / budget}%`;
      part.style.background = `var(--${laneColour(lane)})`;
      return part;
    }));
    this.bar.setAttribute("aria-label", `${chunks.length} chunks of prompts, ${last?.prompt_tokens ?? 0} tokens${when}`);
  }

  #generating(step, lanes) {
    this.generating.textContent = `${number(step.generating)} of ${number(lanes)}`;
    const rows = step.rows.filter(([, , , prompt]) => !prompt);
    this.squares.replaceChildren(...rows.map(([id, lane, tokens]) => {
      const part = make("i", { title: `Request ${id}: ${number(tokens)} token${tokens > 1 ? "s" : ""}` });
      part.style.background = `var(--${laneColour(lane)})`;
      if (tokens > 1) part.style.width = `${9 + 4 * (tokens - 1)}px`;
      return part;
    }));
    this.squares.setAttribute("aria-label", `${step.generating} requests generate`);
  }

  /** Nothing runs: the last step is over. */
  #rest(step) {
    $("step-number").textContent = step ? `idle after ${number(step.number)}` : "idle";
    this.prompts.textContent = this.generating.textContent = "";
    this.bar.replaceChildren();
    this.squares.replaceChildren();
    this.draw();
  }

  /** Prompts upwards, generated tokens downwards, each on its own scale. */
  draw() {
    const width = $("step").clientWidth;
    if (width < 20) return;
    const height = 84;
    const context = prepared(this.canvas, width, height);
    const middle = 50;
    const pitch = width / SEEN;
    const prompts = Math.max(...this.history.map((step) => step.prompt_tokens), 1);
    const rows = Math.max(...this.history.map((step) => step.generating), 1);
    this.history.forEach((step, i) => {
      const x = width - (this.history.length - i) * pitch;
      const up = (middle - 4) * (step.prompt_tokens / prompts);
      const down = (height - middle - 6) * (step.generating / rows);
      context.fillStyle = colour("c5");
      if (step.prompt_tokens) context.fillRect(x, middle - Math.max(1, up), Math.max(1, pitch - 0.6), Math.max(1, up));
      context.fillStyle = colour("accent");
      context.fillRect(x, middle + 1, Math.max(1, pitch - 0.6), down);
    });
    context.fillStyle = colour("line");
    context.fillRect(0, middle, width, 1);
    this.scales.textContent = this.history.length
      ? `↑ prompt, to ${number(prompts)} · ↓ generating, to ${number(rows)}` : "";
  }
}
