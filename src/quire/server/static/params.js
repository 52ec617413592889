/* What a request may set, as a form; two sets of it, A and B. An empty field is not sent: then the
 * server's and the model's own defaults hold. */

import { $, make, store } from "./dom.js";
import { PARAMETERS } from "./parameters.js";

const FIELDS = [
  { name: "system", label: "System prompt", kind: "text", whole: true },
  { group: "Sampling" },
  ...PARAMETERS,
  { name: "stop", label: "Stop at, one a line (\\n is a new line)", kind: "lines", whole: true },
  { group: "Format" },
  {
    name: "format", label: "Response format", kind: "choice", whole: true,
    choices: [["", "Text"], ["json_object", "Any JSON object"], ["json_schema", "JSON of a schema"]],
  },
  { name: "schema", label: "JSON schema", kind: "json", whole: true, only: "json_schema" },
  { name: "top_logprobs", label: "Alternatives shown", kind: "integer", otherwise: "5", min: 0, max: 20 },
  { name: "extra", label: "Further fields of the request (JSON)", kind: "json", whole: true },
];

const SCHEMA = `{
  "type": "object",
  "properties": {"name": {"type": "string"}},
  "required": ["name"]
}`;

/** A field whose text cannot be sent. */
export class FieldError extends Error {
  constructor(name, message) {
    super(message);
    this.field = name;
  }
}

export class Params {
  constructor() {
    this.sets = { a: {}, b: {}, ...store.get("params", {}) };
    this.side = "a";
    this.compared = false;
    this.controls = new Map();
    for (const field of FIELDS) $("params-form").append(this.#row(field));
    $("params-form").addEventListener("submit", (event) => event.preventDefault());
    $("params-form").addEventListener("input", () => this.#read());
    $("sides").addEventListener("change", (event) => this.#turnTo(event.target.value));
    $("reset-params").addEventListener("click", () => {
      this.sets[this.side] = {};
      this.#changed();
      this.#show();
    });
    this.#show();
  }

  /** Shows the values that hold where a field is empty: the API's, and those that the model sets. */
  defaults(given) {
    for (const [name, value] of Object.entries(given ?? {})) {
      const found = this.controls.get(name);
      if (found) found.control.placeholder = String(value);
    }
  }

  /** With `on` there are two sets; B begins as A is. */
  compare(on) {
    this.compared = on;
    $("sides").hidden = !on;
    if (on && !Object.keys(this.sets.b).length) this.sets.b = { ...this.sets.a };
    if (!on) this.#turnTo("a");
    this.#show();
  }

  /** The request's fields but for the messages, and the system prompt. Throws FieldError. */
  body(side, { logprobs }) {
    const set = this.sets[side];
    const body = {};
    for (const { name, kind, label } of FIELDS) {
      const text = set[name] ?? "";
      if (!name || text === "" || ["system", "format", "schema", "top_logprobs", "extra"].includes(name)) continue;
      if (kind === "lines") body[name] = text.split("\n").filter(Boolean).map(unescape);
      else body[name] = numberOf(name, label, text, kind);
    }
    if (set.format === "json_object") body.response_format = { type: "json_object" };
    if (set.format === "json_schema") {
      const schema = objectOf("schema", "JSON schema", set.schema || SCHEMA);
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    }
    if (logprobs) {
      body.logprobs = true;
      body.top_logprobs = numberOf("top_logprobs", "Alternatives shown", set.top_logprobs || "5", "integer");
    }
    if (set.extra) Object.assign(body, furtherFields(set.extra));
    return { body, system: set.system ?? "" };
  }

  /** In a few words, what this side has that the other has not. */
  difference(side) {
    const [own, other] = side === "a" ? [this.sets.a, this.sets.b] : [this.sets.b, this.sets.a];
    const names = FIELDS.filter(({ name }) => name && (own[name] ?? "") !== (other[name] ?? ""));
    if (!names.length) return "same parameters";
    return names.map(({ name }) => `${name} ${short(own[name])}`).join(", ");
  }

  /** Takes whoever made a mistake to it. */
  pointAt(error, side) {
    $("params").classList.add("open");
    if (this.compared) this.#turnTo(side);
    const { control, why } = this.controls.get(error.field);
    control.classList.add("invalid");
    why.textContent = error.message;
    why.hidden = false;
    control.focus();
  }

  #turnTo(side) {
    this.side = side;
    for (const radio of $("sides").querySelectorAll("input")) radio.checked = radio.value === side;
    this.#show();
  }

  #row(field) {
    if (field.group) return make("div", { class: "group" }, field.group);
    const id = `param-${field.name}`;
    const control = widget(field, id);
    const why = make("span", { class: "why", role: "alert", hidden: true });
    const row = make(
      "div", { class: `field${field.whole ? " whole" : ""}` },
      make("label", { for: id, title: field.help }, field.label), control, why,
    );
    this.controls.set(field.name, { field, control, row, why });
    return row;
  }

  #read() {
    const set = {};
    for (const [name, { control }] of this.controls) {
      // What a number field cannot read as one is shown as "", and must not count as empty.
      const value = control.validity?.badInput ? "?" : control.value;
      if (value !== "") set[name] = value;
    }
    this.sets[this.side] = set;
    this.#changed();
    this.#mark();
  }

  #changed() {
    store.set("params", this.sets);
  }

  #show() {
    for (const [name, { control }] of this.controls) control.value = this.sets[this.side][name] ?? "";
    this.#mark();
  }

  #mark() {
    for (const [name, { field, control, row, why }] of this.controls) {
      const differs = (this.sets.a[name] ?? "") !== (this.sets.b[name] ?? "");
      row.classList.toggle("differs", this.compared && this.side === "b" && differs);
      row.hidden = Boolean(field.only) && this.sets[this.side].format !== field.only;
      control.classList.remove("invalid");
      why.hidden = true;
    }
  }
}

function widget({ name, kind, choices, min, max, step, otherwise }, id) {
  if (kind === "choice") {
    return make("select", { id, name }, ...choices.map(([value, text]) => make("option", { value }, text)));
  }
  if (kind === "number" || kind === "integer") {
    return make("input", {
      id, name, type: "number", min, max, step: step ?? 1, placeholder: otherwise,
      inputmode: kind === "integer" ? "numeric" : "decimal",
    });
  }
  const code = kind === "json";
  const placeholder = name === "schema" ? SCHEMA : name === "extra" ? '{"logit_bias": {"11": -5}}' : null;
  return make("textarea", { id, name, rows: 2, class: code ? "code" : null, spellcheck: code ? "false" : null, placeholder });
}

function numberOf(name, label, text, kind) {
  const value = Number(text);
  if (!Number.isFinite(value)) throw new FieldError(name, `${label} is no number.`);
  if (kind === "integer" && !Number.isInteger(value)) throw new FieldError(name, `${label} is no integer.`);
  if (kind === "integer" && !Number.isSafeInteger(value)) throw new FieldError(name, `${label} is too large.`);
  return value;
}

function objectOf(name, label, text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new FieldError(name, `${label}: ${error.message}.`);
  }
  if (value === null || typeof value !== "object" || Array.isArray(value)) {
    throw new FieldError(name, `${label} must be a JSON object.`);
  }
  return value;
}

function furtherFields(text) {
  const fields = objectOf("extra", "Further fields", text);
  const own = ["messages", "stream", "stream_options", "n"].find((name) => name in fields);
  if (own) throw new FieldError("extra", `The page itself sets ${own}.`);
  return fields;
}

const unescape = (text) => text.replace(/\\([nt\\])/g, (_, c) => ({ n: "\n", t: "\t", "\\": "\\" })[c]);

function short(value) {
  if (value === undefined || value === "") return "default";
  return value.length > 24 ? `${value.slice(0, 22)}…` : value;
}
