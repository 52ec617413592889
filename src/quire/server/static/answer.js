/* One answer: the request, its stream, and what is shown of it. */

import { ApiError, events, explain, request } from "./api.js";
import { duration, make, number } from "./dom.js";
import { Formatted } from "./markdown.js";
import { TokenText } from "./tokens.js";

export class Answer {
  /** what: in compare mode, how its parameters differ. */
  constructor(side, body, what) {
    this.side = side;
    this.body = body;
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.logprobs = [];
    this.usage = null;
    this.finish = null;
    this.error = null;
    this.stopped = false;
    this.times = { first: null, last: null };
    this.abort = new AbortController();
    this.#build(what);
  }

  #build(what) {
    this.tokens = new TokenText(`Answer ${this.side.toUpperCase()}`);
    this.formatted = new Formatted(this.body.response_format ? "json" : null);
    this.box = make("div", { class: "answer-text" });
    this.thought = make("div");
    this.fold = make("details", { class: "reasoning", hidden: true, open: true }, make("summary", {}, "Reasoning"), this.thought);
    this.callsBox = make("pre", { class: "calls", hidden: true });
    this.facts = make("span", { class: "facts" });
    this.actions = make("span", { class: "actions" });
    this.element = make(
      "article", { class: "answer", "data-side": this.side, "aria-busy": "true", "aria-label": `Answer ${this.side.toUpperCase()}` },
      make("div", { class: "answer-head" }, make("b", { class: `side-${this.side}` }, this.side.toUpperCase()), make("span", { class: "what", title: what }, what)),
      this.fold, this.box, this.callsBox,
      make("div", { class: "answer-foot" }, this.facts, this.actions),
    );
  }

  get running() {
    return this.element.classList.contains("running");
  }

  /** Whether nothing came. */
  get empty() {
    return !this.content && !this.calls.length;
  }

  /** Whether a request can go on with the text: an answer in a format would begin anew. */
  get continuable() {
    const cut = this.stopped || this.error || this.finish === "length";
    return Boolean(cut && this.content && !this.calls.length && !this.body.response_format);
  }

  /** As the next request tells it. */
  get message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    const calls = this.calls.filter(Boolean);
    if (calls.length) message.tool_calls = calls;
    return message;
  }

  /** Runs to its end, whichever it is; never throws. onText: called after each piece. */
  async run(onText) {
    this.element.classList.add("running");
    const begin = performance.now();
    try {
      const response = await request("v1/chat/completions", { body: this.body, signal: this.abort.signal });
      for await (const { value } of events(response)) {
        this.#take(value, (performance.now() - begin) / 1000);
        onText();
      }
    } catch (error) {
      if (error.name === "AbortError") this.stopped = true;
      else if (error instanceof ApiError) this.error = error;
      else throw error;
    } finally {
      this.element.classList.remove("running");
      this.element.setAttribute("aria-busy", "false");
      this.#close();
      onText();
    }
  }

  /** Adds to the text with another request. */
  resume(body, onText) {
    Object.assign(this, { body, usage: null, finish: null, error: null, stopped: false, times: { first: null, last: null } });
    this.abort = new AbortController();
    this.element.querySelector(".answer-error")?.remove();
    this.element.setAttribute("aria-busy", "true");
    return this.run(onText);
  }

  stop() {
    this.abort.abort();
  }

  #take(chunk, now) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const { delta, logprobs, finish_reason: finish } of chunk.choices) {
      const entries = logprobs?.content ?? [];
      if (delta.content || delta.reasoning_content || delta.tool_calls || entries.length) {
        this.times.first ??= now;
        this.times.last = now;
      }
      if (delta.reasoning_content) this.#think(delta.reasoning_content);
      else if (delta.tool_calls) delta.tool_calls.forEach((call) => this.#call(call));
      else {
        if (delta.content && this.reasoning) this.fold.open = false;
        this.#write(delta.content ?? "", entries);
      }
      this.logprobs.push(...entries);
      if (finish) this.finish = finish;
    }
  }

  #write(text, entries) {
    if (!text && !entries.length) return;
    this.content += text;
    if (!this.box.firstChild) this.box.append(this.formatted.element, this.tokens.element);
    this.formatted.add(text);
    this.tokens.add(text, entries);
    if (entries.length) this.element.classList.add("with-tokens");
  }

  #think(text) {
    this.reasoning += text;
    this.fold.hidden = false;
    this.thought.append(text);
  }

  #call({ index, id, function: { name, arguments: part = "" } }) {
    this.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    const call = this.calls[index].function;
    call.name ||= name ?? "";
    call.arguments += part;
    this.callsBox.hidden = false;
    this.callsBox.textContent = this.calls.map((c) => `${c.function.name}(${c.function.arguments})`).join("\n");
  }

  /** Tokens a second while they came, without the wait for the first. */
  get rate() {
    const { first, last } = this.times;
    const tokens = this.usage?.completion_tokens ?? 0;
    return tokens > 1 && last > first ? (tokens - 1) / (last - first) : null;
  }

  #close() {
    this.formatted.close();
    if (this.error) {
      const text = explain(this.error);
      this.box.after(make("p", { class: "answer-error", role: "alert" }, text));
    }
    const thoughts = this.usage?.completion_tokens_details?.reasoning_tokens;
    if (thoughts) this.fold.querySelector("summary").textContent = `Reasoning, ${number(thoughts)} tokens`;
    const facts = [];
    const fact = (value, unit, title) => facts.push(make("span", { title }, make("b", {}, value), ` ${unit}`));
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      fact(number(this.usage.completion_tokens), "tokens", "Tokens of the answer");
      fact(number(this.usage.prompt_tokens), `prompt, ${number(cached)} cached`, "Tokens of the prompt, and how many of them came from the prefix cache");
    }
    if (this.times.first !== null) fact(duration(this.times.first), "to first", "From sending the request to the first token, as this browser saw it");
    if (this.rate !== null) fact(number(this.rate, 1), "tok/s", "After the first token, as this browser saw it");
    const why = this.stopped ? "stopped" : this.error ? null : ENDS[this.finish] ?? this.finish;
    if (why) facts.push(make("span", {}, why));
    this.facts.replaceChildren(...facts);
  }
}

const ENDS = { stop: "", length: "cut off at the limit", tool_calls: "calls a tool" };
