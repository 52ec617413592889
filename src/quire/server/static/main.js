/* The frame: views, theme, key, notices. */

import { ApiError, explain, key, request } from "./api.js";
import { Chat } from "./chat.js";
import { $, forgetColours, make, store } from "./dom.js";
import { Engine } from "./engine.js";

const chat = new Chat({ onUnauthorized: askForKey });
const engine = new Engine({ onUnauthorized: askForKey });

// -- views ----------------------------------------------------------------------------------------

const tabs = ["chat", "engine"];

function show(name, focus = false) {
  for (const tab of tabs) {
    const on = tab === name;
    $(tab).hidden = !on;
    $(`tab-${tab}`).setAttribute("aria-selected", on);
    $(`tab-${tab}`).tabIndex = on ? 0 : -1;
  }
  if (focus) $(`tab-${name}`).focus();
  if (location.hash.slice(1) !== name) history.replaceState(null, "", `#${name}`);
  engine.watch(name === "engine");
  if (name === "chat" && !focus) chat.focus();
}

for (const name of tabs) {
  $(`tab-${name}`).addEventListener("click", () => show(name, true));
}
document.querySelector(".tabs").addEventListener("keydown", (event) => {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  show($("engine").hidden ? "engine" : "chat", true);
  event.preventDefault();
});
addEventListener("hashchange", () => show(location.hash === "#engine" ? "engine" : "chat"));

// -- theme ----------------------------------------------------------------------------------------

const THEMES = {
  auto: ["Theme: the system's", "M10 2a8 8 0 1 0 0 16Zm0 0a8 8 0 0 1 0 16"],
  light: ["Theme: light", "M10 6.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7Zm0-5v2m0 13v2m8.5-8.5h-2m-13 0h-2M16 4l-1.4 1.4M5.4 14.6 4 16m12 0-1.4-1.4M5.4 5.4 4 4"],
  dark: ["Theme: dark", "M16.5 12.2A7 7 0 0 1 7.8 3.5a7 7 0 1 0 8.7 8.7Z"],
};

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  store.set("theme", name);
  const [label, path] = THEMES[name];
  $("theme").replaceChildren(picture(path, name === "auto"));
  $("theme").setAttribute("aria-label", label);
  $("theme").title = label;
  themeChanged();
}

function picture(path, half) {
  const make = (tag) => document.createElementNS("http://www.w3.org/2000/svg", tag);
  const svg = make("svg");
  for (const [name, value] of Object.entries({ viewBox: "0 0 20 20", width: 18, height: 18 })) {
    svg.setAttribute(name, value);
  }
  path.split(half ? "m0 0" : "\0").forEach((part, i) => {
    const line = make("path");
    line.setAttribute("d", i ? `M10 2${part}` : part);
    line.setAttribute("fill", half && !i ? "currentColor" : "none");
    line.setAttribute("stroke", "currentColor");
    line.setAttribute("stroke-width", "1.5");
    line.setAttribute("stroke-linecap", "round");
    svg.append(line);
  });
  return svg;
}

function themeChanged() {
  forgetColours();
  engine.redraw();
}

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);

// -- notices --------------------------------------------------------------------------------------

/** One line above everything. action: [label, function] of a button. */
function notice(text, action = null) {
  $("notice").hidden = !text;
  $("notice-text").textContent = text ?? "";
  $("notice-action").hidden = !action;
  if (action) {
    $("notice-action").textContent = action[0];
    $("notice-action").onclick = action[1];
  }
}
$("notice-close").addEventListener("click", () => notice(null));

// -- key ------------------------------------------------------------------------------------------

function askForKey(error) {
  notice(explain(error), [key.get() ? "Change key" : "Enter key", openKey]);
}

function openKey() {
  $("key").value = key.get();
  $("key-dialog").showModal();
  $("key").select();
}

function useKey(value) {
  key.set(value.trim());
  $("key-dialog").close();
  notice(null);
  connect();
  engine.reconnect();
}

$("open-key").addEventListener("click", openKey);
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("key-forget").addEventListener("click", () => useKey(""));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
});

// -- start ----------------------------------------------------------------------------------------

/** Asks for the model's name: the first thing that tells whether key and engine are good. */
async function connect() {
  try {
    const [model] = (await (await request("v1/models")).json()).data;
    const length = make("span", { class: "wide-only" }, ` · ${model.max_model_len} tokens`);
    $("model").replaceChildren(model.id, length);
    $("welcome-model").textContent = model.id;
    chat.params.defaults(model.sampling_defaults);
    chat.images.allow(model.images);
    document.title = `${model.id} · Quire`;
    notice(null);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) askForKey(error);
    else notice(explain(error), ["Try again", connect]);
  }
}

setTheme(store.get("theme", "auto") in THEMES ? store.get("theme", "auto") : "auto");
show(location.hash === "#engine" ? "engine" : "chat");
connect();
