/* Small helpers. Text only ever becomes text: no markup is made from strings. */

export const $ = (id) => document.getElementById(id);

/** make("p", {class: "x", title: "y", onclick: f}, "text", child, ...) */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Says something to those who cannot see it. */
export function announce(text) {
  $("announcer").textContent = text;
}

/** Settings that outlive the tab; a browser that keeps none still works. */
export const store = {
  get(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`quire-${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`quire-${name}`, JSON.stringify(value));
    } catch {
      // Private windows may refuse.
    }
  },
};

export const calm = matchMedia("(prefers-reduced-motion: reduce)");

const probe = document.createElement("span");
const found = new Map();

/** The colour that a custom property stands for in the present theme, for canvases. */
export function colour(name) {
  if (!found.has(name)) {
    if (!probe.isConnected) {
      probe.hidden = true;
      document.body.append(probe);
    }
    probe.style.color = `var(--${name})`;
    found.set(name, getComputedStyle(probe).color);
  }
  return found.get(name);
}

export function forgetColours() {
  found.clear();
}

/** 1234 -> "1,234" */
export function number(value, digits = 0) {
  if (!Number.isFinite(value)) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** A duration in seconds, for people. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 0.01) return `${number(seconds * 1000, 1)} ms`;
  if (seconds < 1) return `${number(seconds * 1000)} ms`;
  if (seconds < 100) return `${number(seconds, 1)} s`;
  return `${number(seconds / 60, 1)} min`;
}

/** A number of bytes, for people. */
export function size(bytes) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  const step = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(1, bytes)) / 3));
  return `${number(bytes / 1000 ** step, step ? 1 : 0)} ${units[step]}`;
}
