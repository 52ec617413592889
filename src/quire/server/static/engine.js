/* The live view: keeps a stream open while it is looked at, and hands its events to the panels. */

import { ApiError, events, explain, request } from "./api.js";
import { Tiles } from "./charts.js";
import { Counters } from "./counters.js";
import { $, calm } from "./dom.js";
import { Load } from "./load.js";
import { Pools } from "./pool.js";
import { Requests } from "./requests.js";
import { Step } from "./step.js";
import { Tree } from "./tree.js";

const LONGEST_PAUSE = 15;
/** Seconds without an answer after which the server is taken to be busy. */
const PATIENCE = 3;
const BUSY = [429, 503];

export class Engine {
  constructor({ onUnauthorized }) {
    this.onUnauthorized = onUnauthorized;
    this.wanted = false;
    this.paused = false;
    this.state = {};
    this.stream = null;
    const pools = new Pools();
    const requests = new Requests((lane) => pools.highlight(lane));
    this.panels = [new Tiles(), pools, new Step(), requests, new Counters(), new Tree()];
    this.load = new Load();
    document.addEventListener("visibilitychange", () => this.#settle());
    $("live-retry").addEventListener("click", () => this.reconnect());
    $("live-pause").addEventListener("click", () => this.#pause(!this.paused));
  }

  /** Whether the view is in sight. The engine is asked for nothing while it is not. */
  watch(wanted) {
    this.wanted = wanted;
    this.#settle();
    if (wanted) this.redraw();
  }

  reconnect() {
    this.#stop();
    this.#settle();
  }

  /** The size or the colours may be others. */
  redraw() {
    if (this.wanted) for (const panel of this.panels) panel.draw?.();
  }

  #pause(paused) {
    this.paused = paused;
    $("live-pause").textContent = paused ? "Go on" : "Pause";
    $("live-pause").setAttribute("aria-pressed", paused);
    this.#settle();
  }

  #settle() {
    const open = this.wanted && !this.paused && !document.hidden;
    // Nobody sees what it does.
    if (!this.wanted || document.hidden) this.load.stop();
    if (open && !this.stream) this.#run();
    if (!open) {
      this.#stop();
      this.#say(this.paused ? "paused" : "connecting");
    }
  }

  #stop() {
    this.stream?.abort();
    this.stream = null;
  }

  /** One stream after the other, with growing pauses where they fail, until told to stop. */
  async #run() {
    const stream = new AbortController();
    this.stream = stream;
    let pause = 1;
    while (this.stream === stream) {
      let why = "";
      let state = "disconnected";
      const late = setTimeout(() => {
        if (this.stream === stream) this.#say("overloaded", "The server takes long to answer: it has more to do than it can.");
      }, 1000 * PATIENCE);
      try {
        if (pause === 1) this.#say("connecting");
        const rate = calm.matches ? 1 : 10;
        const response = await request(`engine/live?rate=${rate}`, { signal: stream.signal });
        this.state = {};
        for await (const { value } of events(response)) {
          clearTimeout(late);
          this.#take(value);
          pause = 1;
        }
        why = "The server ended the stream.";
      } catch (error) {
        if (this.stream !== stream) return;
        if (!(error instanceof ApiError)) throw error;
        why = explain(error);
        if (BUSY.includes(error.status)) state = "overloaded";
        if (error.status === 401) {
          this.onUnauthorized(error);
          this.#say("locked", why);
          return;
        }
      } finally {
        clearTimeout(late);
      }
      if (this.stream !== stream) return;
      this.#say(state, `${why} Next try in ${pause} s.`);
      await sleep(pause, stream.signal);
      pause = Math.min(2 * pause, LONGEST_PAUSE);
    }
  }

  #take(event) {
    this.#say("live");
    const before = this.state;
    this.state = { ...before, ...event };
    for (const panel of this.panels) panel.take(event, this.state, before);
  }

  #say(state, why = "") {
    const pill = $("live-state");
    const names = { live: "Live", connecting: "Connecting", paused: "Paused", disconnected: "Disconnected", overloaded: "Overloaded", locked: "Locked" };
    if (pill.textContent !== names[state]) pill.textContent = names[state];
    pill.dataset.state = state;
    $("engine").classList.toggle("stale", state !== "live" && state !== "paused");
    $("live-why").textContent = why;
    $("live-retry").hidden = state !== "disconnected" && state !== "overloaded";
  }
}

function sleep(seconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}
