/* The pools of KV blocks: the used part as cells, one a block or, in large pools, one for several. The shape
 * tells what a block is (free, cached, in use, shared), the colour only whose it is. A bar above the cells
 * has the shares of the whole pool. */

import { laneColour, onResize, prepared } from "./canvas.js";
import { $, colour, make, number } from "./dom.js";

const FREE = -2;
const CACHED = -1;
/** From this many holders on (requests, and one for the prefix tree) requests share a block. */
const SHARED = 3;
const HEIGHT = 260;
/** Parts of a pool, in the order of the bar. */
const SHARES = { used: "in use", kept: "kept for reuse", free: "free" };
const LARGEST = 26;

export class Pools {
  constructor() {
    this.pools = new Map();
    this.names = new Map();
    this.lane = null;
    const legend = { free: "free", cached: "kept for reuse", used: "a request's", shared: "shared by several" };
    for (const [kind, name] of Object.entries(legend)) {
      const canvas = make("canvas", { "aria-hidden": "true", "data-kind": kind });
      $("pool-legend").append(make("li", {}, canvas, name));
    }
  }

  take(event, state) {
    if (event.running) this.names = new Map(state.running.map(([id, lane]) => [lane, id]));
    for (const change of event.pools ?? []) {
      let pool = this.pools.get(change.index);
      if (!pool) {
        pool = new Pool(change, this, state.engine.block_size);
        this.pools.set(change.index, pool);
        $("pools").append(pool.element);
      }
      pool.take(change);
    }
    if (event.stats) for (const [index, pool] of this.pools) pool.sum(event.stats, index);
  }

  /** Only this lane's blocks keep their colour; null: all. */
  highlight(lane) {
    if (lane === this.lane) return;
    this.lane = lane;
    this.draw();
  }

  draw() {
    for (const canvas of $("pool-legend").querySelectorAll("canvas")) {
      const sample = { free: [FREE, 0, 0], cached: [CACHED, 1, 1], used: [0, 2, 1], shared: [0, SHARED, 1] };
      cell(prepared(canvas, 14, 14), 0, 0, 14, sample[canvas.dataset.kind], 1);
    }
    for (const pool of this.pools.values()) pool.draw();
  }
}

class Pool {
  constructor({ blocks, window }, owner, blockSize) {
    this.owner = owner;
    this.blocks = blocks;
    this.blockSize = blockSize;
    this.cells = 0;
    this.at = null;
    this.canvas = make("canvas", {
      tabindex: 0, role: "img",
      "aria-label": `${number(blocks)} blocks. Arrow keys go from cell to cell.`,
    });
    const kind = window === null ? "" : `Layers with a window of ${number(window)}: `;
    this.title = `${kind}${number(blocks)} blocks`;
    this.total = make("span", {}, this.title);
    this.scale = make("span");
    this.caption = make("figcaption", {}, this.total, this.scale);
    this.shares = new Map(Object.keys(SHARES).map((name) => [name, make("i", { class: `share ${name}` })]));
    const bar = make("div", { class: "budget shares", "aria-hidden": "true" }, ...this.shares.values());
    this.element = make("figure", {}, bar, this.canvas, this.caption);
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#move(null));
    this.canvas.addEventListener("blur", () => this.#move(null));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    onResize(this.element, () => this.draw());
  }

  take({ cells, per_cell: perCell, runs }) {
    if (cells !== this.cells || perCell !== this.perCell) this.#fit(cells, perCell);
    for (const [first, count, ...value] of runs) this.values.fill(value, first, first + count);
    this.draw();
    if (this.at !== null) this.#tell();
  }

  /** The used part has another size: all cells follow. */
  #fit(cells, perCell) {
    this.cells = cells;
    this.perCell = perCell;
    this.values = Array.from({ length: cells }, () => [FREE, 0, 0]);
    this.at = null;
    const blocks = perCell > 1 ? `${number(perCell)} blocks` : "1 block";
    const rest = this.blocks - cells * perCell;
    this.scale.textContent = `A cell is ${blocks}, ${number(perCell * this.blockSize)} tokens.`
      + (rest > 0 ? ` The ${number(rest)} blocks behind these are free.` : "");
  }

  /** Shows how many of the pool's blocks are in use, kept, and free, by the engine's counts. */
  sum({ blocks_used: used, blocks_cached: kept, blocks_free: free }, index) {
    const counts = { used: used[index], kept: kept[index], free: free[index] };
    const told = [];
    for (const [name, share] of this.shares) {
      const percent = (100 * counts[name]) / Math.max(1, this.blocks);
      share.style.width = `${percent}%`;
      told.push(`${number(percent, percent > 0 && percent < 10 ? 1 : 0)} % ${SHARES[name]}`);
    }
    this.total.textContent = `${this.title}: ${told.join(", ")}`;
  }

  draw() {
    const width = this.element.clientWidth;
    if (width < 20) return;
    let size = LARGEST;
    while (size > 3 && Math.ceil(this.cells / Math.floor(width / size)) * size > HEIGHT) size -= 1;
    this.size = size;
    this.columns = Math.floor(width / size);
    const height = Math.ceil(this.cells / this.columns) * size;
    const context = prepared(this.canvas, this.columns * size, height);
    this.values.forEach((value, i) => {
      const dim = this.owner.lane !== null && value[0] !== this.owner.lane;
      context.globalAlpha = dim ? 0.25 : 1;
      cell(context, (i % this.columns) * size, Math.floor(i / this.columns) * size, size, value, this.perCell);
    });
    context.globalAlpha = 1;
    if (this.at !== null) {
      const [x, y] = [(this.at % this.columns) * size, Math.floor(this.at / this.columns) * size];
      context.strokeStyle = colour("ink");
      context.lineWidth = 2;
      context.strokeRect(x, y, size, size);
    }
  }

  #point({ offsetX, offsetY }) {
    const at = Math.floor(offsetY / this.size) * this.columns + Math.floor(offsetX / this.size);
    this.#move(at >= 0 && at < this.cells && offsetX < this.columns * this.size ? at : null);
  }

  #key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    const to = this.at === null ? 0 : this.at + steps[event.key];
    this.#move(Math.max(0, Math.min(this.cells - 1, to)));
    event.preventDefault();
  }

  #move(at) {
    if (at === this.at) return;
    this.at = at;
    this.draw();
    this.#tell();
  }

  #tell() {
    if (this.at === null) {
      $("pool-readout").textContent = "";
      return;
    }
    const [owner, holders, filled] = this.values[this.at];
    const first = this.at * this.perCell;
    const last = Math.min(this.blocks, first + this.perCell) - 1;
    const which = first === last ? `Block ${first}` : `Blocks ${first} to ${last}, ${filled} of them in use`;
    const id = this.owner.names.get(owner);
    const whose = owner === FREE ? "free" : owner === CACHED ? "kept for reuse" : id === undefined ? `lane ${owner}` : `request ${id}`;
    const count = holders > 0 ? `, ${holders} holder${holders > 1 ? "s" : ""}` : "";
    $("pool-readout").textContent = `${which}: ${whose}${count}`;
  }
}

/** A cell at x, y. value: [owner, holders, filled]. */
function cell(context, x, y, size, [owner, holders, filled], perCell) {
  const gap = size > 5 ? 1 : 0.5;
  const inner = size - 2 * gap;
  const alpha = context.globalAlpha;
  if (owner === FREE) {
    const dot = Math.max(1, size * 0.18);
    context.fillStyle = colour("edge");
    context.globalAlpha = alpha * 0.7;
    context.fillRect(x + (size - dot) / 2, y + (size - dot) / 2, dot, dot);
  } else if (owner === CACHED) {
    context.strokeStyle = colour("soft");
    context.lineWidth = size > 8 ? 1.5 : 1;
    context.globalAlpha = alpha * (0.45 + 0.55 * (filled / perCell));
    const inset = gap + size * 0.12;
    context.strokeRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
  } else {
    context.fillStyle = colour(laneColour(owner));
    context.globalAlpha = alpha * (0.4 + 0.6 * (filled / perCell));
    context.fillRect(x + gap, y + gap, inner, inner);
    if (holders >= SHARED) {
      const dot = Math.max(1.5, size * 0.34);
      context.fillStyle = colour("card");
      context.globalAlpha = alpha;
      context.fillRect(x + (size - dot) / 2, y + (size - dot) / 2, dot, dot);
    }
  }
  context.globalAlpha = alpha;
}
