/* Markdown as elements. The parser yields tokens, and each token becomes an element with text. No markup is
 * made from strings, so that HTML in an answer is shown, and cannot run. Parser and highlighter are loaded
 * with the first answer that needs them. */

import { make } from "./dom.js";

/** Characters from which on an answer is shown as it is: parsing it again and again would take too long. */
const MOST = 200_000;
/** Share of the time that may go to parsing while an answer streams. */
const SHARE = 0.2;
/** Milliseconds of a parse after which an answer is shown as it is: some texts take a parser ever longer. */
const TOO_SLOW = 1000;
/** Addresses that a link may have. Others are shown, and cannot be clicked. */
const ADDRESS = /^(https?:\/\/|mailto:)/i;

let Lexer = null;
let highlighter = null;

const loading = {
  parser: once(async () => ({ Lexer } = await import("./vendor/marked.js"))),
  highlighter: once(async () => ({ default: highlighter } = await import("./vendor/highlight.js"))),
};

function once(load) {
  let promise = null;
  return () => (promise ??= load().catch(() => null));
}

/** The formatted text of an answer, which may still grow. */
export class Formatted {
  /** language: the whole text is code of this language; null: it is Markdown. */
  constructor(language = null) {
    this.element = make("div", { class: "formatted" });
    this.language = language;
    this.text = "";
    this.blocks = [];
    this.links = "{}";
    this.timer = null;
    this.slow = false;
    if (!language) loading.parser().then(() => this.text && this.#draw());
  }

  add(text) {
    this.text += text;
    // A first piece shows at once, later ones as often as their parsing leaves time.
    if (!this.blocks.length) this.#draw();
    else this.timer ??= setTimeout(() => this.#draw(), this.pause);
  }

  close() {
    if (this.text) this.#draw();
  }

  #draw() {
    clearTimeout(this.timer);
    this.timer = null;
    const begin = performance.now();
    this.#show(this.language ? [{ type: "code", raw: this.text, text: this.text, lang: this.language, bare: true }] : this.#parse());
    const took = performance.now() - begin;
    this.slow ||= took > TOO_SLOW;
    this.pause = Math.max(30, took / SHARE);
  }

  #parse() {
    const plain = [{ type: "plain", raw: this.text }];
    if (!Lexer || this.slow || this.text.length > MOST) return plain;
    try {
      const tokens = new Lexer({ gfm: true, breaks: true }).lex(this.text);
      const links = JSON.stringify(tokens.links);
      // A definition may stand below the links that it completes.
      if (links !== this.links) this.blocks = [];
      this.links = links;
      return tokens.filter(({ type }) => type !== "space" && type !== "def");
    } catch {
      return plain; // Nested deeper than the parser can follow.
    }
  }

  /** Replaces the blocks that have changed, mostly the last one, so that a selection above stays. */
  #show(tokens) {
    const keys = tokens.map(({ type, raw }) => `${type} ${raw}`);
    let same = 0;
    while (same < keys.length && keys[same] === this.blocks[same]) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    this.blocks = keys;
    this.element.append(...tokens.slice(same).map((token) => block(token)));
  }
}

// -- blocks ---------------------------------------------------------------------------------------

function block(token) {
  const build = BLOCKS[token.type];
  return build ? build(token) : make("p", {}, ...inline(token));
}

const blocks = (tokens) => tokens.filter(({ type }) => type !== "space" && type !== "def").map(block);

const BLOCKS = {
  plain: ({ raw }) => make("div", { class: "plain" }, raw),
  html: ({ raw }) => make("div", { class: "plain" }, raw.trimEnd()),
  heading: (token) => make(`h${[2, 2, 2, 3, 4, 5, 6][token.depth]}`, { class: `depth-${token.depth}` }, ...inline(token)),
  hr: () => make("hr"),
  blockquote: ({ tokens }) => make("blockquote", {}, ...blocks(tokens)),
  list: ({ ordered, start, items }) =>
    make(ordered ? "ol" : "ul", { start: ordered && start !== 1 ? start : null }, ...items.map(listItem)),
  table: ({ header, rows }) => make(
    "div", { class: "table-box", tabindex: 0, role: "region", "aria-label": "Table" },
    make(
      "table", {},
      make("thead", {}, make("tr", {}, ...header.map((each) => tableCell("th", each)))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((each) => tableCell("td", each))))),
    ),
  ),
  code: codeBlock,
  // The text of a tight list's item.
  text: (token) => make("span", {}, ...inline(token)),
  checkbox: ({ checked }) => make("input", { type: "checkbox", disabled: true, checked, "aria-label": checked ? "done" : "to do" }),
};

function listItem({ task, tokens }) {
  return make("li", { class: task ? "task" : null }, ...blocks(tokens));
}

function tableCell(tag, cell) {
  return make(tag, { class: cell.align ? `to-${cell.align}` : null }, ...inline(cell));
}

function codeBlock({ text, lang, bare }) {
  const language = (lang ?? "").trim().split(/[\s,{]/)[0].toLowerCase();
  const code = make("code", {}, text);
  if (language) highlight(code, text, language);
  const box = make("pre", { tabindex: 0, role: "region", "aria-label": language ? `Code, ${language}` : "Code" }, code);
  if (bare) return box;
  const copy = make("button", { type: "button", class: "quiet" }, "Copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    } catch {
      getSelection().selectAllChildren(code);
    }
  });
  return make("div", { class: "code-box" }, make("div", { class: "code-head" }, make("span", {}, language || "text"), copy), box);
}

/** Colours code as soon as the highlighter is there. An unknown language stays as it is. */
async function highlight(code, text, language) {
  if (!highlighter) await loading.highlighter();
  if (!highlighter?.getLanguage(language)) return;
  try {
    const { _emitter: tree } = highlighter.highlight(text, { language, ignoreIllegals: true });
    code.replaceChildren(...tree.rootNode.children.map(highlighted));
  } catch {
    // The code stays without colours.
  }
}

function highlighted(node) {
  if (typeof node === "string") return node;
  const scope = (node.scope ?? "").split(".")[0];
  return make("span", { class: /^[a-z_-]+$/.test(scope) ? `hl-${scope}` : null }, ...node.children.map(highlighted));
}

// -- within a line --------------------------------------------------------------------------------

const INLINE = {
  escape: ({ text }) => decoded(text),
  text: (token) => (token.tokens ? inline(token) : decoded(token.text)),
  html: ({ raw }) => (/^<br\s*\/?>$/i.test(raw) ? make("br") : raw),
  br: () => make("br"),
  codespan: ({ text }) => make("code", {}, text),
  strong: (token) => make("strong", {}, ...inline(token)),
  em: (token) => make("em", {}, ...inline(token)),
  del: (token) => make("s", {}, ...inline(token)),
  link: (token) => link(token, inline(token)),
  // The page loads nothing from other hosts: an image is a link to it.
  image: (token) => link(token, [`Image: ${token.text || token.href}`]),
  checkbox: BLOCKS.checkbox,
};

function inline({ tokens = [], text = "" }) {
  if (!tokens.length) return [decoded(text)];
  return tokens.flatMap((token) => INLINE[token.type]?.(token) ?? token.raw);
}

function link({ href, raw }, children) {
  if (!ADDRESS.test(href)) return raw;
  return make("a", { href, target: "_blank", rel: "noopener noreferrer", title: href }, ...children);
}

const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", mdash: "—", ndash: "–", hellip: "…", times: "×", rarr: "→", larr: "←", le: "≤", ge: "≥" };

/** Replaces character references, which the parser leaves to HTML. */
function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z]{2,8}));/gi, (whole, decimal, hex, name) => {
    if (name) return Object.hasOwn(NAMED, name) ? NAMED[name] : whole;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}
