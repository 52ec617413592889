/* The prefix tree, from left to right: a run of tokens beside those that go on from it. */

import { $, make, number } from "./dom.js";

const ROW = 22;

export class Tree {
  constructor() {
    this.items = [];
    this.focus = null;
    $("tree").addEventListener("keydown", (event) => this.#key(event));
    $("tree").addEventListener("focusin", (event) => this.#tell(event.target));
    $("tree").addEventListener("pointerover", (event) => this.#tell(event.target));
    $("tree").addEventListener("pointerleave", () => this.#tell(null));
  }

  take({ tree }) {
    if (!tree) return;
    $("tree-size").textContent = tree.nodes ? `${number(tree.nodes)} node${tree.nodes > 1 ? "s" : ""}` : "";
    const nodes = tree.branches.map(([parent, length, users, hidden, text], i) => ({ i, parent, length, users, hidden, text, children: [] }));
    const tops = [];
    for (const node of nodes) {
      const parent = nodes[node.parent];
      if (parent) parent.children.push(node);
      else tops.push(node);
    }
    // A root has no tokens: it is shown only where there are several, of several namespaces.
    const roots = tops.length > 1 ? tops : tops.flatMap((top) => top.children);
    this.#draw(roots);
  }

  #draw(roots) {
    if (!roots.length) {
      this.items = [];
      $("tree").replaceChildren(make("p", { class: "empty" }, "No prefix is kept yet."));
      // A tree must have items.
      $("tree").removeAttribute("role");
      $("tree").removeAttribute("aria-labelledby");
      $("tree").style.height = "";
      return;
    }
    const items = [];
    let row = 0;
    const lay = (node, x, level) => {
      const first = row;
      const wide = width(node);
      const item = { node, x, level, first, wide };
      items.push(item);
      for (const child of node.children) lay(child, x + wide, level + 1);
      if (!node.children.length) row += 1;
      item.rows = row - first;
    };
    for (const root of roots) lay(root, 0, 1);
    stretch(items);
    const held = this.focus;
    const had = $("tree").contains(document.activeElement);
    $("tree").setAttribute("role", "tree");
    $("tree").setAttribute("aria-labelledby", "tree-title");
    items.forEach((item, i) => {
      item.element = this.items[i]?.element ?? make("div", { role: "treeitem" });
      paint(item);
      item.element.tabIndex = -1;
    });
    this.items = items;
    this.focus = Math.min(held ?? 0, items.length - 1);
    items[this.focus].element.tabIndex = 0;
    const elements = items.map((item) => item.element);
    if (elements.length !== $("tree").children.length || $("tree").firstChild !== elements[0]) {
      $("tree").replaceChildren(...elements);
      if (had) elements[this.focus].focus({ preventScroll: true });
    }
    $("tree").style.height = `${row * ROW}px`;
  }

  #key(event) {
    const at = this.items.findIndex((item) => item.element === event.target);
    if (at < 0) return;
    const { node } = this.items[at];
    const of = (wanted) => this.items.findIndex((item) => item.node === wanted);
    const targets = {
      ArrowDown: () => at + 1,
      ArrowUp: () => at - 1,
      ArrowRight: () => (node.children.length ? of(node.children[0]) : at),
      ArrowLeft: () => this.items.findIndex((item) => item.node.children.includes(node)),
      Home: () => 0,
      End: () => this.items.length - 1,
    };
    if (!targets[event.key]) return;
    event.preventDefault();
    const to = targets[event.key]();
    if (to < 0 || to >= this.items.length) return;
    this.items[at].element.tabIndex = -1;
    this.focus = to;
    this.items[to].element.tabIndex = 0;
    this.items[to].element.focus();
  }

  #tell(element) {
    const item = this.items.find((each) => each.element === element);
    $("tree-readout").textContent = item ? describe(item.node) : "";
  }
}

/** Pixels: the more tokens the wider, but so that one and ten thousand both fit. */
const width = ({ length }) => (length ? 40 + 18 * Math.log2(1 + length / 8) : 90);

/** Fits the room there is, at most four times what is needed. */
function stretch(items) {
  const needed = Math.max(...items.map(({ x, wide }) => x + wide));
  const factor = Math.min(4, ($("tree").clientWidth - 4) / needed);
  for (const item of items) {
    item.x *= factor;
    item.wide = item.wide * factor - 2;
  }
}

function paint({ node, x, first, rows, wide, level, element }) {
  element.className = node.users ? "busy" : "";
  Object.assign(element.style, {
    left: `${x}px`, top: `${first * ROW}px`, width: `${wide}px`, height: `${rows * ROW - 2}px`,
  });
  element.setAttribute("aria-level", level);
  element.setAttribute("aria-label", describe(node));
  const label = node.text ? node.text.replace(/\s+/g, " ") : node.length ? number(node.length) : "namespace";
  const mark = node.users > 1 ? ` ×${node.users}` : "";
  const text = `${label}${mark}`;
  if (element.textContent !== text) element.textContent = text;
}

function describe({ length, users, hidden, children, text }) {
  const parts = [length ? `${number(length)} tokens` : "A namespace of its own"];
  parts.push(users ? `${users} request${users > 1 ? "s run" : " runs"} on it` : "no request runs on it");
  if (children.length + hidden) parts.push(`${children.length + hidden} go on from it`);
  if (hidden) parts.push(`${hidden} of them not shown`);
  return parts.join(", ") + (text ? `: ${text.replaceAll("\n", "↵")}…` : "");
}
