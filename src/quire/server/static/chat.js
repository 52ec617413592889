/* The conversation: turns of one question and one answer, or two where sides are compared. */

import { Answer } from "./answer.js";
import { $, announce, make, store } from "./dom.js";
import { Exporter } from "./export.js";
import { Images, picture } from "./images.js";
import { FieldError, Params } from "./params.js";

const STARTERS = [
  "Tell me a story about a fox.",
  "Who are you?",
  "What is the capital of France?",
];

export class Chat {
  constructor({ onUnauthorized }) {
    this.onUnauthorized = onUnauthorized;
    this.turns = [];
    this.params = new Params();
    this.images = new Images();
    this.bottom = new Follower($("turns"));
    new Exporter(() => this.turns);
    for (const text of STARTERS) {
      $("starters").append(make("button", { type: "button", onclick: () => this.send(text) }, text));
    }
    this.#listen();
    $("colour").checked = store.get("colour", false);
    this.#colour();
  }

  focus() {
    if (matchMedia("(hover: hover)").matches) $("input").focus();
  }

  get #running() {
    return this.turns.flatMap((turn) => turn.answers).filter((answer) => answer.running);
  }

  get #sides() {
    return $("compare").checked ? ["a", "b"] : ["a"];
  }

  #listen() {
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#running.length) this.stop();
      else this.send($("input").value);
    });
    $("input").addEventListener("keydown", (event) => {
      // Enter also ends a word of an input method, and must not send then.
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        if (!this.#running.length) this.send($("input").value);
        event.preventDefault();
      }
    });
    addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
      if ($("params").classList.contains("open")) this.#params(false);
      else this.stop();
    });
    $("compare").addEventListener("change", () => this.#compare());
    $("colour").addEventListener("change", () => this.#colour());
    $("clear").addEventListener("click", () => this.#clear());
    $("open-params").addEventListener("click", () => this.#params(true));
    $("close-params").addEventListener("click", () => this.#params(false));
  }

  #params(open) {
    $("params").classList.toggle("open", open);
    (open ? $("close-params") : $("open-params")).focus();
  }

  #compare() {
    this.params.compare($("compare").checked);
  }

  #colour() {
    store.set("colour", $("colour").checked);
    $("turns").classList.toggle("coloured", $("colour").checked);
    $("scale").hidden = !$("colour").checked;
    const last = this.turns.at(-1)?.answers[0];
    if ($("colour").checked && last && !last.logprobs.length) {
      announce("Probabilities come with the next answer.");
      last.facts.append(make("span", { class: "later" }, "coloured from the next answer on"));
    }
  }

  #clear() {
    this.stop();
    this.#truncate(0);
    this.focus();
  }

  /** Drops the turns from `at` on. */
  #truncate(at) {
    for (const turn of this.turns.splice(at)) {
      turn.answers.forEach((answer) => answer.stop());
      turn.element.remove();
    }
    this.#update();
  }

  stop() {
    for (const answer of this.#running) answer.stop();
  }

  // -- sending ------------------------------------------------------------------------------------

  send(text) {
    if (this.#running.length || !(text.trim() || this.images.chosen.length)) return;
    const turn = { text, images: this.images.chosen, answers: [] };
    const bodies = this.#bodies(turn, this.turns);
    if (!bodies) return;
    $("input").value = "";
    this.images.put([]);
    this.#show(turn);
    this.turns.push(turn);
    this.#run(turn, bodies);
  }

  /** The requests of a turn, one a side; null where a parameter is no good, which is shown. */
  #bodies(turn, before) {
    const bodies = {};
    for (const side of this.#sides) {
      try {
        const { body, system } = this.params.body(side, { logprobs: $("colour").checked });
        const messages = system ? [{ role: "system", content: system }] : [];
        for (const { text, images, answers } of before) {
          const answer = answers.find((each) => each.side === side) ?? answers[0];
          // Where nothing came there was no turn.
          if (answer.empty) continue;
          messages.push(question(text, images), answer.message);
        }
        messages.push(question(turn.text, turn.images));
        bodies[side] = { messages, ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
      } catch (error) {
        if (!(error instanceof FieldError)) throw error;
        this.params.pointAt(error, side);
        return null;
      }
    }
    return bodies;
  }

  #show(turn) {
    const edit = make("button", { type: "button", class: "quiet", onclick: () => this.#edit(turn) }, "Edit");
    turn.box = make("div", { class: "answers" });
    turn.element = make(
      "section", { class: "turn" },
      make(
        "div", { class: "asked" },
        turn.images.length ? make("div", { class: "pictures" }, ...turn.images.map(picture)) : null,
        turn.text, make("span", { class: "actions" }, edit),
      ),
      turn.box,
    );
    $("turns").append(turn.element);
  }

  /** Goes back to before a turn, its text in the composer. */
  #edit(turn) {
    this.#truncate(this.turns.indexOf(turn));
    this.images.put(turn.images);
    $("input").value = turn.text;
    $("input").focus();
  }

  #regenerate(turn) {
    const at = this.turns.indexOf(turn);
    const bodies = this.#bodies(turn, this.turns.slice(0, at));
    if (!bodies) return;
    this.#truncate(at + 1);
    this.#run(turn, bodies);
  }

  async #run(turn, bodies) {
    turn.answers = Object.entries(bodies).map(
      ([side, body]) => new Answer(side, body, this.params.difference(side)),
    );
    turn.box.replaceChildren(...turn.answers.map((answer) => answer.element));
    turn.element.classList.toggle("compared", turn.answers.length > 1);
    this.bottom.go();
    await this.#watch(turn, turn.answers.map((answer) => answer.run(() => this.bottom.follow())));
  }

  /** Lets the model go on with an answer that was stopped, or cut off at its limit. */
  async #continue(turn, answer) {
    const at = this.turns.indexOf(turn);
    const body = this.#bodies(turn, this.turns.slice(0, at))?.[answer.side];
    if (!body) return;
    this.#truncate(at + 1);
    body.messages.push(answer.message);
    Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    turn.answers.forEach((each) => each.actions.replaceChildren());
    await this.#watch(turn, [answer.resume(body, () => this.bottom.follow())]);
  }

  /** Waits for a turn's answers, and offers what can be done with them. */
  async #watch(turn, runs) {
    this.#update();
    await Promise.all(runs);
    const refused = turn.answers.find((answer) => answer.error?.status === 401);
    if (refused) this.onUnauthorized(refused.error);
    turn.answers[0].actions.append(
      make("button", { type: "button", class: "quiet", onclick: () => this.#regenerate(turn) }, "Regenerate"),
    );
    for (const answer of turn.answers) {
      if (answer.continuable && this.#sides.includes(answer.side)) {
        answer.actions.append(make("button", { type: "button", class: "quiet", onclick: () => this.#continue(turn, answer) }, "Continue"));
      }
      if (!answer.content) continue;
      answer.actions.append(make("button", { type: "button", class: "quiet", onclick: () => copy(answer) }, "Copy"));
    }
    this.bottom.follow();
    this.#update();
    announce(turn.answers.map((answer) => answer.error ? "Failed." : answer.content).join(" "));
  }

  #update() {
    const running = this.#running.length > 0;
    $("send").textContent = running ? "Stop" : "Send";
    $("send").classList.toggle("stop", running);
    $("send").classList.toggle("primary", !running);
    $("welcome").hidden = this.turns.length > 0;
    $("export").disabled = running || !this.turns.length;
    $("clear").disabled = !this.turns.length;
    $("compare").disabled = running;
  }
}

/** A user's message: text, or parts where there are images. */
function question(text, images) {
  if (!images.length) return { role: "user", content: text };
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  if (text) parts.push({ type: "text", text });
  return { role: "user", content: parts };
}

async function copy(answer) {
  try {
    await navigator.clipboard.writeText(answer.content);
    announce("Copied.");
  } catch {
    getSelection().selectAllChildren(answer.box);
  }
}

/** Keeps the end of a scrolled box in sight, unless its reader has gone up. */
class Follower {
  constructor(box) {
    this.box = box;
    this.stays = true;
    let last = 0;
    box.addEventListener("scroll", () => {
      // Text that came meanwhile moves the end away too: only going up is the reader's wish.
      if (box.scrollTop < last - 2) this.stays = false;
      if (box.scrollHeight - box.scrollTop - box.clientHeight < 40) this.stays = true;
      last = box.scrollTop;
    }, { passive: true });
  }

  go() {
    this.stays = true;
    this.box.scrollTop = this.box.scrollHeight;
  }

  follow() {
    if (this.stays) this.go();
  }
}
