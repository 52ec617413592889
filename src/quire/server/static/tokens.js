/* Tokens as they came, coloured by probability, with the alternatives on hover or focus. */

import { $, make, number } from "./dom.js";

/** Probabilities at which the colour changes. */
const STEPS = [0.9, 0.5, 0.2, 0.05];

function level(logprob) {
  const probability = Math.exp(logprob);
  return STEPS.filter((step) => probability < step).length;
}

/** The text of an answer as its tokens, as far as they came with log-probabilities. */
export class TokenText {
  constructor(label) {
    this.element = make("div", { class: "tokens" });
    this.label = label;
    this.infos = new Map();
    this.current = null;
    this.element.addEventListener("pointerover", (event) => this.#over(event.target));
    this.element.addEventListener("pointerleave", () => this.#leave());
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.element.addEventListener("blur", () => this.#leave());
  }

  /** entries: OpenAI's log-probabilities of the tokens that made `text`, if they came. */
  add(text, entries) {
    if (!entries.length) {
      this.element.append(text);
      return;
    }
    const whole = new TextDecoder();
    const pieces = entries.map((entry) => whole.decode(Uint8Array.from(entry.bytes ?? []), { stream: true }));
    // Text that was held back, a character in several tokens: then they are shown as one.
    const apart = pieces.join("") === text && pieces.every(Boolean);
    if (apart) entries.forEach((entry, i) => this.#span(pieces[i], [entry]));
    else if (text) this.#span(text, entries);
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "group");
    this.element.setAttribute("aria-label", `${this.label}. Arrow keys go from token to token.`);
  }

  #span(text, entries) {
    const least = Math.min(...entries.map((entry) => entry.logprob));
    const span = make("span", { class: `token p${level(least)}` }, text);
    this.infos.set(span, entries);
    this.element.append(span);
  }

  #over(target) {
    const span = target.closest(".token");
    if (span && this.element.closest(".coloured")) this.#show(span, false);
  }

  #key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };
    const step = steps[event.key];
    if (event.key === "Escape" && this.current) {
      this.#leave();
      event.stopPropagation();
    }
    if (step === undefined) return;
    const spans = [...this.infos.keys()];
    const at = this.current ? spans.indexOf(this.current) : step > 0 ? -1 : spans.length;
    this.#show(spans[Math.max(0, Math.min(spans.length - 1, at + step))], true);
    event.preventDefault();
  }

  #show(span, aloud) {
    this.current?.classList.remove("current");
    this.current = span;
    span.classList.add("current");
    const entries = this.infos.get(span);
    const card = $("token-card");
    card.replaceChildren(...entries.flatMap(details));
    card.hidden = false;
    place(card, span);
    if (aloud) {
      span.scrollIntoView({ block: "nearest" });
      place(card, span);
      $("announcer").textContent = entries
        .map((entry) => `${visible(entry.token)} ${percent(entry.logprob)}`).join(", ");
    }
  }

  #leave() {
    this.current?.classList.remove("current");
    this.current = null;
    $("token-card").hidden = true;
  }
}

function details(entry) {
  const rows = (entry.top_logprobs ?? []).slice();
  const among = rows.some((row) => same(row, entry));
  if (!among) rows.push(entry);
  const body = rows.flatMap((row) => {
    const bar = make("div");
    bar.style.width = `${Math.max(0.5, 100 * Math.exp(row.logprob))}%`;
    return [
      make(
        "tr", { class: same(row, entry) ? "chosen" : null },
        make("td", {}, visible(row.token)), make("td", {}, percent(row.logprob)),
      ),
      make("tr", {}, make("td", { class: "bar-cell", colspan: 2 }, bar)),
    ];
  });
  return [
    make("div", {}, make("b", {}, visible(entry.token)), ` logprob ${number(entry.logprob, 3)}`),
    make("table", {}, ...body),
  ];
}

const same = (a, b) => a.token === b.token && String(a.bytes) === String(b.bytes);

function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  if (value > 0 && value < 0.01) return "< 0.01 %";
  return `${number(value, value < 10 ? 2 : 1)} %`;
}

/** A token with its spaces and line ends to be seen. */
function visible(token) {
  return token === "" ? "(nothing)" : token.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

function place(card, span) {
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const { width, height } = card.getBoundingClientRect();
  const left = Math.max(8, Math.min(innerWidth - width - 8, at.left));
  const below = at.bottom + 6 + height < innerHeight;
  card.style.left = `${left}px`;
  card.style.top = `${below ? at.bottom + 6 : Math.max(8, at.top - height - 6)}px`;
}
