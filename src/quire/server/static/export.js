/* A conversation as JSON, or its last request as a curl command. */

import { $ } from "./dom.js";

export class Exporter {
  /** source: () => the turns of the chat. */
  constructor(source) {
    this.source = source;
    $("export").addEventListener("click", () => this.#open());
    $("export-close").addEventListener("click", () => $("export-dialog").close());
    $("export-kinds").addEventListener("change", () => this.#fill());
    $("export-copy").addEventListener("click", () => this.#copy());
    $("export-save").addEventListener("click", () => this.#save());
  }

  #open() {
    this.#fill();
    $("export-dialog").showModal();
  }

  get #kind() {
    return $("export-kinds").querySelector(":checked").value;
  }

  #fill() {
    $("export-said").textContent = "";
    const text = this.#kind === "json" ? asJson(this.source()) : asCurl(this.source());
    $("export-text").textContent = text;
  }

  async #copy() {
    try {
      await navigator.clipboard.writeText($("export-text").textContent);
      $("export-said").textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren($("export-text"));
      $("export-said").textContent = "Selected: copy it with the keyboard.";
    }
  }

  #save() {
    const json = this.#kind === "json";
    const blob = new Blob([$("export-text").textContent], { type: json ? "application/json" : "text/plain" });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = json ? "conversation.json" : "request.sh";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
}

/** All turns, with what each answer was asked with, took and cost. */
export function asJson(turns) {
  const out = turns.map(({ text, answers }) => ({
    user: text,
    answers: answers.map((answer) => {
      const { messages: _, ...parameters } = answer.body;
      return {
        side: answer.side,
        parameters,
        message: answer.message,
        finish_reason: answer.finish,
        error: answer.error?.message,
        usage: answer.usage,
        seconds_to_first_token: answer.times.first,
        tokens_per_second: answer.rate,
        logprobs: answer.logprobs.length ? answer.logprobs : undefined,
      };
    }),
  }));
  const messages = turns.length ? turns.at(-1).answers[0].body.messages.concat(turns.at(-1).answers[0].message) : [];
  return JSON.stringify({ messages, turns: out }, null, 2);
}

/** The key is left to the shell: exported text gets passed on. */
export function asCurl(turns) {
  const url = new URL("v1/chat/completions", document.baseURI);
  return turns.at(-1).answers.map(({ body }) =>
    [
      `curl -N ${quote(url.href)}`,
      "-H 'Content-Type: application/json'",
      '-H "Authorization: Bearer $QUIRE_KEY"',
      `-d ${quote(JSON.stringify(body, null, 2))}`,
    ].join(" \\\n  "),
  ).join("\n\n");
}

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
