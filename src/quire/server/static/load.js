/* A button that makes load: prompts of several lengths, which share a beginning, for a short time. */

import { ApiError, events, explain, request } from "./api.js";
import { $ } from "./dom.js";

const SECONDS = 30;
/** Browsers keep six connections to a server, and one of them is the view's. */
const CONNECTIONS = 4;
const TOKENS = 128;
const BEGINNING = "You are the keeper of a lighthouse, and write down what the sea brings. ".repeat(4);
const MIDDLE = "The wind turned, and a sail stood on the horizon. ";

export class Load {
  constructor() {
    this.abort = null;
    this.sent = 0;
    $("load").addEventListener("click", () => (this.abort ? this.stop() : this.start()));
    addEventListener("pagehide", () => this.stop());
  }

  stop() {
    this.abort?.abort();
  }

  async start() {
    const abort = new AbortController();
    this.abort = abort;
    const end = performance.now() + 1000 * SECONDS;
    const tick = setInterval(() => this.#say(end), 250);
    const timer = setTimeout(() => abort.abort(), 1000 * SECONDS);
    this.#say(end);
    $("load-said").textContent = "";
    const each = Number($("load-count").value) / CONNECTIONS;
    try {
      await Promise.all(Array.from({ length: CONNECTIONS }, () => this.#run(each, abort.signal)));
    } catch (error) {
      abort.abort();
      if (error instanceof ApiError) $("load-said").textContent = `The load has ended: ${explain(error)}`;
      else if (error.name !== "AbortError") throw error;
    } finally {
      clearInterval(tick);
      clearTimeout(timer);
      this.abort = null;
      $("load").textContent = "Make load";
      $("load-count").disabled = false;
    }
  }

  /** One request after the other, each of `count` prompts, until `signal`. */
  async #run(count, signal) {
    while (!signal.aborted) {
      const prompt = Array.from({ length: count }, () => this.#prompt());
      const body = { prompt, max_tokens: TOKENS, ignore_eos: true, stream: true };
      for await (const _ of events(await request("v1/completions", { body, signal })));
    }
  }

  #prompt() {
    this.sent += 1;
    return `${BEGINNING}Day ${this.sent}. ${MIDDLE.repeat(this.sent % 7)}`;
  }

  #say(end) {
    $("load").textContent = `Stop load, ${Math.max(0, Math.ceil((end - performance.now()) / 1000))} s`;
    $("load-count").disabled = true;
  }
}
